"""Losses of log-probabilities whose documents are cut over ranks have the values and the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch as mocked

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend.context_parallel.test_context_parallel import FEW, LENGTHS, ROUTED, all_ranks
from tests.torch_backend.models import collate, documents, in_float64, tiny
from tests.torch_backend.ranks import on_ranks, refused
from tests.torch_backend.wrappers import (
    Model,
    Wrapper,
    adapted,
    assert_same_loss,
    gradients,
    plain,
    sharded,
    sharded_adapters,
)
from torch_backend import PackedCollator, normalise, patch, record_routing, reduce, replay_routing, token_logprobs
from torch_backend.context_parallel import exchange
from torch_backend.context_parallel.share import RankShare
from torch_backend.losses import next_tokens
from torch_backend.losses import token_logprobs as scoring
from torch_backend.losses.distillation import causal_lm_divergence, distillation_loss
from torch_backend.losses.policy import policy_loss
from torch_backend.losses.preference import dpo_loss

pytestmark = pytest.mark.slow  # starts processes that train

WHOLE = (40, 40, 40, 40)
ROWS = (5, 19, 33, 7, 40, 1, 2, 18)  # two rows of 64, the second one with padding
# Pairs of documents; of two groups of ranks, the first one has three pairs and the other one has one.
PAIRS = ((40, 3), (5, 19), (33, 7), (9, 90))
Batch = dict[str, Any]
Loss = Callable[[Any, Batch, Any], Tensor]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# -- losses --------------------------------------------------------------------------------------------------------


def every_value(model: Model, batch: Batch, reference: Model) -> Tensor:
    """A random combination of all that is differentiable, and the term of the model's own."""
    found = token_logprobs(model, batch, temperature=0.7, entropy=True, top_k=3)
    assert found.entropy is not None and found.candidate_logprobs is not None
    values = torch.cat([found.logprobs[..., None], found.entropy[..., None], found.candidate_logprobs], -1)
    return (values * random(*values.shape)).sum() / len(values) + 10 * found.auxiliary


def policy(model: Model, batch: Batch, reference: Model, **options: Any) -> Tensor:
    """GRPO with a reference and a bonus for entropy; advantages and old probabilities follow from the ids."""
    found = token_logprobs(model, batch, entropy=True)
    assert found.entropy is not None
    with torch.no_grad():
        expected = token_logprobs(reference, batch).logprobs
    ids = batch["input_ids"].double()
    loss, count = policy_loss(
        found.logprobs,
        batch,
        torch.sin(reduce(ids, batch, "sum")),
        old=found.logprobs.detach() + 0.3 * torch.sin(ids),
        reference=expected,
        beta=0.1,
        **options,
    )
    trained = batch["labels"] != -100
    bonus = normalise(found.entropy.sum(), trained.sum())
    return normalise(loss, count) - 0.2 * bonus


def preference(model: Model, batch: Batch, reference: Model) -> Tensor:
    """DPO; documents that follow each other are pairs."""
    sums = reduce(token_logprobs(model, batch).logprobs, batch, "sum")
    with torch.no_grad():
        expected = reduce(token_logprobs(reference, batch).logprobs, batch, "sum")
    losses = dpo_loss(sums[::2], sums[1::2], expected[::2], expected[1::2])
    return normalise(losses.sum(), torch.tensor(float(len(losses))))


def distillation(model: Model, batch: Batch, reference: Model) -> Tensor:
    """The reference as a teacher."""
    with torch.no_grad():
        teacher = token_logprobs(reference, batch, top_k=4)
    student = token_logprobs(model, batch, candidates=teacher.candidates)
    assert student.candidate_logprobs is not None and teacher.candidate_logprobs is not None
    losses = distillation_loss(student.candidate_logprobs, teacher.candidate_logprobs)
    return normalise(losses.sum(), (batch["labels"] != -100).sum())


def divergence(model: Model, batch: Batch, reference: Model) -> Tensor:
    """The reference as a teacher, over the whole vocabulary; a rank has the sum of its own tokens, weighted by id."""
    weighted = {**batch, "loss_weights": 1 + torch.sin(batch["labels"].double()) / 2}
    return normalise(*causal_lm_divergence(model, reference, weighted, beta=0.5))


def replayed(model: Model, batch: Batch, reference: Model) -> Tensor:
    """A random combination of log-probabilities at the experts that the reference chose in other rows."""
    with record_routing(reference) as record, torch.no_grad():
        token_logprobs(reference, collate(documents(ROWS), capacity=None))
    with replay_routing(model, record):
        logprobs = token_logprobs(model, batch).logprobs
    return (logprobs * random(*logprobs.shape)).sum()


# -- cases ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A loss of a model on one batch."""

    loss: Loss  # of the model, the batch and a reference model
    family: str = "qwen3"
    changes: dict[str, Any] = {}  # noqa: RUF012 # of the model's config
    lengths: tuple[int, ...] = LENGTHS  # of the documents
    part: slice = slice(None)  # of these documents
    capacity: int | None = None  # of the rows; None for one row without padding
    untrained: int = 0  # as many of the first documents have no target
    one: Wrapper = plain  # what is around the model on one process
    many: Wrapper = plain  # and on several
    single: bool = False  # whether the model computes in float32
    bare: bool = False  # whether the batch does not say where its documents begin, so that every rank runs it whole
    ranks: int = 2  # which cut documents


