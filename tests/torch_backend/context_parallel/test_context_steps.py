"""Steps of training whose documents are cut over ranks are those of one process: wrapped, recomputed and compiled."""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from unittest.mock import patch as mocked

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend.context_parallel.test_context_parallel import LENGTHS, ROUTED, all_ranks, batch_of
from tests.torch_backend.models import documents, tiny
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.wrappers import Wrapper, assert_same_weights, sharded, sharded_by_fsdp_1, weights_of
from torch_backend import explain, make_train_step, patch
from torch_backend.steps import cuda_graph, fast_backward, graph_collectives
from torch_backend.steps.cuda_graph import compile_layers

pytestmark = pytest.mark.slow  # starts processes that train

NO_GRAPH = (
    "its documents are cut over ranks, into other pieces in every batch",
    "gradients are reduced over ranks during the backward",  # by FSDP1
)
STEPS = [[LENGTHS, (20, 9, 70)], [(64, 3, 90), LENGTHS]]  # documents of each microbatch


def train(
    wrap: Wrapper | None = None,
    mesh: Any = None,
    shares: int = 1,
    share: int = 0,
    family: str = "qwen3",
    memory: Any = None,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The metrics of steps, with weighted targets unless the config changes, and the weights after them.

    Every group of ranks takes one ``share`` of the microbatches in ``shares``.
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


@cache
def on_one_process(family: str = "qwen3", routed: bool = False) -> dict[str, Any]:
    return train(family=family, changes=ROUTED if routed else None)


def assert_same_steps(many: Any, one: dict[str, Any], groups: int = 1) -> None:
    """The ranks have taken the steps of one process."""
    for found, wanted in zip(many["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert many["evaluated"]["loss"] == pytest.approx(one["evaluated"]["loss"], rel=1e-5)
    assert many["evaluated"]["tokens"] == one["evaluated"]["tokens"] * groups
    assert_same_weights(many["weights"], one["weights"])
    assert any(f"no CUDA graph: {reason}" in many["explained"] for reason in NO_GRAPH)


HYBRID = "qwen3_5_text"
# Every weight fills a bucket.
WRAPPERS: dict[str, Wrapper] = {
    "DDP": DistributedDataParallel,
    "DDP, small buckets": partial(DistributedDataParallel, bucket_cap_mb=0.001, gradient_as_bucket_view=True),
    "FSDP2": sharded,
    "FSDP1": sharded_by_fsdp_1,
}


def wrapped(name: str, **options: Any) -> dict[str, Any]:
    return train(WRAPPERS[name], all_ranks(), **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DDP", {}),
        ("FSDP2", {}),
        ("FSDP1", {}),
        ("DDP", {"memory": "selective"}),
        ("DDP", {"memory": "attention"}),
        ("DDP", {"memory": "full"}),
        ("DDP", {"family": HYBRID, "memory": "selective"}),
        ("DDP", {"family": HYBRID, "memory": "full"}),
    ],
    ids=str,
)
def test_steps_over_ranks_are_those_of_one_process(name: str, options: dict[str, str]) -> None:
    """Layers that recompute exchange again."""
    assert_same_steps(on_ranks(wrapped, name, **options), on_one_process(options.get("family", "qwen3")))


def in_two_groups() -> dict[str, Any]:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return train(DistributedDataParallel, world["cp"], 2, world.get_local_rank("dp"))


def sharded_in_two_groups() -> dict[str, Any]:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    hybrid = partial(sharded_by_fsdp_1, device_mesh=world, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    return train(hybrid, all_ranks())


def test_steps_of_two_groups_are_those_of_one_process() -> None:
    assert_same_steps(on_ranks(in_two_groups, ranks=4), on_one_process(), groups=2)
    assert_same_steps(on_ranks(sharded_in_two_groups, ranks=4), on_one_process())


def test_steps_over_ranks_add_the_loss_of_routers_once() -> None:
    one = on_one_process("qwen3_moe", routed=True)
    assert one["metrics"][0]["loss"] > 1.1 * on_one_process("qwen3_moe")["metrics"][0]["loss"]
    assert_same_steps(on_ranks(wrapped, "DDP", family="qwen3_moe", changes=ROUTED), one)


def averaged() -> list[str]:
    """Returns the events of a backward whose gradients fill many buckets: "gradient" of a weight, or "average"."""
    model = DistributedDataParallel(patch(tiny("qwen3"), verify=False, mesh=all_ranks()), bucket_cap_mb=0.001)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    events: list[str] = []

    average = graph_collectives.average

    def noted(x: Tensor, group: Any) -> None:
        events.append("average")
        average(x, group)

    with mocked.object(graph_collectives, "average", noted):
        for _ in range(2):  # after the first one DDP makes its buckets anew
            events.clear()
            step(batch_of(model, documents(LENGTHS)))
    return events


def test_gradients_are_averaged_after_the_backward() -> None:
    events = on_ranks(averaged)
    gradients = events.count("gradient")
    assert len(events) > gradients + 1
    assert events[:gradients] == ["gradient"] * gradients


def compiled(name: str, **options: Any) -> dict[str, Any]:
    """As :func:`train`, with layers that are compiled on the CPU, and how many graphs were made."""
    torch._dynamo.reset()
    made: set[Any] = set()

    def backend(graph: Any, inputs: list[Any]) -> Any:
        made.add(graph)
        return aot_eager(graph, inputs)

    def compile_eagerly(model: Any, **given: Any) -> None:
        compile_layers(model, **{**given, "backend": backend})

    with mocked.object(cuda_graph, "DEVICE", "cpu"), mocked.object(fast_backward, "compile_layers", compile_eagerly):
        return {**wrapped(name, **options), "graphs": len(made)}


LEVELS = {
    "attention": ', memory="attention", around what exchanges between ranks'
    ", keeping what triton and flash4 attention return",
    "full": ', memory="full", around what exchanges between ranks',
    "offload": ', memory="offload", around what exchanges between ranks, with the inputs of layers on the device',
    None: ", around what exchanges between ranks",
}


@pytest.mark.parametrize(
    ("name", "family", "level"),
    [
        ("FSDP2", "qwen3", None),
        ("DDP", "recurrent_gemma", None),  # of which, without our kernels, whole documents run
        ("DDP", HYBRID, "full"),  # whose convolutions and scans exchange
        ("DDP", "qwen3", "attention"),
        ("DDP", "qwen3", "offload"),
    ],
)
def test_layers_are_compiled_around_what_exchanges(name: str, family: str, level: Any) -> None:
    found = on_ranks(compiled, name, family=family, memory=level)
    assert_same_steps(found, on_one_process(family))
    assert f"layers of the step: compiled{LEVELS[level]}\n" in found["explained"]
    assert found["graphs"] > 0


def test_a_level_that_chooses_among_operations_leaves_layers_as_they_are() -> None:
    found = on_ranks(compiled, "DDP", memory="selective")
    assert_same_steps(found, on_one_process())
    assert 'among whose operations memory="selective" cannot choose' in found["explained"]
    assert found["graphs"] == 0


def test_buckets_of_gradients_do_not_split_compiled_layers() -> None:
    few, many = (on_ranks(compiled, name) for name in ("DDP", "DDP, small buckets"))
    for found in (few, many):
        assert_same_steps(found, on_one_process())
        assert "layers of the step: compiled, around what exchanges between ranks" in found["explained"]
    assert 0 < many["graphs"] <= few["graphs"]
