"""Run by ``torchrun`` in test_context_parallel: a batch cut over all ranks; rank 0 writes losses and gradients.

Arguments: the file to write to, and which of PARTS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock
from unittest.mock import patch as mocked

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend.context_audits import AUDITS, audited
from tests.torch_backend.context_refusals import LENGTHS, LONGROPE, refusals
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.torchrun import leave, weights_of
from tests.torch_backend.torchrun_loss import sharded, sharded_by_fsdp_1
from torch_backend import (
    PackedCollator,
    explain,
    make_train_step,
    patch,
)
from torch_backend.context_parallel import attention, exchange
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.forward import AttentionChoice
from torch_backend.hf.patch import state_of
from torch_backend.steps import averaging, cuda_graph, fast_backward
from torch_backend.steps.cuda_graph import compile_layers

# Of the few tokens each rank has one or two.
FEW = (3, 2)


class Case(NamedTuple):
    """A model that is trained under context parallelism.

    Attributes:
        family: of the model.
        changes: of its config.
        lengths: of the documents of the row.
        method: how attention crosses ranks.
        checkpointed: whether layers are run again in the backward.
        at_once: whether all pieces of a rank run at once, as long ones do.
        first: the position of the first token of every document.
    """

    family: str
    changes: dict[str, Any] = {}  # noqa: RUF012
    lengths: tuple[int, ...] = LENGTHS
    method: str = "keys"
    checkpointed: bool = False
    at_once: bool = False
    first: int = 0


ROUTED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
FOUR_HEADS_OF_KEYS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
CASES: dict[str, Case] = {
    "qwen3": Case("qwen3"),
    "qwen3, whole documents": Case("qwen3", lengths=(40, 40, 40, 40)),
    "qwen3, a few tokens": Case("qwen3", lengths=FEW),
    "qwen3, heads": Case("qwen3", FOUR_HEADS_OF_KEYS, method="heads"),
    "gpt_oss, window of 5": Case("gpt_oss", {"sliding_window": 5}),
    "gpt_oss, window of 100": Case("gpt_oss", {"sliding_window": 100}),
    "gpt_oss, heads": Case(
        "gpt_oss", {"sliding_window": 20, "num_attention_heads": 8, "num_key_value_heads": 4}, method="heads"
    ),
    "qwen3, checkpointed": Case("qwen3", checkpointed=True),
    "qwen3, at once": Case("qwen3", at_once=True),
    "gpt_oss, window of 5, at once": Case("gpt_oss", {"sliding_window": 5}, at_once=True),
    "qwen3, a few tokens, at once": Case("qwen3", lengths=FEW, at_once=True),
    "gemma2": Case("gemma2", {"sliding_window": 20}),
    "phi3, longrope": Case("phi3", LONGROPE),
    "gpt2": Case("gpt2"),
    "gpt2, positions from 9 on": Case("gpt2", first=9),
    "deepseek_v3": Case("deepseek_v3"),
    # Of the longer row, sums in float32 are 1.1e-6 off on four ranks, and 3e-8 with weights in float64.
    "qwen3_5_text": Case("qwen3_5_text", lengths=(5, 90, 17, 1, 7, 2)),
    "nemotron_h": Case("nemotron_h"),
    "bamba": Case("bamba", lengths=(5, 90, 17, 1, 7, 2)),
    "lfm2": Case("lfm2"),
    "lfm2, a few tokens": Case("lfm2", lengths=FEW),
    "mamba2": Case("mamba2"),
    "mamba2, one head": Case("mamba2", {"num_heads": 1, "head_dim": 128, "n_groups": 1}),
    "mamba": Case("mamba"),
    "recurrent_gemma": Case("recurrent_gemma"),
    "minimax": Case("minimax"),
    "qwen3_moe, router": Case("qwen3_moe", ROUTED),
    "gpt_oss, router, a few tokens": Case("gpt_oss", ROUTED, lengths=FEW),
}


def batch_of(model: Any, given: list[Tensor]) -> dict[str, Any]:
    """One row of documents; with padding and its mask for a model whose loss counts the router's tokens."""
    if not getattr(causal_lm(model).config, "output_router_logits", False):
        return collate(given, capacity=None)
    capacity = sum(map(len, given)) + 19
    return PackedCollator(causal_lm(model), capacity=capacity)([{"input_ids": ids.tolist()} for ids in given])


