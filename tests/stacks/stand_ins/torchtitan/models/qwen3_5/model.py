"""A gated delta net that hands its boundaries on to its convolutions and its kernel, as Qwen3.5's does."""

from dataclasses import dataclass, field

import torch
from torch import nn

from torchtitan.config import Configurable


class GatedDeltaKernel(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        backend: str = "fla_chunked"

    def __init__(self, config):
        super().__init__()
        self.backend = config.backend

    def forward(self, xq_BLNK, xk_BLNK, xv_BLNV, g_BLN, beta_BLN, *, cu_seqlens=None, cu_seqlens_cpu=None):
        raise NotImplementedError


class GatedDeltaNet(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        heads: int = 2
        width: int = 16
        kernel: GatedDeltaKernel.Config = field(default_factory=GatedDeltaKernel.Config)

    def __init__(self, config):
        super().__init__()
        self.heads, channels = config.heads, config.heads * config.width
        self.project = nn.ModuleDict({name: nn.Linear(channels, channels) for name in "qkv"})
        self.gates = nn.Linear(channels, 2 * config.heads)
        self.convs = nn.ModuleDict({name: nn.Conv1d(channels, channels, 3, groups=channels) for name in "qkv"})
        self.kernel = config.kernel.build()

    def forward(self, x_BLD, attention_masks=None):
        bounds = host = None
        if attention_masks is not None:
            bounds = attention_masks.cu_seq_q.clone()
            host = torch.tensor(attention_masks.cu_seq_q_host, dtype=bounds.dtype)
        row = x_BLD.flatten(0, 1)[None]
        q, k, v = (
            self._causal_conv(self.project[n](row), self.convs[n], bounds, host).unflatten(2, (self.heads, -1))
            for n in "qkv"
        )
        decay, strength = self.gates(row).chunk(2, -1)
        decay, strength = -decay.abs() / 4, strength.sigmoid()
        return self.kernel(q, k, v, decay, strength, cu_seqlens=bounds, cu_seqlens_cpu=host).flatten(2).view_as(x_BLD)

    def _causal_conv(self, x_BLD, conv, cu_seqlens=None, cu_seqlens_cpu=None):
        raise NotImplementedError
