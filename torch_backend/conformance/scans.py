"""The part of the conformance adapter about delta rules and the scan of Mamba-2, as layers of patched models run them.

transformers' own functions, behind the stand-ins that a patch puts in their place: our kernels on a GPU, fla's or
mamba_ssm's where those pass their trial, batches of documents in plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor

from packing_core.errors import UnsupportedError
from packing_core.protocol import Array, Gradients
from torch_backend.conformance.tensors import TensorMethods
from torch_backend.hf.anatomy.families import SCANS
from torch_backend.hf.edits.stand_ins import LayerSegments, scan

# The function that layers call, and a modeling file that has it.
_FILES = {
    "torch_chunk_gated_delta_rule": "qwen3_next",
    "chunk_kimi_delta_attention": "kimi_linear",
    "mamba2_chunk_scan": "mamba2",
}
_CHUNK = 64
# Before 5.23 the function takes as many heads of q and k as of v, and layers repeat them.
_HEADS_REPEATED_BY_LAYERS = Version(transformers.__version__) < Version("5.23")


class ScanMethods(TensorMethods):
    """`delta_rule` and `ssd`."""

    def delta_rule(
        self,
        q: Array,
        k: Array,
        v: Array,
        g: Array,
        beta: Array,
        segment_ids: Array,
        *,
        dtype: str,
        normalise: bool = False,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        name = "chunk_kimi_delta_attention" if g.ndim == 4 else "torch_chunk_gated_delta_rule"
        run = self._stand_in(name, segment_ids)

        def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            if _HEADS_REPEATED_BY_LAYERS:
                q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
            out: Tensor = run(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normalise)[0]
            return out

        operands = self._operands({"q": q, "k": k, "v": v, "g": g, "beta": beta}, dtype)
        return self._out_and_gradients(layer, operands, dout)

    def ssd(
        self,
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        D: Array,
        segment_ids: Array,
        *,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        run = self._stand_in("mamba2_chunk_scan", segment_ids)

        def layer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
            out: Tensor = run(x, dt, A, B, C, chunk_size=_CHUNK, D=D)
            return out.to(x.dtype)

        operands = self._operands({"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}, dtype)
        return self._out_and_gradients(layer, operands, dout)

    def _stand_in(self, name: str, segment_ids: Array) -> Callable[..., Any]:
        """Returns the function that a patched layer calls under this name, for these segments."""
        file = f"transformers.models.{_FILES[name]}.modeling_{_FILES[name]}"
        try:
            function = getattr(import_module(file), name)
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(f"this transformers has no {name}: install transformers 5") from error
        return partial(scan, name, function, SCANS[name], seq_idx=LayerSegments(self._packed(segment_ids)))