def recomputing(model: Model) -> Model:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


PAIRED = tuple(length for pair in PAIRS for length in pair)
CASES: dict[str, Case] = {
    "without boundaries": Case(every_value, lengths=WHOLE[:1], bare=True),
    "a few tokens": Case(every_value, lengths=FEW, ranks=4),  # two ranks have no target
    "ranks without targets": Case(every_value, lengths=WHOLE, untrained=3),
    "rows with padding": Case(every_value, lengths=ROWS, capacity=64),
    "softcap and windows": Case(every_value, "gemma2", {"sliding_window": 20}, ranks=4),
    "recurrent": Case(every_value, "mamba"),
    "router": Case(every_value, "qwen3_moe", ROUTED, lengths=ROWS, capacity=64),
    "routing of other rows": Case(replayed, "qwen3_moe", lengths=ROWS, capacity=64, ranks=4),
    "routing, layers that recompute": Case(
        replayed,
        "qwen3_moe",
        lengths=ROWS,
        capacity=64,
        many=lambda model: DistributedDataParallel(recomputing(model), find_unused_parameters=True),
    ),
    "policy": Case(policy, lengths=ROWS, capacity=64),
    "policy by tokens": Case(partial(policy, per="token"), untrained=1, ranks=4),
    "policy by sequences": Case(partial(policy, ratio="sequence"), many=DistributedDataParallel),
    "policy, layers that recompute": Case(policy, many=lambda model: DistributedDataParallel(recomputing(model))),
    "policy in float32": Case(policy, single=True),
    "preference, hybrid": Case(preference, "qwen3_5_text", lengths=PAIRED, ranks=4),
    "preference, DDP": Case(preference, lengths=PAIRED, many=DistributedDataParallel),
    "FSDP2, head on its own": Case(every_value, many=lambda model: sharded(model, "lm_head")),
    "FSDP2, LoRA on the head": Case(preference, "qwen2", lengths=PAIRED, one=adapted, many=sharded_adapters),
    "distillation": Case(distillation, lengths=ROWS, capacity=64),
    "divergence": Case(divergence, lengths=ROWS, capacity=64, ranks=4),
    "divergence, FSDP2, head on its own": Case(divergence, many=lambda model: sharded(model, "lm_head")),
}


def batch_of(model: Model, case: Case) -> Batch:
    docs = documents(case.lengths)[case.part]
    labels = [ids if number >= case.untrained else ids * 0 - 100 for number, ids in enumerate(docs)]
    rows = [{"input_ids": ids, "labels": of_ids} for ids, of_ids in zip(docs, labels, strict=True)]
    collator = PackedCollator(model, capacity=case.capacity, strategy="sequential")
    found: Batch = collator(rows)
    return {name: found[name] for name in ("input_ids", "labels")} if case.bare else found


def models_of(case: Case, mesh: Any) -> tuple[Model, Model]:
    """A model and a reference, both over the ranks of a mesh."""
    made = (tiny(case.family, seed=seed, **case.changes) for seed in (0, 1))
    cast = (model if case.single else in_float64(model) for model in made)
    model, reference = (patch(model, verify=False, mesh=mesh) for model in cast)
    return model, reference


def run(case: Case, mesh: Any = None, group: Any = None) -> dict[str, Any]:
    """The loss, all values, the gradients, and of how many tokens the output layer was asked.

    Args:
        mesh: over which documents are cut; None for one process.
        group: of ranks that average their gradients; None for those of the mesh.
    """
    model, reference = models_of(case, mesh)
    batch = batch_of(model, case)
    asked: list[int] = []

    def counting(head: Any, hidden: Tensor, *args: Any, **options: Any) -> Any:
        asked.append(hidden[..., 0].numel())
        return stock(head, hidden, *args, **options)

    stock = scoring.output_layer_logprobs
    wrapped = (case.one if mesh is None else case.many)(model)
    with mocked.object(scoring, "output_layer_logprobs", counting):
        loss = case.loss(wrapped, batch, reference)
        loss.backward()
        found = gradients(wrapped)
        with torch.no_grad():
            values = token_logprobs(wrapped, batch, entropy=True, top_k=2)
    total = loss.detach().clone()
    if mesh is not None:
        world = dist.get_world_size(group)
        for x in (total, *(found.values() if case.many is plain else ())):
            dist.all_reduce(x, group=group)
            x /= world
    return {
        "loss": float(total),
        "values": values._asdict(),
        "gradients": found,
        "tokens": batch["labels"].numel(),
        "asked": max(asked),
    }


def on_rank(name: str) -> dict[str, Any]:
    return run(CASES[name], all_ranks())


