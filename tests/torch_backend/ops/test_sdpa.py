"""sdpa and reference attention against the float64 oracle, and what only they promise: isolation, cost, refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from conformance.pairwise import pairwise
from packing_core import reference as oracle
from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.kernels import Elements
from torch_backend.ops.attention import attention, sdpa
from torch_backend.ops.document_batches import COARSE, FINE, buckets, map_documents, padded_lengths
from torch_backend.segments import PackedMetadata

LENGTHS = (1, 3, 17, 64, 65, 100, 7, 2, 33)
T = sum(LENGTHS)


def inputs(heads: int = 4, kv_heads: int = 2, width: int = 16, value_width: int = 16, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(T, heads, width), (T, kv_heads, width), (T, kv_heads, value_width)]
    return [torch.randn(shape, generator=g) for shape in shapes]


def arrays(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in options.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.5},
    "window_1": {"window": 1},
    "window_5": {"window": 5},
    "window_40": {"window": 40},
    "window_longer_than_all": {"window": 1000},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    "window_sinks": {"window": 6, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "window_softcap": {"window": 6, "softcap": 2.0},
    "bidirectional": {"causal": False},
    "bidirectional_window": {"causal": False, "window": 6},
    "bidirectional_alibi": {"causal": False, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
}


IMPLEMENTATIONS = ["sdpa", "sdpa in small blocks", "reference"]
SHAPES = [(4, 4, 16, 16), (4, 2, 16, 16), (4, 1, 8, 12), (4, 2, 24, 16)]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """sdpa as it is takes documents of these lengths in one block of scores; in small ones it cuts nearly all."""
    if request.param == "sdpa in small blocks":
        monkeypatch.setattr(sdpa, "_SCORES_ON_CPU", 2**10)
        monkeypatch.setattr(sdpa, "_MASK", 2**10)
    return str(request.param).partition(" ")[0]


@pytest.mark.parametrize(
    ("name", "implementation", "shape"),
    [tuple(x.values()) for x in pairwise({"name": [*OPTIONS], "implementation": IMPLEMENTATIONS, "shape": SHAPES})],
    indirect=["implementation"],
)
def test_values_and_gradients_are_the_oracles(name: str, implementation: str, shape: tuple[int, ...]) -> None:
    options = OPTIONS[name]
    q, k, v = (x.requires_grad_() for x in inputs(*shape))
    per_head = {
        key: options[key].clone().requires_grad_()
        for key in ("sinks", "alibi_slopes")
        if isinstance(options.get(key), Tensor)
    }
    out = attention(
        q, k, v, PackedMetadata.from_lengths(LENGTHS), implementation=implementation, **{**options, **per_head}
    )
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(dout)
    cu_seqlens = np.append(0, np.cumsum(LENGTHS))
    operands = [x.detach().numpy() for x in (q, k, v)]
    want = oracle.attention(*operands, cu_seqlens, **arrays(options))
    gradients = oracle.attention_vjp(*operands, cu_seqlens, dout=dout.numpy(), **arrays(options))
    assert np.abs(out.detach().numpy() - want).max() < 3e-6
    for key, x in {"q": q, "k": k, "v": v, **per_head}.items():
        assert np.abs(x.grad.numpy() - gradients[key]).max() < 1e-5 * max(1, np.abs(gradients[key]).max()), key


@pytest.mark.parametrize("name", OPTIONS)
def test_a_document_is_isolated_to_the_bit(name: str, implementation: str) -> None:
    """Neither other documents' values (not even NaN) nor how many there are nor their lengths change one's result."""

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, PackedMetadata.from_lengths(lengths), implementation=implementation, **OPTIONS[name])
        out.backward(torch.ones_like(out))
        return [torch.split(x.detach(), lengths)[5 if len(lengths) > 1 else 0] for x in (out, q.grad, k.grad, v.grad)]

    plain = inputs()
    want = run(*plain, LENGTHS)
    spoilt = [x.clone() for x in plain]
    for x in spoilt:
        for i, piece in enumerate(torch.split(x, LENGTHS)):
            if i != 5:
                piece.fill_(float("nan"))
    alone = [torch.split(x, LENGTHS)[5] for x in plain]
    for other in (run(*spoilt, LENGTHS), run(*alone, (100,))):
        assert all(torch.equal(o, w) for o, w in zip(other, want, strict=True))


def test_the_small_gradients_of_many_blocks_add_up_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query i gives each of the keys before it the weight 1 / (i + 1), so the gradients of values are harmonic sums."""
    length = 512
    monkeypatch.setattr(sdpa, "_SCORES_ON_CPU", length)  # blocks of one query
    q, k, v = (torch.zeros(length, 1, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    packed = PackedMetadata.from_lengths([length])
    out = attention(q, k, v, packed, softcap=2.0, implementation="sdpa")
    (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out))
    sums = (1 / torch.arange(1.0, length + 1)).flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(gradient[:, 0, 0].float(), sums, rtol=2**-7, atol=0)


def test_scores_are_computed_again_in_a_checkpointed_layer_and_on_another_thread() -> None:
    packed = PackedMetadata.from_lengths(LENGTHS)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])

    def gradients(*, checkpointed: bool) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in inputs()]

        def layer(*qkv: Tensor) -> Tensor:
            return attention(*qkv, packed, sinks=sinks, implementation="sdpa")

        out = checkpoint(layer, *leaves, use_reentrant=False) if checkpointed else layer(*leaves)
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(torch.autograd.grad, out, leaves, torch.ones_like(out)).result()

    pairs = zip(gradients(checkpointed=False), gradients(checkpointed=True), strict=True)
    assert all(torch.equal(plain, again) for plain, again in pairs)


