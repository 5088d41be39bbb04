"""Recurrences that hand their states on between the pieces of a document on several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from packing_core.planning.context import ContextPlan, context_plan
from packing_core.planning.cost import Cost
from tests.torch_backend.context_parallel.test_context_parallel import Case, all_ranks, run
from tests.torch_backend.kernels import interpret
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.wrappers import assert_same_loss
from torch_backend.context_parallel.share import RankShare
from torch_backend.context_parallel.states import scan_by_states
from torch_backend.hf.edits.stand_ins import LayerSegments, decayed_scan, diagonal_scan
from torch_backend.ops.scan.chunks import ChunkLaunch
from torch_backend.ops.scan.halves import HalvedScan, Tensors
from torch_backend.ops.scan.selective import operators as selective
from torch_backend.segments import PackedMetadata, host_lengths

pytestmark = pytest.mark.slow  # starts processes

CHANNELS, NUMBERS = 3, 2
# name -> lengths of the documents, and whether a rank has one piece of a document
ROWS: dict[str, tuple[tuple[int, ...], bool]] = {
    "one document": ((61,), False),
    "one document, contiguous": ((61,), True),
    "several are cut": ((70, 3, 60, 1), False),
    "a few tokens": ((3, 2), False),
    "some ranks have none": ((30, 10), True),
    "none is cut": ((12,) * 12, False),
}
FROZEN = "frozen inputs"  # only the parameters are trained


def walk(u: Tensor, g: Tensor, rates: Tensor, packed: PackedMetadata, initial: Tensor | None = None) -> Any:
    """``s_t = exp(g_t rates) s_{t-1} + u_t``, ``y_t = sum of the numbers of s_t``, token by token."""
    outputs, last, first = [], [], 0
    for segment, length in enumerate(host_lengths(packed)):
        state = torch.zeros_like(rates) if initial is None else initial[segment]
        for t in range(first, first + length):
            state = state * (g[t, :, None] * rates).exp() + u[t, :, None]
            outputs.append(state.sum(1))
        last.append(state)
        first += length
    return torch.stack(outputs), torch.stack(last)


class Walk(HalvedScan):
    """:func:`walk` in halves, each by autograd."""

    gates = 1

    def chunk(self, given: Tensors) -> int:
        return 5

    def fade(self, states: Tensor, gates: Tensor, given: Tensors) -> Tensor:
        return states * (gates[..., None] * given[-1]).exp()

    def forward(self, given: Tensors, packed: PackedMetadata) -> tuple[Tensor, Tensors]:
        return walk(*given, packed)[0], ()

    def backward(self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor) -> Tensors:
        return self._gradients(given, packed, None, dy, None)

    def begin(self, given: Tensors, packed: PackedMetadata) -> tuple[Tensors, Tensor]:
        return (), walk(*given, packed)[1]

    def finish(self, given: Tensors, packed: PackedMetadata, work: Tensors, initial: Tensor) -> tuple[Tensor, Tensors]:
        return walk(*given, packed, initial)[0], (initial,)

    def begin_backward(
        self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor
    ) -> tuple[Tensors, Tensor]:
        return (), self._gradients(given, packed, kept[0], dy, None)[-1]

    def finish_backward(
        self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor, work: Tensors, dfinal: Tensor
    ) -> Tensors:
        return self._gradients(given, packed, kept[0], dy, dfinal)[:-1]

    def _gradients(
        self, given: Tensors, packed: PackedMetadata, initial: Tensor | None, dy: Tensor, dfinal: Tensor | None
    ) -> Tensors:
        """Returns those of what is given, and of the initial states where there are any."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (*given, *([] if initial is None else [initial]))]
            y, last = walk(*leaves[: len(given)], packed, *leaves[len(given) :])
            return torch.autograd.grad((y, last), leaves, (dy, torch.zeros_like(last) if dfinal is None else dfinal))


def scanned(name: str) -> dict[str, Any]:
    """The output of a scan of all ranks' tokens, and the gradients; without ranks of the whole documents."""
    lengths, contiguous = ROWS["several are cut" if name == FROZEN else name]
    tokens, generator = sum(lengths), torch.Generator().manual_seed(0)
    drawn = [torch.randn(tokens, CHANNELS, generator=generator, dtype=torch.float64) for _ in range(3)]
    u, g, weights = drawn[0], -drawn[1].abs() / 4, drawn[2]
    rates = torch.rand(CHANNELS, NUMBERS, generator=generator, dtype=torch.float64).requires_grad_()
    for x in (u, g):
        x.requires_grad_(name != FROZEN)
    if not dist.is_initialized():
        y, _ = walk(u, g, rates, PackedMetadata.from_lengths(lengths, device="cpu"))
        straddles = 0
    else:
        plan = context_plan(lengths, dist.get_world_size(), contiguous=contiguous)
        share = RankShare(plan, dist.get_rank(), dist.group.WORLD, torch.device("cpu"))
        index, straddles = torch.from_numpy(share.tokens), int(plan.straddling.sum())
        y, weights = scan_by_states(share, Walk(), [x[index] for x in (u, g)], [rates]), weights[index]
    (y * weights).sum().backward()
    found = {
        "y": y.detach(),
        **{name: x.grad for name, x in (("u", u), ("g", g), ("rates", rates)) if x.grad is not None},
    }
    if dist.is_initialized():
        found["y"] = torch.zeros(tokens, CHANNELS, dtype=torch.float64).index_copy_(0, index, found["y"])
        for x in found.values():
            dist.all_reduce(x)
    return {**found, "straddles": straddles}


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2 + number % 3) for number, name in enumerate(ROWS)), (FROZEN, 2), ("one document", 4)]
)
def test_scans_over_ranks_are_those_of_whole_documents(name: str, ranks: int) -> None:
    one, many = scanned(name), on_ranks(scanned, name, ranks=ranks)
    assert (many.pop("straddles") > one.pop("straddles")) == (name != "none is cut")
    assert many.keys() == one.keys()
    for key, right in one.items():
        assert float((many[key] - right).abs().max()) <= 1e-12 * float(right.abs().max()), key