@pytest.mark.parametrize("name", CASES)
def test_losses_over_documents_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    one, many = run(case), on_ranks(on_rank, name, ranks=case.ranks)
    assert_same_loss(many, one)
    largest = max(1.0, float(one["values"]["logprobs"].abs().max()))
    for key, value in one["values"].items():
        if value is not None:
            found = many["values"][key]
            assert (found.shape, found.dtype) == (value.shape, value.dtype), key
            assert float((found - value).abs().max()) <= 1e-6 * largest, key
    assert case.bare or many["asked"] < one["asked"]  # no rank has the logits of all tokens


def in_groups(loss: Loss) -> dict[str, Any]:
    """A loss of pairs, of which groups of two ranks have unequal numbers."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mine = (slice(6), slice(6, None))[world.get_local_rank("dp")]
    return run(Case(loss, lengths=PAIRED, part=mine), world["cp"], dist.group.WORLD)


@pytest.mark.parametrize("loss", [preference, policy])
def test_groups_with_unequal_numbers_of_documents_are_one_batch(loss: Loss) -> None:
    assert_same_loss(on_ranks(in_groups, loss, ranks=4), run(Case(loss, lengths=PAIRED)))


# -- what is broken ------------------------------------------------------------------------------------------------


def _own_alone(x: Tensor, share: RankShare) -> Tensor:
    """Each rank has a loss of its own tokens alone, a mean over these, and the mean of the means is taken."""
    found = x.new_zeros(int(share.plan.lengths.sum()), *x.shape[1:])
    return found.index_copy(0, share.index, x)


def _labels_of_a_part(self: Any, labels: Tensor) -> Tensor:
    """Labels that are shifted after the cut."""
    return torch.cat([labels[:, 1:], labels.new_full((1, 1), -100)], 1)


def _unscaled(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange.own_tokens(gradient, ctx.share), None


BROKEN_CASE = "policy"
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "mean of means": (next_tokens, "whole_tokens", _own_alone),
    "shifted after the cut": (next_tokens.NextTokensOverRanks, "targets", _labels_of_a_part),
    "gradients of a part": (exchange._Whole, "backward", staticmethod(_unscaled)),
}


def broken(name: str) -> dict[str, Any]:
    with mocked.object(*BROKEN[name]):
        return on_rank(BROKEN_CASE)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_exact_is_seen(name: str) -> None:
    found = on_ranks(broken, name)
    with pytest.raises(AssertionError):
        assert_same_loss(found, run(CASES[BROKEN_CASE]))


# -- what is refused -----------------------------------------------------------------------------------------------


def over_ranks(model: Model) -> Model:
    return patch(model, verify=False, mesh=all_ranks())


def shared_prefixes() -> Any:
    model = over_ranks(tiny("qwen3"))
    prompt, *ends = documents((40, 9, 12))
    rows = [{"input_ids": torch.cat([prompt, end])} for end in ends]
    return token_logprobs(model, PackedCollator(model, share_prefix=True)(rows))


def own_loss() -> Any:
    model = over_ranks(tiny("qwen3"))
    model.loss_function = lambda logits, labels, **_: logits.sum()
    return token_logprobs(model, collate(documents(LENGTHS), capacity=None))


def scored(given: Callable[[Batch, int], Batch] = lambda batch, rank: batch, **options: Any) -> Any:
    """Scores a batch that ``given`` changes, by the rank, with options that depend on the rank."""
    batch, rank = collate(documents(LENGTHS), capacity=None), dist.get_rank()
    chosen = {name: value(batch, rank) for name, value in options.items()}
    return token_logprobs(over_ranks(tiny("qwen3")), given(batch, rank), **chosen)


def ids_of(batch: Batch) -> Tensor:
    return batch["input_ids"][..., None]


OTHER = "LayoutError: the ranks of a context-parallel group call token_logprobs with different options or candidates"
# Calls that must raise on all ranks alike, so that none of them waits, by what they raise.
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("UnsupportedModelError: Qwen3ForCausalLM cannot run shared prefixes: the documents of its", shared_prefixes),
    ("UnsupportedModelError: Qwen3ForCausalLM has a loss function of its own", own_loss),
    (OTHER, partial(scored, entropy=lambda batch, rank: rank == 0)),
    (OTHER, partial(scored, top_k=lambda batch, rank: rank + 1)),
    (OTHER, partial(scored, candidates=lambda batch, rank: ids_of(batch) + rank)),
    (OTHER, partial(scored, candidates=lambda batch, rank: ids_of(batch) if rank == 0 else None)),
    (
        "LayoutError: the ranks of a context-parallel group have different batches",
        partial(scored, lambda batch, rank: collate(documents(LENGTHS, seed=rank), capacity=None)),
    ),
    (
        "LayoutError: token_logprobs takes labels as they stand with the tokens",
        partial(scored, lambda batch, rank: {**batch, "shift_labels": batch["labels"]}),
    ),
    (
        "UnsupportedError: a batch with inputs_embeds cannot be cut over ranks",
        partial(scored, lambda batch, rank: {**batch, "input_ids": None, "inputs_embeds": torch.zeros(1, 238, 64)}),
    ),
]


def refuse(number: int) -> None:
    REFUSED[number][1]()


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_has_no_log_probabilities_over_ranks_is_refused(number: int) -> None:
    assert all(error.startswith(REFUSED[number][0]) for error in refused(refuse, number))
