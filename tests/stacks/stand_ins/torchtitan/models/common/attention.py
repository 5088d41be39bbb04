"""Varlen attention, and the boundaries that it reads."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchtitan.config import Configurable


class VarlenMetadata(NamedTuple):
    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int
    cu_seq_q_host: tuple[int, ...] | None = None


class VarlenAttention(torch.nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config):
        super().__init__()
        self.window_size = config.window_size

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, out_transform=None, **kwargs):
        raise NotImplementedError


def create_varlen_metadata_for_document(positions, *, include_host_offsets=False):
    starts = (positions.flatten() == 0).nonzero()[:, 0].int()
    bounds = torch.cat([starts, starts.new_tensor([positions.numel()])])
    longest = int(bounds.diff().max())
    return VarlenMetadata(bounds, bounds, longest, longest)
