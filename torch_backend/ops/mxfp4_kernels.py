"""Triton kernel that makes the values of MXFP4 weights."""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def magnitude_and_sign(code):
    """The float32 value of a 4-bit code: sign, two bits of exponent, one of mantissa."""
    exponent, half = (code >> 1) & 3, code & 1
    small = tl.where(half == 1, 0.5, 0.0)
    normal = (((exponent + 126) << 23) | (half << 22)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, small, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def dequantize(blocks, scales, out, groups, BLOCK: tl.constexpr):
    """out [G, 32] = the values of blocks [G, 16] times ``2 ** (scales - 127)``. Grid: (groups / BLOCK,)."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (group < groups)[:, None]
    packed = tl.load(blocks + group[:, None] * 16 + tl.arange(0, 16)[None, :], inside, other=0).to(tl.int32)
    exponent = tl.load(scales + group, group < groups, other=127).to(tl.int32)[:, None]
    scale = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)  # 2 ** -127 is subnormal
    values = tl.interleave(magnitude_and_sign(packed & 15) * scale, magnitude_and_sign(packed >> 4) * scale)
    at = out + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(at, values.to(out.dtype.element_ty), inside)
