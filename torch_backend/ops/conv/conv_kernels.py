"""Triton kernels of the causal short convolution inside segments; kernels only, launched by ``torch_backend.ops.conv``.

A program holds a tile [tokens, channels]; the W shifted reads of a tile come from the first-level cache, so device
memory sees each element once. ``position`` counts a token from its segment's start: lag w stays inside the segment
where ``position >= w``. Arithmetic is float32; x [T, C] may have any strides, and offsets along both axes have 64 bits.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def convolve(
    x, weight, bias, positions, t, c, tokens, x_t, x_c, w_c, w_w,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The convolution before its activation at tokens t [.., 1] and channels c [1, ..], float32; 0 outside."""
    has = (t >= 0) & (t < tokens)
    position = tl.load(positions + t, has, other=-1)
    total = tl.zeros([t.shape[0], c.shape[1]], tl.float32)
    for lag in tl.static_range(WIDTH):
        taken = tl.load(x + (t - lag) * x_t + c * x_c, (position >= lag) & (c < CHANNELS), other=0.0)
        total += taken.to(tl.float32) * tl.load(weight + c * w_c + (WIDTH - 1 - lag) * w_w, c < CHANNELS, other=0.0)
    if BIAS:
        total += tl.load(bias + c, c < CHANNELS, other=0.0)
    return total


@triton.jit
def forward(
    x, weight, bias, positions, y, tokens, x_t, x_c, w_c, w_w,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y [T, C], contiguous. Grid: (token tiles, channel tiles)."""
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    c = (tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    z = convolve(x, weight, bias, positions, t, c, tokens, x_t, x_c, w_c, w_w, CHANNELS, WIDTH, BIAS)
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y + t * CHANNELS + c, z.to(y.dtype.element_ty), (t < tokens) & (c < CHANNELS))


@triton.jit
def weights_backward(
    x, weight, bias, positions, dy, dz, dweight, dbias, tokens, x_t, x_c, w_c, w_w, dy_t, dy_c,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    LAGS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dz [T, C] in float32 with SILU, and this program's share of dweight [programs, C, W] and dbias [programs, C].

    With z the convolution, computed again, and dz the gradient there, the weight of lag w gets the sum of dz[t] x[t-w]
    over the tokens whose segment reaches back that far. A program walks over TILES tiles and adds up over their tokens
    in the end. Grid: (programs, channel tiles).
    """
    c = (tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    w = tl.arange(0, LAGS)
    weight_sum = tl.zeros([BLOCK_T, LAGS, BLOCK_C], tl.float32)
    bias_sum = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tile in range(TILES):
        first = (tl.program_id(0) * TILES + tile).to(tl.int64) * BLOCK_T
        t = (first + tl.arange(0, BLOCK_T))[:, None]
        known = (t < tokens) & (c < CHANNELS)
        gradient = tl.load(dy + t * dy_t + c * dy_c, known, other=0.0).to(tl.float32)
        if SILU:
            z = convolve(x, weight, bias, positions, t, c, tokens, x_t, x_c, w_c, w_w, CHANNELS, WIDTH, BIAS)
            gate = tl.sigmoid(z)
            gradient *= gate * (1 + z * (1 - gate))
            tl.store(dz + t * CHANNELS + c, gradient, known)
        position = tl.load(positions + t, t < tokens, other=-1)
        for lag in tl.static_range(WIDTH):
            inside = (position >= lag) & (c < CHANNELS)
            taken = tl.load(x + (t - lag) * x_t + c * x_c, inside, other=0.0).to(tl.float32)
            share = tl.where(inside, gradient * taken, 0.0)
            weight_sum += tl.where((w == WIDTH - 1 - lag)[None, :, None], share[:, None, :], 0.0)
        if BIAS:
            bias_sum += gradient
    place = (tl.program_id(0).to(tl.int64) * CHANNELS + c) * WIDTH + w[:, None]
    tl.store(dweight + place, tl.sum(weight_sum, 0), (c < CHANNELS) & (w < WIDTH)[:, None])
    if BIAS:
        tl.store(
            dbias + tl.program_id(0).to(tl.int64) * CHANNELS + c, tl.sum(bias_sum, 0, keep_dims=True), c < CHANNELS
        )


@triton.jit
def input_backward(
    weight, positions, dz, dx, tokens, w_c, w_w, dz_t, dz_c,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx [T, C], contiguous: the sum of weight[W - 1 - w] dz[t + w] over the lags w that stay inside the segment.

    Grid: (token tiles, channel tiles).
    """
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    c = (tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for lag in tl.static_range(WIDTH):
        later = t + lag
        position = tl.load(positions + later, later < tokens, other=-1)
        inside = (position >= lag) & (c < CHANNELS)
        tap = tl.load(weight + c * w_c + (WIDTH - 1 - lag) * w_w, c < CHANNELS, other=0.0)
        total += tl.load(dz + later * dz_t + c * dz_c, inside, other=0.0).to(tl.float32) * tap
    tl.store(dx + t * CHANNELS + c, total.to(dx.dtype.element_ty), (t < tokens) & (c < CHANNELS))
