"""The gated delta net of Qwen3-Next and Qwen3.5: a layer of linear attention in the place of attention.

Data flows x [B, S, M] -> projections -> short convolution of q, k and v -> gated delta rule -> norm, gated by z -> x.
Attributes carry the names of the Hugging Face checkpoints. Shape letters: B rows, S tokens of a row, M hidden size, H
heads of q and k, N heads of v, D key channels of a head, E value channels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_backend.model.decoder_config import DecoderConfig
from jax_backend.model.linear import scale_by
from jax_backend.scan.convolution import causal_conv
from jax_backend.scan.delta_rule import gated_delta_rule


class GatedDeltaNet(nnx.Module):
    """Linear attention inside segments (Yang et al. 2024, arXiv:2412.06464, with the shapes of Qwen3-Next)."""

    def __init__(self, config: DecoderConfig, make: Any) -> None:
        net, m = config.delta_net, config.hidden_size
        assert net is not None
        keys, values = net.key_heads * net.key_width, net.heads * net.width
        if net.by_key_head:
            self.in_proj_qkvz = make.linear(m, 2 * keys + 2 * values, use_bias=False)
            self.in_proj_ba = make.linear(m, 2 * net.heads, use_bias=False)
        else:
            self.in_proj_qkv = make.linear(m, 2 * keys + values, use_bias=False)
            self.in_proj_z = make.linear(m, values, use_bias=False)
            self.in_proj_b = make.linear(m, net.heads, use_bias=False)
            self.in_proj_a = make.linear(m, net.heads, use_bias=False)
        self.conv1d = Convolution(2 * keys + values, net.kernel, make)
        self.dt_bias = make.ones(net.heads)
        rates = jax.random.uniform(make.rngs.params(), (net.heads,), jnp.float32, 0.01, 16.0)
        self.A_log = nnx.Param(jnp.log(rates).astype(make.kinds["param_dtype"]))
        self.norm = GatedNorm(net.width, config.rms_norm_eps, make)
        self.out_proj = make.linear(values, m, use_bias=False)
        self.net = net

    def __call__(self, x_BSM: jax.Array, segment_ids: jax.Array) -> jax.Array:
        net, row = self.net, x_BSM.shape[:2]
        qkv, z, b_BSN, a_BSN = self._projected(x_BSM)
        weight = self.conv1d.weight[...][:, 0]
        qkv = causal_conv(qkv, weight.astype(qkv.dtype), segment_ids, activation="silu")
        keys = net.key_heads * net.key_width
        q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
        rate_N = jnp.exp(self.A_log[...].astype(jnp.float32))
        step_BSN = jax.nn.softplus(a_BSN.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None, None])
        out_BSNE = gated_delta_rule(
            q.reshape(*row, net.key_heads, net.key_width),
            k.reshape(*row, net.key_heads, net.key_width),
            v.reshape(*row, net.heads, net.width),
            -rate_N[None, None] * step_BSN,
            jax.nn.sigmoid(b_BSN),
            segment_ids,
            normalise=True,
        )
        out_BSNE = self.norm(out_BSNE, z.reshape(out_BSNE.shape))
        return self.out_proj(out_BSNE.reshape(*row, -1))

    def _projected(self, x_BSM: jax.Array) -> tuple[jax.Array, ...]:
        """q, k and v side by side [B, S, 2 H D + N E], z [B, S, N E], b and a [B, S, N]."""
        if not self.net.by_key_head:
            return self.in_proj_qkv(x_BSM), self.in_proj_z(x_BSM), self.in_proj_b(x_BSM), self.in_proj_a(x_BSM)
        net, row = self.net, x_BSM.shape[:2]
        group = net.heads // net.key_heads
        sizes = [net.key_width, net.key_width, group * net.width]
        of_heads = self.in_proj_qkvz(x_BSM).reshape(*row, net.key_heads, -1)
        q, k, v, z = jnp.split(of_heads, [sizes[0], sum(sizes[:2]), sum(sizes)], axis=-1)
        b, a = jnp.split(self.in_proj_ba(x_BSM).reshape(*row, net.key_heads, 2 * group), 2, axis=-1)
        q, k, v, z, b, a = (x.reshape(*row, -1) for x in (q, k, v, z, b, a))
        return jnp.concatenate([q, k, v], axis=-1), z, b, a


class Convolution(nnx.Module):
    """The weight [E, 1, W] of a short convolution, as checkpoints keep it."""

    def __init__(self, channels: int, width: int, make: Any) -> None:
        self.weight = make.weight(channels, 1, width)


class GatedNorm(nnx.Module):
    """Root-mean-square norm of each head, then times silu(z); both in float32."""

    def __init__(self, size: int, eps: float, make: Any) -> None:
        self.weight = make.ones(size)
        self.eps = eps

    def __call__(self, x: jax.Array, z: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        normed = scale_by(wide.astype(x.dtype), self.weight[...])
        return (normed.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
