"""The gate's oracle is what torch's autograd finds in float64 from the definitions, written once more."""

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, cross_entropy, silu

from conformance import expert_cases, oracle, reductions, scan_cases, sizes
from conformance.draws import DecoderCase, LossCase, documents, segment_ids
from packing_core.protocol import DecoderConfig, segments

LARGE = ("1,100", "3,250", "levels", "ranks", "over two")  # as slow as whole models, and of no other arithmetic
ORACLES = {
    "SIZE-03": oracle.attention, "SIZE-04": oracle.attention, "SIZE-05": oracle.rope, "SIZE-06": oracle.rope,
    "SIZE-07": oracle.scan,
    **dict.fromkeys(("SIZE-08", "SIZE-09", "SIZE-10", "SIZE-12"), scan_cases.expected),
    **dict.fromkeys(("SIZE-14", "SIZE-15"), expert_cases.expected),
}  # fmt: skip
CASES = [
    pytest.param(name, case, id=f"{name} {label}")
    for name in ORACLES
    for label, case in sizes.CASES[name].items()
    if not any(size in label for size in LARGE)
]


def attention(case, q, k, v, sinks=None, alibi_slopes=None, spans=None):
    group, place = q.shape[1] // k.shape[1], torch.arange(len(q))
    ahead = place[:, None] - place
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * (case.scale or q.shape[2] ** -0.5)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * ahead.abs()
    seen = (ahead >= 0) | (not case.causal)
    if case.window:
        seen = seen & (ahead.abs() < case.window)
    if spans is not None:
        seen = seen | ((spans[:, None] == spans) & (spans >= 0) & (ahead < 0))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2)
    return torch.einsum("hij,jhe->ihe", scores.softmax(2)[:, :, : len(q)], v.repeat_interleave(group, 1))


def rope(case, x, position_ids, inv_freq):
    rotation = torch.polar(torch.ones(()).double(), position_ids[:, None] * inv_freq)[:, None]
    half = case.turned // 2
    turned, rest = x[..., : case.turned], x[..., case.turned :]
    pairs = turned.unflatten(2, (half, 2) if case.interleaved else (2, half))
    pairs = pairs if case.interleaved else pairs.transpose(2, 3)
    found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rotation)
    return torch.cat([(found if case.interleaved else found.transpose(2, 3)).flatten(2), rest], 2)


def scan(case, x, dt, A, B, C):
    state, out = torch.zeros_like(A), []
    for t in range(len(x)):
        state = torch.exp(dt[t, :, None] * A) * state + (dt[t] * x[t])[:, None] * B[t]
        out.append(state @ C[t])
    return torch.stack(out)


