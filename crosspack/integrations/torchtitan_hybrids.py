"""An override for torchtitan's Qwen3.5: its gated delta rule and convolutions, replaced by ``--override.imports``.

torchtitan's ``VarlenMetadata`` -> :func:`.torchtitan.segments_of` -> in place of the boundaries, which its layer hands
on to its convolutions and its kernel -> :class:`PackedDeltaNet` and :class:`PackedDeltaKernel` read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenMetadata
from torchtitan.models.qwen3_5.model import GatedDeltaKernel, GatedDeltaNet

import crosspack
from crosspack.integrations.torchtitan import segments_of
from packing_core.errors import LayoutError, UnsupportedError

_RULE = "torch_chunk_gated_delta_rule"  # as transformers names it


class _Boundaries:
    """The segments of a batch in place of the boundaries, which the layer copies before it hands them on."""

    dtype = torch.int32

    def __init__(self, packed: crosspack.PackedMetadata) -> None:
        self.packed = packed

    def clone(self) -> _Boundaries:
        return self


class PackedDeltaKernel(GatedDeltaKernel):
    """The gated delta rule in Triton, forward and backward, in the dtype of its inputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaKernel.Config):
        """Options of torchtitan's kernel, whose ``backend`` has no effect."""

    def forward(
        self,
        xq_BLNK: Tensor,
        xk_BLNK: Tensor,
        xv_BLNV: Tensor,
        g_BLN: Tensor,
        beta_BLN: Tensor,
        *,
        cu_seqlens: Any = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:
        """Scans each document from an empty state, with q and k of unit length.

        Raises:
            UnsupportedError: Triton does not run on these tensors, or not on heads of this width.
        """
        from torch_backend.ops.scan import modeling_calls

        args, kwargs = (xq_BLNK, xk_BLNK, xv_BLNV, g_BLN, beta_BLN), {"use_qk_l2norm_in_kernel": True}
        reason = modeling_calls.refused(_RULE, args, kwargs)
        if reason is not None:
            raise UnsupportedError(f"the gated delta rule {reason}: leave packed_delta_net out")
        out: Tensor = modeling_calls.scan(_RULE, cu_seqlens.packed, args, kwargs)[0]
        return out


class PackedDeltaNet(GatedDeltaNet):
    """torchtitan's gated delta net, whose convolutions and scan restart at every document by our kernels."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaNet.Config):
        """Options of torchtitan's layer."""

    def forward(self, x_BLD: Tensor, attention_masks: VarlenMetadata | None = None) -> Tensor:
        """Mixes the tokens of each document, [B, L, D] -> [B, L, D].

        Raises:
            LayoutError: the batch states no documents; torchtitan would run its rows as one.
            UnsupportedError: the layer is tensor parallel, or what its kernel refuses.
        """
        if attention_masks is None:
            raise LayoutError(
                "a gated delta net got no boundaries, and would run all rows of the batch as one document: configure "
                'attn_backend="varlen" or "flex", by which torchtitan makes them of positions'
            )
        rows, length = x_BLD.shape[:2]
        boundaries: Any = _Boundaries(segments_of(attention_masks, rows, length))
        handed = VarlenMetadata(boundaries, boundaries, length, length, ())
        out: Tensor = super().forward(x_BLD, handed)
        return out

    def _causal_conv(
        self, x_BLD: Tensor, conv: Any, cu_seqlens: Any = None, cu_seqlens_cpu: Tensor | None = None
    ) -> Tensor:
        from torch_backend.ops.conv import short_convolution

        if isinstance(x_BLD, DTensor):
            raise UnsupportedError(
                "packed_delta_net does not cut its heads over ranks: leave it out, or tensor_parallel_degree at 1"
            )
        return short_convolution(x_BLD[0], conv.weight, cu_seqlens.packed, silu=True)[None]


@override(target=GatedDeltaNet.Config, description="gated delta rule and convolution of Crosspack")
def packed_delta_net(cfg: GatedDeltaNet.Config) -> PackedDeltaNet.Config:
    """Replaces every gated delta net."""
    return derive(cfg, PackedDeltaNet.Config, kernel=derive(cfg.kernel, PackedDeltaKernel.Config))