def test_dropout_drops_the_same_weights_when_scores_are_computed_again() -> None:
    """With values of one and no gradient but through them, every value's gradient is the weight that it had."""
    q, k, v = inputs()
    v = torch.ones_like(v).requires_grad_()
    torch.manual_seed(0)
    out = attention(q, k, v, PackedMetadata.from_lengths(LENGTHS), dropout=0.5, implementation="sdpa")
    (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out))
    torch.testing.assert_close(gradient.sum(), out.sum())


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_that_a_document_does_not_exceed_is_none(causal: bool, implementation: str) -> None:
    """To the bit, also beside documents that exceed it."""
    packed, qkv = PackedMetadata.from_lengths(LENGTHS), inputs()
    windowed, plain = (
        torch.split(attention(*qkv, packed, causal=causal, window=window, implementation=implementation), LENGTHS)
        for window in (64, None)
    )
    same = [torch.equal(x, y) for x, y in zip(windowed, plain, strict=True)]
    assert same == [length <= 64 for length in LENGTHS]


def test_metadata_of_another_device_or_size_raises() -> None:
    q, k, v = inputs()
    with pytest.raises(
        LayoutError,
        match=f"the segments cover 5 tokens and q holds {T}: pass the segments of the batch that it comes from",
    ):
        attention(q, k, v, PackedMetadata.from_lengths([5]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, T, 4, 16)}, r"without a batch dimension, got q \[1, 292, 4, 16\]"),
        ({"q": torch.zeros(T, 3, 16)}, r"H a multiple of K, got q \[292, 3, 16\]"),
        ({"k": torch.zeros(T, 2, 8)}, r"got q \[292, 4, 16\], k \[292, 2, 8\]"),
        ({"v": torch.zeros(T, 2, 16, dtype=torch.float64)}, "must share one floating dtype"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[4\], one per head, got \[2\]"),
        ({"alibi_slopes": torch.zeros(4, 1)}, r"alibi_slopes must be \[4\]"),
        ({"window": 0}, "window counts visible keys, the query's own included, so it is at least 1, got 0"),
        ({"softcap": 0.0}, r"softcap must be positive \(None for none\), got 0.0"),
        ({"dropout": 1.0}, "dropout is a probability below 1, got 1.0"),
    ],
)
def test_bad_input_raises_before_anything_runs(change: dict[str, Any], message: str) -> None:
    q, k, v = inputs()
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "packed": PackedMetadata.from_lengths(LENGTHS), **change}
    with pytest.raises(LayoutError, match=message):
        attention(**arguments)


def test_a_named_implementation_that_cannot_serve_raises_and_says_why() -> None:
    q, k, v = inputs()
    with pytest.raises(
        UnsupportedError,
        match=r"no packed attention for 4 heads \(2 of keys\) of 16 .* float32 on cpu, causal, window 3: "
        r"varlen: runs on CUDA, not on cpu\. Pass implementation=\"auto\"",
    ):
        attention(q, k, v, PackedMetadata.from_lengths(LENGTHS), window=3, implementation="varlen")


def test_lengths_that_only_the_device_knows_are_read_once_where_nothing_works_without() -> None:
    q, k, v = inputs()
    on_device_only = PackedMetadata(torch.tensor([0, 3, 3, T], dtype=torch.int32), T, T)
    want = attention(q, k, v, PackedMetadata.from_lengths((3, T - 3)))
    assert torch.equal(attention(q, k, v, on_device_only, implementation="sdpa"), want)
    assert on_device_only.lengths == (3, T - 3)