def run(case: Case, mesh: Any = None) -> dict[str, Any]:
    """The loss of a batch, the gradients, and what explain says."""
    options = {} if mesh is None else {"mesh": mesh, "context_method": case.method}
    model = patch(tiny(case.family, **case.changes), verify=False, **options)
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    at_once = mocked.object(attention, "runs_at_once", lambda layout: layout.continuing is not None)
    batch = batch_of(model, documents(case.lengths))
    with at_once if case.at_once else nullcontext():
        output = model(**{**batch, "position_ids": batch["position_ids"] + case.first})
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if mesh is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= mesh.size()
    return {
        "loss": float(output.loss.detach()),
        "gradients": gradients,
        "tokens": output.logits.shape[1],
        "explained": str(explain(model)),
    }


STEPS = [[LENGTHS, (20, 9, 70)], [(64, 3, 90), LENGTHS]]  # documents of each microbatch
# name -> the family, and what its layers keep
MEMORY: dict[str, tuple[str, str]] = {
    "selective": ("qwen3", "selective"),
    "attention": ("qwen3", "attention"),
    "full": ("qwen3", "full"),
    "hybrid, selective": ("qwen3_5_text", "selective"),
    "hybrid, full": ("qwen3_5_text", "full"),
}
# Of the first, convolutions and scans exchange; of the second, without our kernels, whole documents run.
COMPILED_HYBRIDS = ("qwen3_5_text", "recurrent_gemma")
COMPILED_LEVELS = {name: MEMORY[name] for name in ("selective", "attention", "full", "hybrid, full")}
COMPILED_LEVELS |= {"offload": ("qwen3", "offload")}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": sharded,
    "FSDP1": sharded_by_fsdp_1,
}


