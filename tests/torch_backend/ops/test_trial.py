"""Trial runs end wherever they begin, and find out kernels of others that are wrong for many documents or outliers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.torch_backend.hf.test_attention_implementations import REQUEST
from torch_backend.ops.attention.probe import Probed
from torch_backend.ops.attention.reference import segments_of
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest
from torch_backend.ops.attention.triton import Triton
from torch_backend.ops.trial import in_own_thread, refusal
from torch_backend.segments import PackedMetadata

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
LIMIT = 30  # seconds; a trial that waits for the thread that waits for it never ends


@in_own_thread
def trial(device: str) -> tuple[float, bool]:
    x = torch.ones(3, device=device, requires_grad=True)
    (2 * x).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum()), torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_trial_ends_inside_the_backward_of_a_reentrant_checkpoint(device: str) -> None:
    found: list[tuple[float, bool]] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # in the backward alone
            found.append(trial(device))
        return 3 * x

    def step() -> None:
        x = torch.ones(2, device=device, requires_grad=True)
        checkpoint(layer, x, use_reentrant=True).sum().backward()

    running = threading.Thread(target=step, daemon=True)
    running.start()
    running.join(LIMIT)
    assert found == [(6.0, False)]
    assert not running.is_alive()


class Library(Probed):
    """The kernel of another project, on the CPU: ``attend`` is called for each document with its place in the row.

    Its q, k, v are [1, H, L, D], [1, H, S, D], [1, H, S, Dv], its mask [L, S], True where a key is visible.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        self.attend, self.runs = attend, 0

    def refuses(self, request: AttentionRequest) -> None:
        return None

    def __call__(self, inputs: AttentionInputs, request: Any) -> Tensor:
        self.runs += 1
        out = []
        for place, (document, first) in enumerate(segments_of(*inputs[:4])):
            heads_first = [x.transpose(0, 1)[None] for x in document]
            queries, keys = (x.shape[2] for x in heads_first[:2])
            distance = first + torch.arange(queries)[:, None] - torch.arange(keys)
            visible = (distance >= 0) if request.causal else torch.ones_like(distance, dtype=torch.bool)
            visible &= distance.abs() < (request.window or len(inputs.k))
            groups = request.heads // request.kv_heads
            heads_first[1:] = (x.repeat_interleave(groups, 1) for x in heads_first[1:])
            out.append(self.attend(place, *heads_first, visible, request.scale)[0].transpose(0, 1))
        return torch.cat(out)


def right(place: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, visible, scale=scale)


def no_more_than_256_documents(place: int, *arguments: Any) -> Tensor:
    return right(place, *arguments) * (place < 256)


def by_scores(change: Callable[[Tensor], Tensor], weigh: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def attend(place: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
        scores = change(q.float() @ k.float().mT).float() * scale
        return (weigh(scores.masked_fill(~visible, -torch.inf)) @ v.float()).to(q.dtype)

    return attend


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def softmax_of_small_scores(scores: Tensor) -> Tensor:
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


WRONG = {
    "no more than 256 documents": no_more_than_256_documents,
    "scores in float16": by_scores(torch.Tensor.half, softmax),
    "scores in bfloat16": by_scores(torch.Tensor.bfloat16, softmax),
    "clipped scores": by_scores(lambda scores: scores.clamp(max=2.0**14), softmax),
    "a softmax that overflows": by_scores(torch.Tensor.float, softmax_of_small_scores),
}
RIGHT = {"by torch": right, "by scores in float32": by_scores(torch.Tensor.float, softmax)}
HERE = replace(REQUEST, device=torch.device("cpu"))
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bidirectional": {"causal": False},
    "window": {"window": 9},
    "more keys": {"key_tokens": 9_000},
    "segments that continue others": {"parents": True},
    "narrow": {"head_dim": 16, "value_dim": 16},
    "without gradients": {"requires_grad": False},
}


@pytest.mark.parametrize("change", ["plain", "without gradients"])
@pytest.mark.parametrize("kind", WRONG)
def test_kernels_that_are_wrong_for_many_documents_or_outliers_are_found_out(kind: str, change: str) -> None:
    reason = Library(WRONG[kind]).supports(replace(HERE, **CHANGES[change]))
    assert reason is not None and reason.startswith("its trial run was wrong by")


@pytest.mark.parametrize(
    ("kind", "change", "dtype"),
    [
        *(("by torch", change, torch.bfloat16) for change in CHANGES),
        ("by torch", "plain", torch.float16),
        ("by scores in float32", "plain", torch.bfloat16),
    ],
)
def test_kernels_that_round_alone_pass_in_one_run(kind: str, change: str, dtype: torch.dtype) -> None:
    library = Library(RIGHT[kind])
    assert library.supports(replace(HERE, dtype=dtype, **CHANGES[change])) is None
    assert library.runs == 1


def test_kernels_that_do_not_see_what_a_segment_continues_are_found_out() -> None:
    class Flat(Library):
        def __call__(self, inputs: AttentionInputs, request: Any) -> Tensor:
            flat = PackedMetadata(inputs.packed.cu_seqlens, request.max_seqlen, request.tokens, inputs.packed.lengths)
            return super().__call__(inputs._replace(packed=flat), request)

    assert Flat(right).supports(HERE) is None
    reason = Flat(right).supports(replace(HERE, parents=True))
    assert reason is not None and reason.startswith("its trial run was wrong by")


def test_our_own_kernels_are_tried_on_few_documents_and_all_heads() -> None:
    heads = []

    class Own(Library):
        own = Triton.own

        def __call__(self, inputs: AttentionInputs, request: Any) -> Tensor:
            heads.append(inputs.k.shape[1])
            return super().__call__(inputs, request)

    request = replace(HERE, heads=12, kv_heads=6)
    assert Own(no_more_than_256_documents).supports(request) is None
    assert heads == [6]


def test_a_gradient_that_is_not_a_number_is_refused() -> None:
    assert refusal(lambda: [0.01, math.nan], 0.05) == "its trial run was wrong by nan of what is right"
    assert refusal(lambda: [0.01, 0.02], 0.05) is None
