"""Conformance adapters of the scan libraries that hybrids are trained with: ``fla``, ``flash_qla`` and ``mamba_ssm``.

Each library's function is called as its documentation says for packed rows, and nothing of ours stands in between:
what the suite sees is what a user of the library gets. Rows are flattened to one and padding is a segment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from packing_core import protocol
from packing_core.errors import UnsupportedError
from packing_core.protocol import Array, BackendFactory, Capabilities, Gradients, OperationCall, takes_call
from torch_backend.conformance.tensors import TensorMethods


def fla() -> Mapping[str, BackendFactory]:
    """Returns the backends of the entry point ``fla``."""
    return {"fla": partial(_make, Fla)}


def flash_qla() -> Mapping[str, BackendFactory]:
    """Returns the backends of the entry point ``flash_qla``."""
    return {"flash_qla": partial(_make, FlashQla)}


def mamba_ssm() -> Mapping[str, BackendFactory]:
    """Returns the backends of the entry point ``mamba_ssm``."""
    return {"mamba_ssm": partial(_make, MambaSsm)}


class Library(TensorMethods):
    """A library's functions on one device.

    Attributes:
        distribution: what pip calls it.
        module: where the functions are.
    """

    distribution: str
    module: str

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.functions = import_module(self.module)
        self.description = f"{self.distribution} {version(self.distribution)} on {torch.cuda.get_device_name(device)}"

    def _boundaries(self, segment_ids: Array) -> Tensor:
        return torch.tensor(protocol.cu_seqlens(segment_ids), dtype=torch.int64, device=self.device)


def _make(kind: type[Library]) -> Library:
    """The adapter, or in one line why there is none here."""
    try:
        import_module(kind.module.partition(".")[0])
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"{missing.name} is not installed: pip install {kind.distribution} beside your torch"
        ) from missing
    if not torch.cuda.is_available():
        raise UnsupportedError(f"the kernels of {kind.distribution} need a GPU, and torch sees none")
    try:
        return kind(torch.device("cuda"))
    except Exception as reason:  # a library may refuse a device or a version in any way
        raise UnsupportedError(f"{kind.distribution} does not load here: {type(reason).__name__}: {reason}") from reason


class _DeltaRules(Library):
    """Libraries of delta rules over one flattened row with boundaries."""

    @takes_call("q", "k", "v", "g", "beta")
    def delta_rule(self, call: OperationCall) -> tuple[Array, Gradients]:
        q, _, v, g, _ = call.operands.values()
        protocol.require_declared(self, options=protocol.delta_rule_options(q, v, g, **call.options))
        function = self._function(by_channel=g.ndim == 4)
        boundaries, normalise = self._boundaries(call.segment_ids), call.options.get("normalise", False)

        def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            q, k, v, g, beta = (x.flatten(0, 1)[None] for x in (q, k, v, g.float(), beta))  # g as models make it
            out: Tensor = function(q, k, v, g=g, beta=beta, cu_seqlens=boundaries, use_qk_l2norm_in_kernel=normalise)[0]
            return out[0].unflatten(0, call.segment_ids.shape)

        return self._run(run, call)

    def _function(self, *, by_channel: bool) -> Callable[..., Any]:
        raise NotImplementedError


class Fla(_DeltaRules):
    """`chunk_gated_delta_rule` and, where each channel has a decay of its own, `chunk_kda`."""

    distribution = "flash-linear-attention"
    module = "fla.ops"
    capabilities = Capabilities(options=frozenset(protocol.OPTIONS["delta_rule"]) - {"continued_segments"})

    def _function(self, *, by_channel: bool) -> Callable[..., Any]:
        name = "chunk_kda" if by_channel else "chunk_gated_delta_rule"
        function: Callable[..., Any] = getattr(self.functions, name)
        return function


class FlashQla(_DeltaRules):
    """`chunk_gated_delta_rule` without its automatic context parallelism, which reads boundaries back."""

    distribution = "flash-qla"
    module = "flash_qla"
    capabilities = Capabilities(("bfloat16", "float16"), frozenset({"grouped_values", "normalise"}), head_dims=[128])

    def _function(self, *, by_channel: bool) -> Callable[..., Any]:
        return partial(self.functions.chunk_gated_delta_rule, auto_cp=False)


class MambaSsm(Library):
    """`mamba_chunk_scan_combined`, which takes the number of each token's segment."""

    distribution = "mamba-ssm"
    module = "mamba_ssm.ops.triton.ssd_combined"
    capabilities = Capabilities(options=frozenset())

    @takes_call("x", "dt", "A", "B", "C", "D")
    def ssd(self, call: OperationCall) -> tuple[Array, Gradients]:
        starts = protocol.position_ids(call.segment_ids) == 0
        numbers = torch.tensor(starts.cumsum(axis=1) - 1, dtype=torch.int32, device=self.device)

        def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
            out: Tensor = self.functions.mamba_chunk_scan_combined(
                x, dt, A.float(), B, C, chunk_size=64, D=D.float(), seq_idx=numbers
            )
            return out

        return self._run(run, call)