def train(
    wrap: Callable[[Any], Any] | None = None,
    mesh: Any = None,
    shares: int = 1,
    share: int = 0,
    family: str = "qwen3",
    memory: Any = None,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The metrics of steps, with weighted targets unless the config changes, and the weights after them.

    Args:
        wrap: what is around the model.
        mesh: over which documents are cut.
        shares, share: of the microbatches; every group of ranks takes one of these parts.
        family: of the model.
        memory: what its layers keep.
        changes: of its config.
    """
    model = patch(tiny(family, **(changes or {})), verify=False, mesh=mesh)
    model = model if wrap is None else wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_train_step(model, optimizer, max_grad_norm=0.5, memory=memory)
    metrics = []
    for microbatches in STEPS:
        batches = [batch_of(model, documents(lengths, seed)) for seed, lengths in enumerate(microbatches)]
        for batch in batches if changes is None else ():
            generator = torch.Generator().manual_seed(5)
            batch["loss_weights"] = torch.rand(batch["input_ids"].shape, generator=generator)
        metrics.append({name: float(x) for name, x in step(batches[share::shares]).items()})
    held_out = [batch_of(model, documents(LENGTHS, 7))]
    evaluated = {name: float(x) for name, x in step.evaluate(held_out).items()}
    explained = str(explain(step))
    return {"metrics": metrics, "evaluated": evaluated, "weights": weights_of(model), "explained": explained}


def averaged(mesh: Any) -> dict[str, Any]:
    """Returns the events of a backward whose gradients fill many buckets: "gradient" of a weight, or "average"."""
    model = DistributedDataParallel(patch(tiny("qwen3"), verify=False, mesh=mesh), bucket_cap_mb=0.001)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    events: list[str] = []

    average = averaging.average

    def noted(x: Tensor, group: Any) -> None:
        events.append("average")
        average(x, group)

    with mocked.object(averaging, "average", noted):
        for _ in range(2):  # after the first one DDP makes its buckets anew
            events.clear()
            step(batch_of(model, documents(LENGTHS)))
    return {"events": events}


def compiled(wrap: Callable[[Any], Any], mesh: Any, **options: Any) -> dict[str, Any]:
    """As :func:`train`, with layers that are compiled on the CPU, and how many graphs were made."""
    made: set[Any] = set()

    def backend(graph: Any, inputs: list[Any]) -> Any:
        made.add(graph)
        return aot_eager(graph, inputs)

    def compile_eagerly(model: Any, **given: Any) -> None:
        compile_layers(model, **{**given, "backend": backend})

    with mocked.object(cuda_graph, "DEVICE", "cpu"), mocked.object(fast_backward, "compile_layers", compile_eagerly):
        return {**train(wrap, mesh, **options), "graphs": len(made)}


METHODS = ("keys", "heads")


def sent(method: str, mesh: Any) -> dict[str, int]:
    """The numbers that leave ranks in the forward and the backward of a model, and what its layers expect to send."""
    model = patch(tiny("qwen3", **FOUR_HEADS_OF_KEYS), verify=False, mesh=mesh, context_method=method)
    counted, rank = [0], mesh.get_local_rank()

    def counting(output: Tensor, x: Tensor, receive: list[int], send: list[int], **options: Any) -> Any:
        own = send[rank] * x[:1].numel()
        counted[0] += x.numel() - own
        return dist.all_to_all_single(output, x, receive, send, **options)

    def total() -> int:
        everywhere = torch.tensor(counted.pop())
        counted.append(0)
        dist.all_reduce(everywhere)
        return int(everywhere)

    with mocked.object(exchange, "dist", Mock(all_to_all_single=counting)):
        output = model(**collate(documents(LENGTHS), capacity=None))
        forward = total()
        output.loss.backward()
    state = state_of(model)
    assert state is not None
    crossings = [choice.crossing for choice in state.choices.values() if isinstance(choice, AttentionChoice)]
    expected = sum(crossing.sent[method] or 0 for crossing in crossings if crossing is not None)
    return {"forward": forward, "backward": total(), "expected": expected, "layers": len(crossings)}


def dropped(mesh: Any) -> dict[str, Any]:
    """Compares what ranks that were seeded alike drop of the tokens that they hold first, and drop when recomputing."""
    torch.manual_seed(0)
    model = patch(tiny("phi3"), verify=False, mesh=mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    dropout = model.model.layers[0].resid_attn_dropout  # recomputing stops inside the last one
    dropout.p = 0.5
    masks: list[Tensor] = []
    dropout.register_forward_hook(lambda module, inputs, output: masks.append(output[0, :20] == 0))
    model(**collate(documents(LENGTHS), capacity=None)).loss.backward()
    forward, recomputed = masks

    def of_ranks(x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(found, x)
        return found

    first, *others = of_ranks(forward.float())
    return {
        "dropped": float(first.mean()),
        "alike": [float((first == other).float().mean()) for other in others],
        "recomputed": torch.equal(forward, recomputed),
        "afterwards": [x.tolist() for x in of_ranks(torch.rand(3))],
    }


def attempt(what: Callable[[], Any]) -> Any:
    """Returns what the call returns, or the text of its error."""
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


PARTS = ("models", "steps", "compiled", "audits")  # of what is run, each within the limit of one start


def main(target: Path, part: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))["cp"]
    world = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "cp"))
    results = {}
    if part == "models":
        results |= {name: attempt(partial(run, case, mesh)) for name, case in CASES.items()}
        results |= {f"refuse, {name}": attempt(what) for name, what in refusals(mesh, world).items()}
        results |= {f"sent, {method}": attempt(partial(sent, method, mesh)) for method in METHODS}
        results["dropped"] = attempt(partial(dropped, mesh))
    if part == "steps":
        results |= steps(mesh, world)
    if part == "compiled":
        results |= compiled_steps(mesh)
    if part == "audits":
        results |= {f"audit, {name}": attempt(partial(audited, name, mesh)) for name in AUDITS}
    if dist.get_rank() == 0:
        torch.save(results, target)
    leave()


def steps(mesh: Any, world: Any) -> dict[str, Any]:
    """The runs of :func:`train`, by name."""
    results = {}
    results |= {f"step, {name}": attempt(partial(train, wrap, mesh)) for name, wrap in WRAPPERS.items()}
    for name, (family, memory) in MEMORY.items():
        recomputing = partial(train, DistributedDataParallel, mesh, family=family, memory=memory)
        results[f"memory, {name}"] = attempt(recomputing)
    routed = partial(train, DistributedDataParallel, mesh, family="qwen3_moe", changes=ROUTED)
    results["step, router"] = attempt(routed)
    results["averaged"] = attempt(partial(averaged, mesh))
    if dist.get_world_size() == 4:
        several = partial(train, DistributedDataParallel, world["cp"], 2, world.get_local_rank("dp"))
        results["step, two groups"] = attempt(several)
        hybrid = partial(sharded_by_fsdp_1, device_mesh=world, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        results["step, FSDP1, hybrid"] = attempt(partial(train, hybrid, mesh))
    return results


def compiled_steps(mesh: Any) -> dict[str, Any]:
    """The runs of :func:`compiled`, by name; on two ranks alone, because compiling takes long."""
    results = {}
    for name, (family, level) in COMPILED_LEVELS.items():
        recomputing = partial(compiled, DistributedDataParallel, mesh, family=family, memory=level)
        results[f"compiled, {name}"] = attempt(recomputing)
    if mesh.size() == 2:
        results |= {f"compiled, {name}": attempt(partial(compiled, wrap, mesh)) for name, wrap in WRAPPERS.items()}
        # every weight fills a bucket
        small = partial(DistributedDataParallel, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        results["compiled, small buckets"] = attempt(partial(compiled, small, mesh))
        for family in COMPILED_HYBRIDS:
            hybrid = partial(compiled, DistributedDataParallel, mesh, family=family)
            results[f"compiled, {family}"] = attempt(hybrid)
    return results


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
