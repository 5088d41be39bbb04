"""The rotary kernels against the float64 oracle: layouts, in place and not, the norm, compilation, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from packing_core import reference
from packing_core.errors import LayoutError
from tests.torch_backend.kernels import ONE_DTYPE, Where, assert_compiles, assert_within_budget, numpy
from torch_backend.ops.rope import QKNorm, apply_rope, launch
from torch_backend.ops.rope.reference import normalize, rotate

LENGTHS = (5, 9, 1, 6)
TOKENS = sum(LENGTHS)
POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS])


def frequencies(half: int) -> np.ndarray:
    return 100.0 ** (-np.arange(half) / half)


def angles(where: Where, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    # the angle itself is float32 in every dtype, as in the oracle and in the models
    turned = torch.tensor(POSITIONS, dtype=torch.float32)[:, None] * torch.tensor(frequencies(half)).float()
    return turned.cos().to(where.device, where.dtype), turned.sin().to(where.device, where.dtype)


def oracle(x: torch.Tensor, dx: torch.Tensor, half: int, interleaved: bool, dtype: str):
    arguments = POSITIONS, frequencies(half)
    out = reference.rope(numpy(x), *arguments, interleaved=interleaved, dtype=dtype)
    gradient = reference.rope_vjp(numpy(x), *arguments, numpy(dx), interleaved=interleaved, dtype=dtype)["x"]
    return out, gradient


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "turned"),
    [(8, 2, 16, 16), (3, 3, 16, 8), (2, 1, 20, 12), (14, 2, 8, 2)],
    ids=["grouped", "partial", "odd widths", "seven to one"],
)
def test_forward_and_backward_are_the_oracle(where, heads, kv_heads, head_dim, turned, interleaved):
    half = turned // 2
    cos, sin = angles(where, half)
    q, k = (where.draw(TOKENS, h, head_dim, seed=1).requires_grad_() for h in (heads, kv_heads))
    dq, dk = (where.draw(TOKENS, h, head_dim, seed=2) for h in (heads, kv_heads))
    q_out, k_out = apply_rope(q, k, cos, sin, interleaved=interleaved)
    q_grad, k_grad = torch.autograd.grad((q_out, k_out), (q, k), (dq, dk))
    found = {"q": q_out, "k": k_out, "dq": q_grad, "dk": k_grad}
    exact, rounded = {}, {}
    for run, dtype in ((exact, "float64"), (rounded, str(where.dtype).removeprefix("torch."))):
        run["q"], run["dq"] = oracle(q, dq, half, interleaved, dtype)
        run["k"], run["dk"] = oracle(k, dk, half, interleaved, dtype)
    assert_within_budget(found, exact, rounded, where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_any_strides_give_the_same_bits(where):
    cos, sin = angles(where, 8)
    q, k = where.draw(TOKENS, 4, 16), where.draw(TOKENS, 2, 16)
    expected = apply_rope(q, k, cos, sin)
    fused = torch.cat((q.flatten(1), k.flatten(1)), 1).unflatten(1, (6, 16))  # one projection makes both
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    channels_first = k.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    full_width = torch.cat((cos, cos), -1)[:, :8], torch.cat((sin, sin), -1)[:, :8]
    for given in ((fused[:, :4], fused[:, 4:]), (heads_first, channels_first)):
        for x, right in zip(apply_rope(*given, *full_width), expected, strict=True):
            assert torch.equal(x, right)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("batched_angles", [True, False])
def test_a_batch_is_its_rows(where, batched_angles):
    cos, sin = angles(where, 8)
    q, k = where.draw(3, TOKENS, 4, 16), where.draw(3, TOKENS, 2, 16)
    given = (cos.expand(3, -1, -1), sin.expand(3, -1, -1)) if batched_angles else (cos[None], sin[None])
    # as transformers holds them: [B, H, T, D] in memory of [B, T, H, D], and the other way round
    for strided in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        q_out, k_out = apply_rope(strided(q), strided(k), *given)
        for row in range(3):
            q_row, k_row = apply_rope(q[row], k[row], cos, sin)
            assert torch.equal(q_out[row], q_row) and torch.equal(k_out[row], k_row)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm"])
def test_q_and_k_may_differ_in_dtype(where, normed, heads_first):
    cos, sin = angles(where, 8)
    q, k = where.draw(TOKENS, 5, 16), where.draw(TOKENS, 2, 16).half()
    q_weight, k_weight = where.draw(16, seed=3), where.draw(16, seed=4)

    def turned(q, k):
        given = [x.transpose(0, 1) for x in (q, k)] if heads_first else (q, k)
        norm = QKNorm(q_weight, k_weight) if normed else None
        return apply_rope(*given, cos, sin, heads_first=heads_first, norm=norm)

    q_out, k_out = turned(q, k)
    assert (q_out.dtype, k_out.dtype) == (q.dtype, k.dtype)
    assert torch.equal(q_out, turned(q, k.to(q.dtype))[0])
    assert torch.equal(k_out, turned(q.to(k.dtype), k)[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="maps a file into the CPU's memory")
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["tokens", "heads", "channels"])
def test_offsets_beyond_32_bits(where, tmp_path, axis):
    """One step along one axis passes over 2^31 elements; nothing of the file is written but what the tensor holds."""
    shape, half = ((3, 2, 16), (3, 3, 16), (3, 2, 4))[axis], (8, 8, 2)[axis]
    x = where.draw(*shape)
    step = 2**31 // (shape[axis] - 1) + 16
    dense = torch.empty(shape).stride()
    strides = [step if i == axis else n for i, n in enumerate(dense)]
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    spread = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=where.dtype)
    spread = spread.as_strided(shape, strides).copy_(x)
    cos, sin = (angle[:3] for angle in angles(where, half))
    assert torch.equal(apply_rope(spread, x, cos, sin)[0], apply_rope(x, x, cos, sin)[0])
    norm = QKNorm(where.draw(shape[2]).requires_grad_(), where.draw(shape[2]))
    gradients = []
    for given in (spread, x):
        out, _ = apply_rope(given, x, cos, sin, norm=norm)
        gradients.append(torch.autograd.grad((out * out).sum(), norm.q_weight)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("batch", [(), (1,), (3,)], ids=["tokens", "one row", "three rows"])
def test_heads_first_is_the_same_rotation_of_transposed_tensors(where, batch, normed):
    cos, sin = (x.expand(*batch, -1, -1) for x in angles(where, 8))
    q, k, dq, dk = (where.draw(*batch, TOKENS, h, 16, seed=i) for i, h in enumerate((4, 2, 4, 2)))
    norm = QKNorm(where.draw(16), where.draw(16)) if normed else None

    def both(heads_first):
        given = [(x.transpose(-3, -2) if heads_first else x) for x in (q, k, dq, dk)]
        leaves = [x.detach().clone().requires_grad_() for x in given[:2]]
        out = apply_rope(*leaves, cos, sin, heads_first=heads_first, norm=norm)
        found = (*out, *torch.autograd.grad(out, leaves, given[2:]))
        return [x.transpose(-3, -2) if heads_first else x for x in found]

    for found, right in zip(both(True), both(False), strict=True):
        assert torch.equal(found, right)
        assert found.is_contiguous()


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_heads_first_in_place_and_in_plain_torch(where):
    cos, sin = angles(where, 8)
    q, k = where.draw(TOKENS, 4, 16), where.draw(TOKENS, 2, 16)
    expected = [x.transpose(0, 1) for x in apply_rope(q, k, cos, sin)]
    own = [x.transpose(0, 1).contiguous() for x in (q, k)]
    out = apply_rope(*own, cos, sin, heads_first=True, inplace=True)
    assert all(a is b and torch.equal(a, c) for a, b, c in zip(out, own, expected, strict=True))
    wide = [x.double() for x in (q.transpose(0, 1), k.transpose(0, 1), cos, sin)]
    plain = apply_rope(*wide, heads_first=True)
    right = apply_rope(*(x.double() for x in (q, k, cos, sin)))
    assert all(torch.equal(a.transpose(0, 1), b) for a, b in zip(plain, right, strict=True))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("turned", [16, 6])
def test_in_place_overwrites_and_differentiates(where, turned):
    cos, sin = angles(where, turned // 2)
    q, k = where.draw(TOKENS, 4, 16).requires_grad_(), where.draw(TOKENS, 2, 16).requires_grad_()
    expected = apply_rope(q, k, cos, sin)
    q_own, k_own = q * 1, k * 1
    q_out, k_out = apply_rope(q_own, k_own, cos, sin, inplace=True)
    assert q_out.data_ptr() == q_own.data_ptr()
    assert torch.equal(q_own, expected[0]) and torch.equal(k_out, expected[1])
    found = torch.autograd.grad((q_out * q_out).sum() + k_out.sum(), (q, k))
    right = torch.autograd.grad((expected[0] * expected[0]).sum() + expected[1].sum(), (q, k))
    assert torch.equal(found[0], right[0]) and torch.equal(found[1], right[1])


@pytest.mark.parametrize("over_heads", [False, True], ids=["per head", "over heads"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("turned", [16, 4])
def test_norm_and_rotation_in_one_kernel_are_the_two_in_float64(where, turned, interleaved, over_heads):
    heads, kv_heads, head_dim = 4, 2, 16
    cos, sin = angles(where, turned // 2)
    q, k = (where.draw(TOKENS, h, head_dim).requires_grad_() for h in (heads, kv_heads))
    q_weight, k_weight = (
        where.draw(head_dim * (h if over_heads else 1), seed=3).requires_grad_() for h in (heads, kv_heads)
    )
    dq, dk = (where.draw(TOKENS, h, head_dim, seed=4) for h in (heads, kv_heads))
    inputs = q, k, q_weight, k_weight
    norm = QKNorm(q_weight, k_weight, eps=1e-5, over_heads=over_heads)
    out = apply_rope(q, k, cos, sin, interleaved=interleaved, norm=norm)
    names = "q", "k", "dq", "dk", "dq_weight", "dk_weight"
    found = dict(zip(names, (*out, *torch.autograd.grad(out, inputs, (dq, dk))), strict=True))

    def two_steps(dtype: torch.dtype) -> dict[str, np.ndarray]:
        wide = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = [
            rotate(
                normalize(x, weight, 1e-5, over_heads=over_heads), cos.to(dtype), sin.to(dtype), interleaved=interleaved
            )
            for x, weight in zip(wide[:2], wide[2:], strict=True)
        ]
        gradients = torch.autograd.grad(out, wide, (dq.to(dtype), dk.to(dtype)))
        return {name: numpy(x) for name, x in zip(names, (*out, *gradients), strict=True)}

    assert_within_budget(found, two_steps(torch.float64), two_steps(where.dtype), where.dtype)


def test_a_batch_rotates_under_the_norm_too(where):
    cos, sin = angles(where, 8)
    q, k = where.draw(2, TOKENS, 4, 16).transpose(1, 2).contiguous().transpose(1, 2), where.draw(2, TOKENS, 2, 16)
    q.requires_grad_()
    weight = where.draw(16).requires_grad_()
    norm = QKNorm(weight, weight)
    out = apply_rope(q, k, cos[None], sin[None], norm=norm)
    rows = [apply_rope(q[i], k[i], cos, sin, norm=norm) for i in range(2)]
    assert torch.equal(out[0], torch.stack([row[0] for row in rows]))
    (gradient,) = torch.autograd.grad(out[0].sum(), weight)
    (right,) = torch.autograd.grad(sum(row[0].float().sum() for row in rows), weight)
    torch.testing.assert_close(gradient, right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("heads_first", [False, True])
def test_compiles_into_one_graph(where, heads_first):
    cos, sin = angles(where, 8)
    q, k = where.draw(TOKENS, 4, 16).requires_grad_(), where.draw(TOKENS, 2, 16).requires_grad_()

    def step(q, k):
        given = [(x * 2).transpose(0, 1) if heads_first else x * 2 for x in (q, k)]
        return sum(x.float().square().sum() for x in apply_rope(*given, cos, sin, heads_first=heads_first))

    assert_compiles(step, (q, k))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("heads_first", [False, True])
def test_the_compiler_is_told_the_strides_that_come(where, heads_first):
    cos, sin = angles(where, 8)
    q, k = where.draw(2, 6, TOKENS, 16)[:, :4], where.draw(2, 2, TOKENS, 32)[..., ::2]
    if not heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    weight = where.draw(16)
    for operator, arguments in (
        (launch.rope, (q, k, cos[None], sin[None], heads_first, False, False)),
        (launch.rope_norm, (q, k, weight, weight, cos[None], sin[None], heads_first, False, False, 1e-6)),
        (launch.rope_norm_backward, (q, q, weight, cos[None], sin[None], heads_first, False, False, 1e-6)),
    ):
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
        for real, told in zip(operator(*arguments), fake, strict=True):
            assert (real.shape, real.stride(), real.dtype) == (told.shape, told.stride(), told.dtype)


Q, K, COS = torch.zeros(6, 4, 16), torch.zeros(6, 2, 16), torch.zeros(6, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q \[T, H, D\] and k \[T, K, D\].*q \[4, 16\]"),
        ({"k": K[:, :, :8]}, r"k \[6, 2, 8\]"),
        ({"heads_first": True}, r"\[H, T, D\] and \[K, T, D\] with heads_first=True.*k \[6, 2, 16\]"),
        ({"heads_first": True, "k": Q}, r"one row of angles per token"),
        ({"cos": COS[:5]}, r"one row of angles per token"),
        ({"cos": torch.zeros(6, 16), "sin": torch.zeros(6, 16)}, r"16 angles and a head of 16 channels has 8 pairs"),
        ({"norm": QKNorm(torch.zeros(16), torch.zeros(8))}, r"norm.k_weight must be \[16\], got \[8\]"),
        ({"norm": QKNorm(torch.zeros(16), torch.zeros(16)), "inplace": True}, r"pass inplace=False"),
        ({"q": Q.clone().requires_grad_(), "inplace": True}, r"q is a leaf that records a gradient"),
        ({"q": (Q.clone().requires_grad_() * 1)[:, :], "inplace": True}, r"q is a view of another tensor"),
    ],
)
def test_what_cannot_be_rotated_says_why(change, message):
    arguments = {"q": Q, "k": K, "cos": COS, "sin": COS} | change
    with pytest.raises(LayoutError, match=message):
        apply_rope(**arguments)