SMALL = {"hidden_size": 16, "intermediate_size": 16, "state_size": 2, "num_hidden_layers": 1}
MODELS: dict[str, Case] = {  # interpreted kernels take their time
    "mamba": Case("mamba", SMALL, lengths=(5, 40, 7, 1)),
    "recurrent_gemma": Case("recurrent_gemma", lengths=(5, 40, 7, 1)),
    "minimax": Case("minimax", lengths=(5, 40, 7, 1)),
}


def by_kernels(name: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        interpret(patched)
        return run(MODELS[name], all_ranks())


@pytest.mark.parametrize("name", MODELS)
def test_our_scans_compute_over_ranks_what_each_document_has(name: str) -> None:
    """By interpreted kernels; one process runs each document by the modeling file, without kernels."""
    one, many = run(MODELS[name]), on_ranks(by_kernels, name)
    assert_same_loss(many, one)
    assert "scan by Triton; straddling documents hand states on" in many["explained"]
    assert "scan by Triton" not in one["explained"] and many["tokens"] < one["tokens"]


def diagonal(at: LayerSegments, u: Tensor, g: Tensor, B: Tensor, C: Tensor, A: Tensor) -> Tensor:
    return diagonal_scan(at, u, g, A, B, C)


def long(name: str) -> dict[str, Any]:
    """A scan of ours over pieces of several chunks, and without ranks, and what each costs: see :func:`_cost`."""
    with pytest.MonkeyPatch.context() as patched:
        interpret(patched)
        return _long(name)


def _long(name: str) -> dict[str, Any]:
    lengths, tokens = (64, 256, 64), 384
    # [64 | 128] and [128 | 64]: of whole chunks, so that as many states enter them as without ranks
    plan = ContextPlan(*map(np.array, (lengths, (0, 2, 4), (0, 1, 1, 2), (0, 0, 128, 0), (64, 128, 128, 64))), Cost())
    share = RankShare(plan, dist.get_rank(), dist.group.WORLD, torch.device("cpu"))
    index, generator = torch.from_numpy(share.tokens), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "diagonal":
        inputs = [drawn(tokens, 8), drawn(tokens, 8).abs() / 8, drawn(tokens, 2), drawn(tokens, 2)]
        parameters, state, scan = [-drawn(8, 2).abs()], 8 * 2, diagonal
    else:
        inputs = [*(drawn(tokens, 2, 16) for _ in range(3)), -drawn(tokens, 2).abs() / 8]
        parameters, state, scan = [], 2 * 16 * 16, decayed_scan
    leaves = [x.requires_grad_() for x in (*inputs, *parameters)]
    weights = drawn(tokens, *inputs[0].shape[1:])

    def ran(at: LayerSegments, index: Tensor) -> dict[str, Any]:
        own = [*(x[index] for x in inputs), *parameters]
        y, cost = _cost(partial(scan, at, *own), weights[index])
        gradients = [x.grad for x in leaves]
        for x in leaves:
            x.grad = None
        return {"values": [torch.zeros_like(weights).index_copy(0, index, y), *gradients], **cost}

    over_ranks = ran(LayerSegments(share.segments, share), index)
    for x in over_ranks["values"]:
        dist.all_reduce(x)
    whole = ran(LayerSegments(PackedMetadata.from_lengths(lengths)), torch.arange(tokens))
    own = ran(LayerSegments(share.segments), index)
    return {"over ranks": over_ranks, "whole": whole["values"], "without ranks": own, "state": 4 * state}  # bytes


def _cost(scan: Callable[[], Tensor], weights: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Scans forward and backward: the output, the bytes of all that autograd keeps, and the kernels launched."""
    kept: dict[int, int] = {}
    launched: list[str] = []

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def counting(launch: Callable[..., None]) -> Callable[..., None]:
        def count(self: Any, kernel: Any, *arguments: Any) -> None:
            launched.append(kernel.__name__)
            launch(self, kernel, *arguments)

        return count

    with ExitStack() as stack:
        for owner, method in ((selective._SelectiveLaunch, "__call__"), (ChunkLaunch, "launch")):
            stack.enter_context(patch.object(owner, method, counting(getattr(owner, method))))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = scan()
        (y * weights).sum().backward()
    return y.detach(), {"bytes": sum(kept.values()), "launched": Counter(launched)}


CARRY = {"carry", "carry_backward"}  # kernels that carry states from chunk to chunk


@pytest.mark.parametrize("name", ["diagonal", "decayed"])
def test_our_scans_of_long_pieces_are_those_of_whole_documents(name: str) -> None:
    """They keep no more over ranks, and run their kernels once."""
    found = on_ranks(long, name)
    many, one = found["over ranks"], found["without ranks"]
    for piece, whole in zip(many["values"], found["whole"], strict=True):
        assert float((piece - whole).abs().max()) <= 1e-6 * float(whole.abs().max())
    assert many["bytes"] <= one["bytes"] + found["state"]
    once = {kernel: 2 * count for kernel, count in one["launched"].items()}  # documents alone, and pieces
    assert many["launched"] == {kernel: count + (kernel in CARRY) for kernel, count in once.items()}