def delta_rule(case, q, k, v, g, beta):
    if case.normalise:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(case.heads // case.key_heads, 1) for x in (q, k))
    decay = torch.exp(g if case.by_channel else g[..., None])[..., None]
    state, out = torch.zeros(*k.shape[1:], v.shape[2]).double(), []
    for t in range(len(v)):
        state = decay[t] * state
        error = v[t] - torch.einsum("hde,hd->he", state, k[t])
        state = state + torch.einsum("hd,h,he->hde", k[t], beta[t], error)
        out.append(torch.einsum("hde,hd->he", state, q[t]) * case.width**-0.5)
    return torch.stack(out)


def ssd(case, x, dt, A, B, C, D):
    B, C = (w.repeat_interleave(case.heads // case.groups, 1) for w in (B, C))
    state, out = torch.zeros(*x.shape[1:], B.shape[2]).double(), []
    for t in range(len(x)):
        state = torch.exp(dt[t] * A)[:, None, None] * state + torch.einsum("h,hp,hn->hpn", dt[t], x[t], B[t])
        out.append(torch.einsum("hpn,hn->hp", state, C[t]) + D[:, None] * x[t])
    return torch.stack(out)


def convolution(case, x, weight, bias):
    padded = torch.cat([torch.zeros(case.width - 1, x.shape[1]).double(), x])
    return conv1d(padded.T[None], weight[:, None], bias, groups=x.shape[1])[0].T


def routed(case, x, indices, weights, up, down, up_bias=None, down_bias=None):
    kind = case.activation
    h = torch.einsum("tcod,td->tco", up[indices], x) + (0 if up_bias is None else up_bias[indices])
    if kind.gated:
        gate, value = h.chunk(2, -1)
        if kind.limit is not None:
            gate, value = gate.clamp(max=kind.limit), value.clamp(-kind.limit, kind.limit)
        h = gate * torch.sigmoid(kind.alpha * gate) * (value + kind.offset)
    else:
        h = h.relu() ** 2
    y = torch.einsum("tcdi,tci->tcd", down[indices], h) + (0 if down_bias is None else down_bias[indices])
    return (weights[..., None] * y).sum(1)


DEFINITIONS = {
    "AttentionCase": attention, "RopeCase": rope, "ScanCase": scan, "DeltaCase": delta_rule, "SsdCase": ssd,
    "ConvolutionCase": convolution, "ExpertsCase": routed,
}  # fmt: skip


def leaf(x):
    return torch.tensor(x, dtype=torch.float64, requires_grad=True) if x.dtype.kind == "f" else torch.tensor(x)


def assert_agrees(out, given, expected):
    np.testing.assert_allclose(out.detach(), expected.exact[0], rtol=1e-9, atol=1e-9)
    for name, gradient in expected.exact[1].items():
        np.testing.assert_allclose(given[name].grad, gradient, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_operations_and_their_gradients(name, case):
    given, ids = {key: leaf(x) for key, x in case.arguments("float32").items()}, segment_ids(case.rows)
    dout, expected = given.pop("dout"), ORACLES[name](case, "float32")
    out = torch.zeros(dout.shape, dtype=torch.float64)
    for row, start, stop in segments(ids):
        mine = {key: x[row, start:stop] if x.shape[:2] == ids.shape else x for key, x in given.items()}
        out[row, start:stop] = DEFINITIONS[type(case).__name__](case, **mine)
    (out * dout).sum().backward()
    assert_agrees(out, given, expected)


@pytest.mark.parametrize("case", [LossCase(masked=0.3), sizes.CASES["SIZE-17"]["negative weights and zeros"]], ids=str)
def test_the_loss_and_its_gradient(case):
    given, ids = {key: leaf(x) for key, x in case.arguments("float32").items()}, segment_ids(case.rows)
    weights = given.get("token_weights", torch.ones(ids.shape).double()).detach()
    total = weight = torch.zeros(()).double()
    for row, start, stop in segments(ids):
        labels, mine = given["labels"][row, start + 1 : stop], weights[row, start + 1 : stop]
        each = cross_entropy(given["logits"][row, start : stop - 1], labels, reduction="none")
        total, weight = total + (mine * each).sum(), weight + mine[labels != -100].sum()
    total.backward()
    expected, divisor = oracle.loss(case, "float32")
    assert weight.item() == pytest.approx(divisor)
    assert_agrees(total[None], given, expected)


@pytest.mark.parametrize("how", reductions.HOW)
def test_reductions_and_their_gradients(how):
    case = reductions.ReduceCase(sizes.MANY, how, pieces=(tuple(range(0, 84, 2)), tuple(range(83, 0, -2))))
    given = {key: leaf(x) for key, x in case.arguments("float32").items()}
    read = [torch.cat([given["values"][row, start:stop] for row, start, stop in one]) for one in case.documents()]
    of = {"sum": torch.sum, "mean": torch.mean, "first": lambda x: x[0], "last": lambda x: x[-1]}[how]
    out = torch.stack([of(x) for x in read])
    (out * given["dout"]).sum().backward()
    assert_agrees(out, given, reductions.expected(case, "float32"))


@pytest.mark.parametrize("window", [None, 8])
def test_the_decoder_and_the_gradients_of_its_weights(window):
    case, drawn = DecoderCase(DecoderConfig(sliding_window=window)), documents(7, 1, 33, prompt=0.3)
    c, weights = case.config, {name: leaf(x) for name, x in case.decoder().weights.items()}
    total, trained = torch.zeros(()).double(), 0
    for document in drawn:
        labels = torch.tensor(document.labels)[1:]
        each = cross_entropy(_logits(c, weights, torch.tensor(document.input_ids))[:-1], labels, reduction="sum")
        total, trained = total + each, trained + int((labels != -100).sum())
    (total / trained).backward()
    assert_agrees((total / trained)[None], weights, oracle.gradients(case, drawn, "float32"))


def _logits(c, w, ids):
    def norm(x, name):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + c.rms_norm_eps) * w[f"{name}.weight"]

    x, turned = w["model.embed_tokens.weight"][ids], sizes.RopeCase(width=c.head_dim, turned=c.head_dim)
    frequencies = torch.tensor(
        (c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)).astype(np.float32)
    ).double()
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}."
        h = norm(x, f"{layer}input_layernorm")
        q, k, v = ((h @ w[f"{layer}self_attn.{n}_proj.weight"].T).unflatten(1, (-1, c.head_dim)) for n in "qkv")
        q, k = (rope(turned, y, torch.arange(len(ids)), frequencies) for y in (q, k))
        mixed = attention(sizes.AttentionCase(window=c.sliding_window), q, k, v).flatten(1)
        x = x + mixed @ w[f"{layer}self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}post_attention_layernorm")
        gate, up = (h @ w[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["model.embed_tokens.weight"].T
