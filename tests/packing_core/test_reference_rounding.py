"""The reference under a working dtype: every operation rounds, and the error is that of the dtype."""

import numpy as np
import pytest

from packing_core import reference
from packing_core.errors import PackingError
from packing_core.reference.arithmetic import Rounded, operands, round_to_bfloat16, round_to_float16

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
CU_SEQLENS = [0, 20, 21, 48]
TOKENS = 50
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    """Values that every working dtype holds exactly, so that what is measured is the operations and not the inputs."""
    return round_to_bfloat16(RNG.standard_normal(shape).astype(np.float32)).astype(np.float64)


Q, K, V = normal(TOKENS, 4, 8), normal(TOKENS, 2, 8), normal(TOKENS, 2, 8)
SINKS, SLOPES = normal(4), np.array([0.5, 0.25, 0.125, 0.0625])
ATTENTION = {"window": 9, "softcap": 2.0, "sinks": SINKS, "alibi_slopes": SLOPES}
TARGETS = RNG.integers(0, 8, TOKENS)
INV_FREQ = 100.0 ** (-np.arange(4) / 4)
SCAN = {"x": normal(TOKENS, 4), "dt": np.abs(normal(TOKENS, 4)), "A": -np.abs(normal(4, 3)), "B": normal(TOKENS, 2, 3)}
SCAN |= {"C": normal(TOKENS, 2, 3), "cu_seqlens": CU_SEQLENS, "D": normal(4), "z": normal(TOKENS, 4)}
DELTA = {"q": normal(TOKENS, 2, 4), "k": normal(TOKENS, 2, 4) / 4, "v": normal(TOKENS, 2, 3)}
DELTA |= {"g": -np.abs(normal(TOKENS, 2)), "beta": np.full((TOKENS, 2), 0.5), "cu_seqlens": CU_SEQLENS}
CONVOLUTION = {
    "x": normal(TOKENS, 4),
    "weight": normal(4, 3),
    "cu_seqlens": CU_SEQLENS,
    "bias": normal(4),
    "silu": True,
}

CLIPS = {"features": normal(TOKENS, 4), "frames": 40, "up": normal(6, 4, 3) / 4, "up_bias": normal(6)}
CLIPS |= {"down": normal(5, 6, 3) / 4}
CLIP_DOUT = normal(20, 5)

EXPERTS = {"x": Q[:, 0], "indices": np.stack([np.arange(TOKENS) % 3, (np.arange(TOKENS) + 1) % 3], axis=1)}
EXPERTS |= {"weights": np.abs(normal(TOKENS, 2)), "up": normal(3, 12, 8) / 4, "down": normal(3, 8, 6) / 4}

INDEX = {"index_q": Q, "index_k": normal(TOKENS, 8), "index_weights": normal(TOKENS, 4), "q": Q, "k": K}
INDEX |= {"cu_seqlens": CU_SEQLENS}
INDEX["selected"] = reference.select(*list(INDEX.values())[:3], CU_SEQLENS, top_k=9)

CALLS = {
    "attention": lambda dtype: reference.attention(Q, K, V, CU_SEQLENS, dtype=dtype, **ATTENTION),
    "attention_lse": lambda dtype: reference.attention_lse(Q, K, CU_SEQLENS, dtype=dtype, **ATTENTION)[:48],
    "attention_vjp": lambda dtype: reference.attention_vjp(
        Q, K, V, CU_SEQLENS, Q, dlse=V[:, :, 0].repeat(2, axis=1), dtype=dtype, **ATTENTION
    ),
    "index_loss": lambda dtype: reference.index_loss(**INDEX, dtype=dtype),
    "index_loss_vjp": lambda dtype: reference.index_loss_vjp(**INDEX, dout=[1.0, -0.5, 2.0], dtype=dtype),
    "rope": lambda dtype: reference.rope(Q, np.arange(TOKENS), INV_FREQ, dtype=dtype),
    "rope_vjp": lambda dtype: reference.rope_vjp(Q, np.arange(TOKENS), INV_FREQ, Q, interleaved=True, dtype=dtype),
    "cross_entropy": lambda dtype: np.array(reference.cross_entropy(Q[:, 0], TARGETS, dtype=dtype)),
    "cross_entropy_vjp": lambda dtype: reference.cross_entropy_vjp(Q[:, 0], TARGETS, dtype=dtype),
    "token_logprobs": lambda dtype: np.stack(reference.token_logprobs(Q[:, 0], TARGETS, dtype=dtype)),
    "token_logprobs_vjp": lambda dtype: reference.token_logprobs_vjp(Q[:, 0], TARGETS, Q[:, 0, 0], dtype=dtype),
    "selective_scan": lambda dtype: reference.selective_scan(**SCAN, dtype=dtype),
    "selective_scan_vjp": lambda dtype: reference.selective_scan_vjp(**SCAN, dy=Q[:, 0, :4], dtype=dtype),
    "gated_delta_rule": lambda dtype: reference.gated_delta_rule(**DELTA, dtype=dtype),
    "gated_delta_rule_vjp": lambda dtype: reference.gated_delta_rule_vjp(**DELTA, dout=Q[:, :2, :3], dtype=dtype),
    "experts": lambda dtype: reference.experts(**EXPERTS, dtype=dtype),
    "experts_vjp": lambda dtype: reference.experts_vjp(**EXPERTS, dy=Q[:, 0], dtype=dtype),
    "clip_convolutions": lambda dtype: reference.clip_convolutions(**CLIPS, dtype=dtype),
    "clip_convolutions_vjp": lambda dtype: reference.clip_convolutions_vjp(**CLIPS, dout=CLIP_DOUT, dtype=dtype),
    "short_convolution": lambda dtype: reference.short_convolution(**CONVOLUTION, dtype=dtype),
    "short_convolution_vjp": lambda dtype: reference.short_convolution_vjp(**CONVOLUTION, dy=Q[:, 0, :4], dtype=dtype),
}


