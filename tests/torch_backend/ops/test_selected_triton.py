"""Attention over selected keys in Triton: values and gradients of each document, in memory that was NaN before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from packing_core import reference
from packing_core.reference.selection import select
from tests.torch_backend.kernels import EVERYWHERE, ONE_DTYPE, Where, assert_within_budget, numpy
from tests.torch_backend.kernels import where as where
from tests.torch_backend.models import error
from torch_backend.ops.attention import request_of, selected_triton
from torch_backend.ops.attention import selected as selected_keys
from torch_backend.ops.attention.reference import scores_attention
from torch_backend.ops.attention.selected import (
    Latent,
    LongDocuments,
    SelectedKeys,
    select_blocks,
    select_pooled,
    selected_attention,
    why_not_triton,
)
from torch_backend.ops.attention.selected_triton import Channels, document_probabilities
from torch_backend.ops.attention.selection_scores import scores_refused
from torch_backend.segments import PackedMetadata

LENGTHS = (5, 24, 1, 19, 8, 33)  # of which 24, 19 and 33 are above a budget of 8, or of 2 blocks of 4
BUDGET = 8


def row(where: Where, block: int = 1) -> tuple[PackedMetadata, LongDocuments]:
    """The documents, before two tokens of padding that are in none."""
    packed = PackedMetadata.from_lengths((*LENGTHS, 2), device=where.device)
    long = LongDocuments.of(packed, BUDGET, [[number] for number in range(len(LENGTHS))], block=block)
    assert long is not None and long.lengths == (24, 19, 33)
    return packed, long


def causal(packed: PackedMetadata) -> np.ndarray:
    starts = np.repeat(np.cumsum([0, *LENGTHS]), [*LENGTHS, 2])
    places = np.arange(packed.tokens)
    return (starts[:, None] == starts) & (places[:, None] >= places)


def by_scores(packed: PackedMetadata, long: LongDocuments) -> tuple[Tensor, np.ndarray]:
    """The best keys of each query, many scores of which are equal, in no order, and what each query sees."""
    rng = np.random.default_rng(0)
    q, k, weights = (rng.integers(-1, 2, (packed.tokens, *shape)) for shape in ((2, 3), (3,), (2,)))
    seen = select(q, k, weights, np.cumsum([0, *LENGTHS, 2]), top_k=BUDGET)
    places = np.full((len(long.places), BUDGET), -1, np.int32)
    for i, token in enumerate(long.places.tolist()):
        (own,) = seen[token].nonzero()
        places[i, : len(own)] = own - (token - int(packed.position_ids[token]))
        rng.shuffle(places[i])
    visible = causal(packed)
    visible[long.places.cpu()] = seen[long.places.cpu()]
    return torch.from_numpy(places).to(packed.device), visible


def by_blocks(packed: PackedMetadata, long: LongDocuments, groups: int) -> tuple[Tensor, np.ndarray]:
    """The first block and that of the query for each of two groups, one of which leaves the first out."""
    visible, ids = causal(packed), packed.position_ids.cpu().numpy()
    own = ids // long.block
    places = np.stack([np.where(own > 0, 0, -1), own], -1)[:, None].repeat(groups, 1)
    places[:, 1:, 0] = -1
    visible = visible[None].repeat(groups, 0)
    at = long.places.cpu().numpy()
    for group in range(groups):
        blocks = places[at, group]
        visible[group, at] &= (own[None, :, None] == blocks[:, None, :]).any(-1)
    return torch.from_numpy(places[at].astype(np.int32)).to(packed.device), visible


def operands(where: Where, tokens: int, shape: tuple[int, int, int, int]) -> list[Tensor]:
    heads, kv_heads, width, value_dim = shape
    sizes = (heads, width), (kv_heads, width), (kv_heads, value_dim), (heads, value_dim)
    return [where.draw(tokens, *size, seed=seed) for seed, size in enumerate(sizes)]


def assert_is_the_oracle(
    where: Where, shape: tuple[int, int, int, int], selected: Tensor, visible: np.ndarray, long: LongDocuments,
    packed: PackedMetadata, with_sinks: bool = False,
) -> None:  # fmt: skip
    q, k, v, dout = operands(where, packed.tokens, shape)
    inputs = {"q": q, "k": k, "v": v} | ({"sinks": where.draw(shape[0], seed=9)} if with_sinks else {})
    for x in inputs.values():
        x.requires_grad_()
    sinks = inputs.get("sinks")
    request = request_of(q, k, v, packed, sinks=sinks)
    assert why_not_triton(request, implementation="triton") is None
    out = selected_attention(q, k, v, SelectedKeys(selected, long, request, sinks, implementation="triton"))
    gradients = torch.autograd.grad(out, list(inputs.values()), dout)
    found = {"out": out, **dict(zip(inputs, gradients, strict=True))}
    arrays = [numpy(x) for x in (q, k, v)]
    cu_seqlens = np.cumsum([0, *LENGTHS, 2])

    def oracle(dtype: str) -> dict[str, np.ndarray]:
        options = {"dtype": dtype, "selected": visible} | ({"sinks": numpy(sinks)} if sinks is not None else {})
        gradients = reference.attention_vjp(*arrays, cu_seqlens, numpy(dout), **options)
        gradients.pop("alibi_slopes", None)
        return {"out": reference.attention(*arrays, cu_seqlens, **options), **gradients}

    working = str(where.dtype).removeprefix("torch.")
    assert_within_budget(found, oracle("float64"), oracle(working), where.dtype)


@pytest.mark.parametrize(
    ("shape", "with_sinks"),
    [((16, 1, 24, 16), False), ((4, 2, 40, 8), True), ((20, 1, 16, 16), True)],
    ids=["a width and a rest", "heads of keys and sinks", "heads that fill no tile"],
)
def test_documents_are_the_oracle(where: Where, shape: tuple[int, int, int, int], with_sinks: bool) -> None:
    packed, long = row(where)
    assert_is_the_oracle(where, shape, *by_scores(packed, long), long, packed, with_sinks)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_queries_may_be_taken_a_few_at_a_time(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_triton, "_SHARES", 7 * BUDGET * 40)
    monkeypatch.setattr(selected_triton, "_QUERIES", 11)
    packed, long = row(where)
    assert_is_the_oracle(where, (16, 1, 24, 16), *by_scores(packed, long), long, packed)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_groups_of_heads_may_see_blocks_of_their_own(where: Where) -> None:
    packed, long = row(where, block=4)
    selected, visible = by_blocks(packed, long, 2)
    q, k, v, dout = operands(where, packed.tokens, (4, 2, 16, 16))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = selected_attention(
        q, k, v, SelectedKeys(selected, long, request_of(q, k, v, packed), implementation="triton")
    )
    gradients = torch.autograd.grad(out, leaves, dout)
    for group in range(2):
        heads = slice(2 * group, 2 * group + 2)
        arrays = numpy(q[:, heads]), numpy(k[:, group : group + 1]), numpy(v[:, group : group + 1])
        cu_seqlens, of_out = np.cumsum([0, *LENGTHS, 2]), numpy(dout[:, heads])
        found = {"out": out[:, heads], "q": gradients[0][:, heads]}
        found |= {name: x[:, group : group + 1] for name, x in zip("kv", gradients[1:], strict=True)}
        oracles = []
        for dtype in ("float64", str(where.dtype).removeprefix("torch.")):
            options = {"dtype": dtype, "selected": visible[group]}
            want = reference.attention_vjp(*arrays, cu_seqlens, of_out, **options)
            oracles.append({"out": reference.attention(*arrays, cu_seqlens, **options), **{n: want[n] for n in "qkv"}})
        assert_within_budget(found, *oracles, where.dtype)


@pytest.mark.parametrize("where", [w for w in EVERYWHERE if "float32" not in str(w.id)], indirect=True)
def test_half_precision_selects_what_float64_does(where: Where) -> None:
    packed, long = row(where)
    sizes = (3, 24), (24,), (3,)
    q, k, weights = (where.draw(packed.tokens, *size, seed=seed) for seed, size in enumerate(sizes))
    q, k = q.abs(), k.abs()  # no score is 0, as several would be
    assert scores_refused(q) is None
    chosen = selected_keys.select(q, k, weights.float(), long, top_k=BUDGET)
    seen = select(numpy(q), numpy(k), numpy(weights), np.cumsum([0, *LENGTHS, 2]), top_k=BUDGET)
    for token, own in zip(long.places.tolist(), chosen.tolist(), strict=True):
        start = token - int(packed.position_ids[token])
        assert sorted(start + place for place in own if place >= 0) == seen[token].nonzero()[0].tolist()


@pytest.mark.parametrize("where", [w for w in EVERYWHERE if "float32" not in str(w.id)], indirect=True)
@pytest.mark.parametrize("block", [4, 7])
def test_half_precision_selects_the_blocks_that_float64_does(where: Where, block: int) -> None:
    """By their best key in each of three groups, and by a key that stands for them; 7 divides no document."""
    packed, long = row(where, block=block)
    q, k = (where.draw(packed.tokens, *size, seed=seed) for seed, size in enumerate(((3, 24), (24,))))
    q = q.abs()  # and the keys that stand for blocks: no score is 0, as several would be, in an order of the device's
    pooled = [where.draw(length // block, 24, seed=length).abs() for length in long.lengths]
    assert scores_refused(q, block) is None and scores_refused(q, block, best=True) is None
    chosen = select_blocks(q, k, long, top_k=2, local=1), select_pooled(q, pooled, long, top_k=2)
    exact = [x.cpu().double() for x in (q, k, *pooled)]
    right = (
        select_blocks(exact[0], exact[1], long.to("cpu"), top_k=2, local=1),
        select_pooled(exact[0], exact[2:], long.to("cpu"), top_k=2),
    )
    for found, want in zip(chosen, right, strict=True):
        assert torch.equal(found.cpu().sort(-1).values, want.sort(-1).values)


def latent_operands(
    where: Where, tokens: int, rank: int, sizes: tuple[int, int, int, int]
) -> tuple[list[Tensor], Tensor]:
    """Queries, compressed and rotated keys, weight of the projection; gradient of the output."""
    heads, own, rotated, value_dim = sizes
    shapes = (tokens, heads, own + rotated), (tokens, rank), (tokens, rotated), (heads * (own + value_dim), rank)
    q, compressed, end, weight = (where.draw(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return [q, compressed, end, weight * rank**-0.5], where.draw(tokens, heads, value_dim, seed=7)


def expanded(leaves: list[Tensor], sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    heads, own, _, value_dim = sizes
    q, compressed, end, weight = leaves
    k, v = (compressed @ weight.T).unflatten(1, (heads, -1)).split([own, value_dim], -1)
    return q, torch.cat([k, end[:, None].expand(-1, heads, -1)], -1), v


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_latent_attention_shares_keys_among_heads(
    where: Where, monkeypatch: pytest.MonkeyPatch, with_sinks: bool
) -> None:
    monkeypatch.setattr(selected_triton, "_QUERIES", 16)
    packed, long = row(where)
    selected, _ = by_scores(packed, long)
    leaves, dout = latent_operands(where, packed.tokens, 32, sizes := (20, 16, 8, 12))
    leaves += [where.draw(20, seed=11)] if with_sinks else []

    def results(leaves: list[Tensor], implementation: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in leaves]
        q, k, v = expanded(leaves[:4], sizes)
        sinks, latent = (leaves[4] if with_sinks else None), Latent(*leaves[1:4])
        request = request_of(q, k, v, packed, sinks=sinks)
        assert (why_not_triton(request, latent, implementation) is None) == (implementation == "triton")
        out = selected_attention(q, k, v, SelectedKeys(selected, long, request, sinks, latent, implementation))
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    found = results(leaves, "triton")
    right = results([x.double() for x in leaves], "sdpa")
    allowed = 1e-5 if where.dtype == torch.float32 else 2e-2
    assert max(error(x.double(), y) for x, y in zip(found, right, strict=True)) <= allowed


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_a_document_is_the_same_to_the_bit_beside_others_and_again(where: Where) -> None:
    packed, long = row(where)
    selected, _ = by_scores(packed, long)
    q, k, v, dout = operands(where, packed.tokens, (16, 1, 24, 16))
    first = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])

    def results(*inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        request = request_of(*leaves, packed)
        out = selected_attention(*leaves, SelectedKeys(selected, long, request, implementation="triton"))
        return [x[first] for x in (out, *torch.autograd.grad(out, leaves, dout))]

    others = [x.clone() for x in (q, k, v)]
    for x in others:
        x[: first.start] *= 100
        x[first.stop :] *= 100
    same = results(q, k, v)
    assert all(torch.equal(x, y) for again in (results(q, k, v), results(*others)) for x, y in zip(same, again))


@pytest.mark.parametrize(
    ("shape", "sinks"),
    [((16, 1, 24, 16), False), ((4, 2, 40, 8), True), ((80, 1, 16, 16), False)],
    ids=["a width and a rest", "heads of keys and sinks", "heads of several tiles"],
)
def test_probabilities_are_those_of_the_heads_together(
    where: Where, shape: tuple[int, int, int, int], sinks: bool
) -> None:
    packed, long = row(where)
    selected, _ = by_scores(packed, long)
    q, k, v, _ = (x[long.places[: long.lengths[0]]] for x in operands(where, packed.tokens, shape))
    chosen, sink = selected[: long.lengths[0]], where.draw(shape[0], seed=9) if sinks else None
    found = document_probabilities(q, torch.cat([k, v], -1), chosen, Channels(shape[3], shape[2], 0.3), sinks=sink)
    one = torch.eye(len(q), device=where.device).unsqueeze(1).expand(-1, shape[1], -1).double()
    visible = torch.zeros(len(q), len(q) + 1, dtype=torch.bool, device=where.device)
    visible = visible.scatter_(1, chosen.long() % (len(q) + 1), True)[:, :-1]
    request = request_of(
        q.double(), k.double(), one, PackedMetadata.from_lengths([len(q)], device=where.device), scale=0.3
    )
    exact = None if sink is None else sink.double()
    right = scores_attention(q.double(), k.double(), one, request=request, visible=visible, sinks=exact).sum(1)
    right = torch.where(chosen < 0, 0, right.gather(1, chosen.long().clamp(min=0)))
    assert error(found.double(), right) <= (1e-5 if where.dtype == torch.float32 else 2e-3)


def test_unseen_keys_may_be_anything(where: Where) -> None:
    """A query that selects itself alone reads no other key, not even one that is not finite."""
    packed, long = row(where)
    selected = torch.full((len(long.places), BUDGET), -1, dtype=torch.int32, device=where.device)
    selected[:, 3] = packed.position_ids[long.places]
    q, k, v, _ = operands(where, packed.tokens, (16, 1, 24, 16))
    at = int(long.places[0])
    v[at], k[at] = torch.inf, torch.inf
    out = selected_attention(
        q, k, v, SelectedKeys(selected, long, request_of(q, k, v, packed), implementation="triton")
    )
    right = v.expand(-1, 16, -1)
    assert torch.equal(out[long.places[1:]], right[long.places[1:]])


def test_what_runs_in_plain_torch_has_a_reason(where: Where) -> None:
    packed, _ = row(where)
    q, k, v, _ = operands(where, packed.tokens, (4, 4, 16, 16))
    request = request_of(q, k, v, packed)
    assert why_not_triton(request) == "fewer than 8 heads share their keys"
    assert why_not_triton(request, implementation="sdpa") == "another implementation was named"
    capped = request_of(q, k, v, packed, softcap=3.0)
    assert why_not_triton(capped, implementation="triton") == "no softcap and no dropout"
    wide = request_of(*(where.draw(packed.tokens, 1, 800) for _ in range(3)), packed)
    assert why_not_triton(wide, implementation="triton") == "keys and values of at most 768 channels"
    exact = request_of(q.double(), k.double(), v.double(), packed)
    assert "needs Triton and a GPU" in str(why_not_triton(exact, implementation="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 128, 64, 128), (64, 192, 64, 256), (32, 64, 32, 64)], ids=str)
def test_latent_attention_of_published_sizes(sizes: tuple[int, int, int, int]) -> None:
    where = Where(torch.device("cuda"), torch.bfloat16)
    packed = PackedMetadata.from_lengths((300, 2_500), device=where.device)
    long = LongDocuments.of(packed, 512)
    assert long is not None
    leaves, dout = latent_operands(where, packed.tokens, 128 if sizes[2] == 32 else 512, sizes)
    scores = torch.rand(2_500, 2_500, device="cuda").tril()
    selected = scores.topk(512).indices.int()
    selected = selected.masked_fill(selected > torch.arange(2_500, device="cuda")[:, None], -1)

    def results(leaves: list[Tensor], implementation: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in leaves]
        q, k, v = expanded(leaves, sizes)
        request, latent = request_of(q, k, v, packed), Latent(*leaves[1:])
        assert (why_not_triton(request, latent, implementation) is None) == (implementation == "auto")
        out = selected_attention(q, k, v, SelectedKeys(selected, long, request, None, latent, implementation))
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    found = results(leaves, "auto")
    right = results([x.float() for x in leaves], "sdpa")
    assert max(error(x.float(), y) for x, y in zip(found, right, strict=True)) <= 2e-2