def test_of_several_names_the_first_that_serves_is_taken() -> None:
    q, k, v = inputs()
    packed = PackedMetadata.from_lengths(LENGTHS)
    got = attention(q, k, v, packed, implementation=("varlen", "reference"))  # varlen needs CUDA
    assert torch.equal(got, attention(q, k, v, packed, implementation="reference"))


def test_dropout_drops_and_keeps_the_mean() -> None:
    q, k, v = inputs()
    v = torch.ones_like(v)
    torch.manual_seed(0)
    for implementation in ("sdpa", "reference"):
        out = attention(q, k, v, PackedMetadata.from_lengths(LENGTHS), dropout=0.5, implementation=implementation)
        assert out.std() > 0.1 and abs(out.mean() - 1) < 0.1


def test_cost_follows_the_sum_of_squared_lengths_and_nothing_is_t_by_t() -> None:
    lengths = [128] * 32
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, 1, 8) for _ in range(3))
    with Elements() as seen:
        attention(q, k, v, PackedMetadata.from_lengths(lengths), implementation="sdpa")
    assert seen.squares == sum(n * n for n in lengths)
    assert seen.largest < tokens * tokens / 100


def test_a_window_costs_length_times_window() -> None:
    q, k, v = (torch.randn(4096, 1, 8) for _ in range(3))
    with Elements() as seen:
        attention(q, k, v, PackedMetadata.from_lengths([4096]), window=64, implementation="sdpa")
    assert seen.squares <= 4096 * 128
    assert seen.largest < 4096 * 4096 / 100


@pytest.mark.parametrize("sizes", [FINE, COARSE])
def test_padding_of_documents_stays_under_one_part_in_the_sizes_of_an_octave(sizes: int) -> None:
    lengths = np.arange(1, 70000)
    padded = padded_lengths(lengths, sizes)
    assert (padded >= lengths).all() and (np.diff(padded) >= 0).all()
    assert ((padded - lengths)[lengths > 64] <= lengths[lengths > 64] / sizes).all()
    assert len(np.unique(padded)) < 12 * sizes + 4


def test_every_token_has_one_place() -> None:
    packed = PackedMetadata.from_lengths(LENGTHS)
    laid = buckets(packed)
    assert laid.real.sum() == T
    assert torch.equal(laid.gather[laid.scatter], torch.arange(T))
    x = torch.randn(T, 1, dtype=torch.float64, requires_grad=True)
    assert torch.equal(map_documents(packed, lambda rows: rows, x), x)
    torch.autograd.gradcheck(lambda y: map_documents(packed, lambda rows: rows.cumsum(1) ** 2, y), x)


def test_metadata_is_checked() -> None:
    for lengths in ([], [3, 0]):
        with pytest.raises(LayoutError, match="segment lengths must be positive and there must be one at least"):
            PackedMetadata.from_lengths(lengths)
    with pytest.raises(LayoutError, match="max_seqlen=2 is shorter than the longest segment of 3 tokens: raise it"):
        PackedMetadata.from_lengths([3], max_seqlen=2)
    with pytest.raises(LayoutError, match="entries=1 cannot hold 2 segments: pass that many at least"):
        PackedMetadata.from_lengths([3, 2], entries=1)


def test_derived_metadata() -> None:
    packed = PackedMetadata.from_lengths([3, 1, 2], entries=5)
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6, 6, 6]
    assert packed.seq_idx.tolist() == [0, 0, 0, 1, 2, 2]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.derived("key", lambda p: [p.tokens]) is packed.derived("key", lambda p: [0])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(96, 96, 96), (7, 16, 1, 33, 24, 15)], ids=["even", "odd"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_gradients_are_right_in_any_layout_of_the_outputs_gradient(lengths, heads_first):
    """cuDNN's kernel, which torch prefers on Hopper, gets some of them wrong."""
    g = torch.Generator().manual_seed(0)
    *drawn, dout = (torch.randn(sum(lengths), 2, 64, generator=g).cuda().bfloat16() for _ in range(4))
    if heads_first:
        dout = dout.transpose(0, 1).contiguous().transpose(0, 1)
    packed = PackedMetadata.from_lengths(lengths, device="cuda")
    found, right = (
        torch.autograd.grad(attention(*leaves, packed, implementation=name), leaves, dout.to(leaves[0].dtype))
        for name, leaves in (
            ("sdpa", [x.requires_grad_() for x in drawn]),
            ("reference", [x.detach().float().requires_grad_() for x in drawn]),
        )
    )
    for x, y in zip(found, right, strict=True):
        assert (x.float() - y).norm() < 0.02 * y.norm()