def results(name: str, dtype: str) -> dict[str, np.ndarray]:
    found = CALLS[name](dtype)
    return found if isinstance(found, dict) else {"out": found}


def held_by(dtype: str, x: np.ndarray) -> np.ndarray:
    rounding = {"bfloat16": round_to_bfloat16, "float16": round_to_float16, "float32": lambda x: x}[dtype]
    return rounding(x.astype(np.float32)).astype(np.float64)


def test_every_public_function_is_here():
    functions = {name for name in reference.__all__ if name.islower()}
    assert functions - {"select"} == CALLS.keys()  # which chooses, and returns nothing that could be rounded


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
@pytest.mark.parametrize("name", CALLS)
def test_the_error_is_that_of_the_dtype(name, dtype):
    for key, exact in results(name, "float64").items():
        rounded = results(name, dtype)[key]
        assert rounded.dtype == np.float64 and type(rounded) is np.ndarray
        np.testing.assert_array_equal(rounded, held_by(dtype, rounded))
        error = np.abs(rounded - exact).max() / np.abs(exact).max() / UNIT_ROUNDOFF[dtype]
        # Some units of the last place after some dozens of operations; a bfloat16 run that forgot to round would show
        # 1e-5 of a unit, and one that rounded something at a coarser grain hundreds.
        assert 0.005 < error < 60, (key, error)


@pytest.mark.parametrize("name", CALLS)
def test_no_operation_escapes_the_policy(name, monkeypatch):
    """Round everything to zero: an operation that ran outside the policy would leave something else behind."""
    monkeypatch.setattr("packing_core.reference.arithmetic._ROUNDING", {"float32": np.zeros_like})
    with np.errstate(divide="ignore", invalid="ignore"):
        from_zeros = results(name, "float32")
    for key, x in from_zeros.items():
        assert not x.any(), key


def test_bfloat16_rounds_to_nearest_with_ties_to_even():
    one, step = 1.0, 2.0**-7  # the distance of neighbours just above 1
    given = [one + step / 2, one + 3 * step / 2, one + 0.51 * step, one + 0.49 * step, -one - 3 * step / 2]
    expected = [one, one + 2 * step, one + step, one, -one - 2 * step]
    np.testing.assert_array_equal(round_to_bfloat16(np.array(given, np.float32)), expected)


def test_rounding_keeps_what_is_not_finite():
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    nan_of_all_ones = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    for rounding in (round_to_bfloat16, round_to_float16):
        np.testing.assert_array_equal(rounding(special), special)
        assert np.signbit(rounding(special))[[2, 4]].all()
        assert np.isnan(rounding(nan_of_all_ones)).all()
    assert round_to_bfloat16(np.array([3.4e38], np.float32)) == np.inf
    assert round_to_float16(np.array([65_520.0], np.float32)) == np.inf


def test_a_narrow_dtype_stays_narrow_through_numpys_own_functions_and_mixed_operands():
    (x,) = operands("bfloat16", np.array([1.0, 2.0, 3.0]))
    third = np.float64(1 / 3)
    for result in (x * third, third * x, x * np.arange(3), np.where([True, False, True], x, 0.1) / 3.0, x[1:] @ x[1:]):
        assert isinstance(result, Rounded) and result.dtype == np.float32
        np.testing.assert_array_equal(result, round_to_bfloat16(np.asarray(result)))
    y = x.copy()
    y += third
    np.testing.assert_array_equal(y, x + third)
    assert not isinstance(x > 1, Rounded)


def test_an_unknown_dtype_is_named():
    with pytest.raises(PackingError, match="working dtype 'int8' is unknown: pass one of \"float64\""):
        operands("int8", np.zeros(1))
