"""The project's own attention kernels and their work lists: the oracle, isolation, determinism, compile, refusals."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch

from packing_core import reference
from packing_core.errors import UnsupportedError
from tests.torch_backend.kernels import ONE_DTYPE, Where, assert_isolated, assert_within_budget, numpy, with_gradients
from torch_backend.ops.attention import AttentionRequest, attention
from torch_backend.ops.attention.request import request_of
from torch_backend.ops.attention.triton import TRITON, KernelTiles, Tile, choose_tiles
from torch_backend.ops.attention.triton_work import key_tiles, query_tiles
from torch_backend.segments import PackedMetadata

implementation = import_module("torch_backend.ops.attention.triton")
# one token, shorter and longer than a tile, exactly one
LENGTHS = (5, 19, 1, 8)
TOKENS = sum(LENGTHS)
OPTIONS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "bidirectional window": {"window": 7, "causal": False},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": True},
    "scale": {"scale": 0.4},
    "all at once": {"window": 6, "softcap": 1.5, "sinks": True, "alibi_slopes": True},
}
# tiles that documents of this size cross: with 16 rows and 2 heads in a group a tile is 8 tokens
SMALL = KernelTiles(Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1))


@pytest.fixture
def no_trial(monkeypatch):
    """No trial run before the first call, which would take most of the time where kernels are interpreted."""
    monkeypatch.setattr(TRITON, "supports", TRITON.refuses)


@pytest.fixture
def small_tiles(monkeypatch, no_trial):
    monkeypatch.setattr(implementation, "choose_tiles", lambda request: SMALL)


def drawn(where: Where, heads: int, kv_heads: int, head_dim: int, value_dim: int, tokens: int = TOKENS):
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)
    return [where.draw(tokens, *shape, seed=i) for i, shape in enumerate(shapes)]


def with_tensors(where: Where, options: dict, heads: int) -> dict:
    given = dict(options)
    if "sinks" in given:
        given["sinks"] = where.draw(heads, seed=9).requires_grad_()
    if "alibi_slopes" in given:
        given["alibi_slopes"] = torch.linspace(0.1, 0.5, heads, device=where.device)
    return given


def assert_is_the_oracle(
    where: Where, shape, options: dict, lengths=LENGTHS, queries=None, *, name="triton", packed=None, **relation
) -> None:
    """Values and gradients are the oracle's, of all tokens or of the last ``queries`` of each segment.

    The oracle gets the ``relation`` between tokens as well, which ``packed`` has.
    """
    q, k, v, dout = drawn(where, *shape, tokens=sum(lengths))
    given, rows = with_tensors(where, options, shape[0]), np.arange(sum(lengths))
    if queries is not None:
        ends = np.cumsum(lengths)
        rows = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, queries, strict=True)])
        packed = PackedMetadata.of_last_tokens(queries, lengths, device=where.device)
    elif packed is None:
        # a zero-length segment at the end and a rounded-up maximum, as in batches of fixed shape
        packed = PackedMetadata.from_lengths(
            lengths, device=where.device, entries=len(lengths) + 1, max_seqlen=max(lengths) + 3
        )
    inputs = {"q": q[rows], "k": k, "v": v} | ({"sinks": given["sinks"]} if "sinks" in given else {})
    for x in inputs.values():
        x.requires_grad_()
    out = attention(inputs["q"], k, v, packed, implementation=name, **given)
    gradients = torch.autograd.grad(out, list(inputs.values()), dout[rows])
    found = {"out": out, **dict(zip(inputs, gradients, strict=True))}
    as_given = options | {key: numpy(x) for key, x in given.items() if torch.is_tensor(x)} | relation
    arrays, boundaries = [numpy(x) for x in (q, k, v)], np.cumsum([0, *lengths])
    of_rows = np.zeros_like(numpy(dout))
    of_rows[rows] = numpy(dout)[rows]

    def oracle(dtype: str) -> dict[str, np.ndarray]:
        gradients = reference.attention_vjp(*arrays, boundaries, of_rows, dtype=dtype, **as_given)
        gradients.pop("alibi_slopes", None)
        out = reference.attention(*arrays, boundaries, dtype=dtype, **as_given)
        return {"out": out[rows], **gradients, "q": gradients["q"][rows]}

    working = str(where.dtype).removeprefix("torch.")
    assert_within_budget(found, oracle("float64"), oracle(working), where.dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_the_oracle(where, small_tiles, options):
    assert_is_the_oracle(where, (4, 2, 16, 16), options)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize(
    "options", [OPTIONS[name] for name in ("window of one", "bidirectional window", "all at once")], ids=str
)
def test_queries_at_the_end_of_longer_segments_are_the_oracle(where, small_tiles, options):
    assert_is_the_oracle(where, (4, 2, 16, 16), options, (5, 19, 31), queries=(1, 19, 9))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("queries", [None, (1, 19, 9)], ids=["all tokens", "last tokens"])
def test_programs_of_a_head_may_follow_each_other(where, small_tiles, monkeypatch, queries):
    monkeypatch.setattr(implementation, "_by_heads", lambda packed, request: True)
    assert_is_the_oracle(where, (4, 2, 16, 16), OPTIONS["all at once"], (5, 19, 31), queries=queries)


@pytest.mark.parametrize(("tokens", "by_heads"), [(16_384, False), (32_768, True)])
def test_they_do_where_a_document_is_long(tokens, by_heads):
    def of(packed: PackedMetadata, window: int | None = None) -> bool:
        sizes = (packed.tokens, 32), (tokens, 8), (tokens, 8)
        q, k, v = (torch.empty(*size, 128, dtype=torch.bfloat16) for size in sizes)
        return implementation._by_heads(packed, request_of(q, k, v, packed, window=window))

    documents = PackedMetadata.from_lengths([tokens])
    assert of(documents) == of(PackedMetadata.of_last_tokens([2], [tokens], device="cpu")) == by_heads
    assert not of(documents, window=4_096)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_a_window_may_hold_more_keys_than_there_are_queries(where, small_tiles):
    assert_is_the_oracle(where, (2, 1, 16, 16), {"window": 30}, (40,), queries=(3,))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize(
    "shape",
    [(3, 3, 16, 16), (7, 1, 16, 16), (6, 2, 24, 24), (4, 1, 32, 16), (2, 1, 16, 40)],
    ids=["one to one", "seven to one", "width 24", "narrow values", "wide values"],
)
def test_every_shape_is_the_oracle(where, small_tiles, shape):
    assert_is_the_oracle(where, shape, {})


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize(("heads", "width"), [(8, 16), (4, 128), (2, 256), (4, 512)])
def test_the_tiles_of_the_table_are_the_oracle(where, no_trial, heads, width):
    lengths = (5, 150, 64, 1) if where.device.type == "cuda" else (3, 9)
    assert_is_the_oracle(where, (heads, 2, width, width), {}, lengths)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_the_large_tiles_of_512_channels_are_the_oracle(where, monkeypatch, no_trial):
    monkeypatch.setattr(implementation, "choose_tiles", lambda request: implementation._LARGE[512])
    assert_is_the_oracle(where, (4, 2, 512, 512), {}, (5, 150, 64, 1) if where.device.type == "cuda" else (3, 37))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize(
    ("shape", "options"),
    [((4, 2, 192, 128), {}), ((2, 1, 256, 192), {"window": 7}), ((4, 1, 512, 256), {"softcap": 5.0})],
)
def test_wide_heads_with_values_of_their_own_width_are_the_oracle(where, no_trial, shape, options):
    lengths = (5, 150, 64, 1) if where.device.type == "cuda" else (3, 19)
    assert_is_the_oracle(where, shape, options, lengths)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_strided_inputs_are_read_in_place(where, small_tiles):
    q, k, v, dout = drawn(where, 4, 2, 16, 16)
    packed = PackedMetadata.from_lengths(LENGTHS, device=where.device)
    fused = torch.cat((q, k, v), 1).requires_grad_()  # one projection makes all three
    out = attention(fused[:, :4], fused[:, 4:6], fused[:, 6:], packed, implementation="triton")
    expanded = dout[:1, :1].expand(TOKENS, 4, 16)  # what the backward of a sum hands over
    (gradient,) = torch.autograd.grad(out, fused, expanded)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    right = attention(*leaves, packed, implementation="triton")
    assert torch.equal(out, right)
    assert torch.equal(gradient, torch.cat(torch.autograd.grad(right, leaves, expanded.contiguous()), 1))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("heads_of_keys", [2, 1])
def test_inputs_whose_heads_come_first_have_the_same_bits(where, small_tiles, heads_of_keys):
    *inputs, dout = drawn(where, 4, heads_of_keys, 16, 16)
    packed = PackedMetadata.from_lengths(LENGTHS, device=where.device)

    def attend(q, k, v):
        return attention(q, k, v, packed, implementation="triton")

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).copy_(x.transpose(0, 1)).transpose(0, 1)

    assert heads_first(inputs[1]).stride(1) == TOKENS * 16
    found = with_gradients(attend, [heads_first(x) for x in inputs], heads_first(dout))
    for x, y in zip(found, with_gradients(attend, inputs, dout), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("options", [{"window": 3}, {"causal": False}], ids=str)
def test_no_segment_moves_another_by_a_bit(where, small_tiles, options):
    *inputs, dout = drawn(where, 4, 2, 16, 16)
    packed = PackedMetadata.from_lengths(LENGTHS, device=where.device)

    def attend(q, k, v):
        return attention(q, k, v, packed, implementation="triton", **options)

    own = slice(sum(LENGTHS[:1]), sum(LENGTHS[:2]))
    assert_isolated(lambda: with_gradients(attend, inputs, dout), [*inputs, dout], own)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_a_document_has_the_same_bits_packed_and_alone_and_in_every_run(where, small_tiles):
    q, k, v, dout = drawn(where, 4, 2, 16, 16)
    start = sum(LENGTHS[:3])

    def run(lengths, rows) -> list[torch.Tensor]:
        packed = PackedMetadata.from_lengths(lengths, device=where.device)
        attend = partial(attention, packed=packed, implementation="triton")
        return with_gradients(attend, [x[rows] for x in (q, k, v)], dout[rows])

    together, again, alone = run(LENGTHS, slice(None)), run(LENGTHS, slice(None)), run(LENGTHS[3:], slice(start, None))
    for x, y, z in zip(together, again, alone, strict=True):
        assert torch.equal(x, y) and torch.equal(x[start:], z)


@pytest.mark.slow
@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_compiles_into_one_graph_whatever_the_segmentation(where, small_tiles):
    segmentations = [LENGTHS, (TOKENS - 3, 3), (10,) * 3 + (TOKENS - 30,)]
    inputs = drawn(where, 4, 2, 16, 16)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, boundaries):
        packed = PackedMetadata(boundaries, TOKENS, TOKENS)
        out = attention(q * 2, k, v, packed, implementation="triton")
        return attention(out, k, v, packed, implementation="triton")  # the second layer shares the first one's lists

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    for lengths in segmentations:
        packed = PackedMetadata.from_lengths(lengths, device=where.device, entries=6)
        found, right = (torch.autograd.grad(f(*leaves, packed.cu_seqlens), leaves, inputs[3]) for f in (compiled, step))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert len(graphs) == 1


def items(work: torch.Tensor) -> list[tuple[int, int, int]]:
    return [tuple(item) for item in work.tolist()]


@pytest.mark.parametrize("make", [query_tiles, key_tiles])
def test_work_lists_hold_every_tile_once_and_none_is_empty(make):
    work = items(make(PackedMetadata.from_lengths(LENGTHS), 8))
    starts = np.cumsum([0, *LENGTHS])
    expected = [
        (start, length, first)
        for start, length in zip(starts.tolist(), LENGTHS, strict=False)
        for first in range(0, length, 8)
    ]
    assert sorted(work) == sorted(expected)


def test_work_lists_go_segment_by_segment_from_the_longest_and_begin_each_with_its_most_expensive_tile():
    # segments of 5, 20 and 5 tokens in tiles of 8: a tile of queries sees the keys before it, a block of keys is seen
    # by the queries after it
    packed = PackedMetadata.from_lengths((5, 20, 5))
    short = [(0, 5, 0), (25, 5, 0)]
    assert items(query_tiles(packed, 8)) == [(5, 20, 16), (5, 20, 8), (5, 20, 0), *short]
    assert items(key_tiles(packed, 8)) == [(5, 20, 0), (5, 20, 8), (5, 20, 16), *short]


def test_work_lists_made_on_the_device_have_one_length_for_all_segmentations():
    known = [
        PackedMetadata.from_lengths(lengths, entries=6) for lengths in (LENGTHS, (TOKENS,), (6,) * 5 + (TOKENS - 30,))
    ]
    unknown = [PackedMetadata(packed.cu_seqlens, TOKENS, TOKENS) for packed in known]
    for tokens in (4, 8, 64):
        made = [query_tiles(packed, tokens) for packed in unknown]
        assert len({work.shape for work in made}) == 1
        for work, packed in zip(made, known, strict=True):
            right = query_tiles(packed, tokens)
            assert torch.equal(work[: len(right)], right)
            assert not work[len(right) :, 1].any()


def test_work_lists_are_made_once_per_batch():
    packed = PackedMetadata.from_lengths(LENGTHS)
    first = query_tiles(packed, 8)
    assert query_tiles(packed, 8) is first
    assert query_tiles(packed, 4) is not first and key_tiles(packed, 8) is not first


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((2, 1, 16, 16), {"dropout": 0.1}, "no dropout"),
        ((2, 1, 520, 16), {}, "heads of at most 512 channels"),
        ((129, 1, 16, 16), {}, "at most 128 query heads per key head"),
        ((2, 1, 16, 16), {"scale": -1.0}, "needs a positive scale"),
    ],
)
def test_refuses_by_name(where, shape, options, reason):
    q, k, v, _ = drawn(where, *shape)
    packed = PackedMetadata.from_lengths(LENGTHS, device=where.device)
    with pytest.raises(UnsupportedError, match=f"triton: {reason}"):
        attention(q, k, v, packed, implementation="triton", **options)


def test_refuses_the_cpu_and_gradients_of_slopes(small_tiles):
    q, k, v = torch.zeros(TOKENS, 2, 16), torch.zeros(TOKENS, 1, 16), torch.zeros(TOKENS, 1, 16)
    with pytest.raises(UnsupportedError, match="needs Triton and a GPU"):
        attention(q, k, v, PackedMetadata.from_lengths(LENGTHS), implementation="triton")


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_slopes_that_want_a_gradient_are_refused(where, small_tiles):
    q, k, v, _ = drawn(where, 2, 1, 16, 16)
    slopes = torch.rand(2, device=where.device, requires_grad=True)
    packed = PackedMetadata.from_lengths(LENGTHS, device=where.device)
    with pytest.raises(UnsupportedError, match="gives ALiBi slopes no gradient"):
        attention(q, k, v, packed, implementation="triton", alibi_slopes=slopes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [8, 64, 128, 256, 512])
def test_tiles_hold_at_least_one_token_of_every_group(dtype, width):
    for heads in (1, 7, 71, 128):
        request = AttentionRequest(
            tokens=100, heads=heads, kv_heads=1, head_dim=width, value_dim=width, dtype=dtype, scale=1.0,
            device=torch.device("cpu"), segments=1, max_seqlen=100,
        )  # fmt: skip
        assert min(tile.rows for tile in choose_tiles(request)) >= heads
