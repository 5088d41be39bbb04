"""A backend for the gate: an adapter of a few lines puts any attention before the conformance suite. This one leaks.

Run it: python examples/gate_backend.py    (or: crosspack conform --backend gate_backend:CausalOnly, in this folder)
Needs: pip install 'crosspack[test]'
"""

import subprocess
import sys
from pathlib import Path

try:
    import numpy as np

    from packing_core.protocol import Backend, Capabilities, attention_options, require_declared
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[test]'") from None


def softmax_attention(q, k, v, visible, scale):
    """Dense attention in numpy: q, k, v [B, S, H, D], visible [B, S, S]; this could be a call of any framework."""
    scores = np.where(visible[:, None], scale * np.einsum("bihd,bjhd->bhij", q, k), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)


class CausalOnly(Backend):
    """Runs a causal mask over the whole row, as many stacks do on packed rows."""

    description = "causal attention that does not know documents"
    capabilities = Capabilities(dtypes=("float32",), options=frozenset())

    def visible(self, segment_ids):
        return np.broadcast_to(np.tri(segment_ids.shape[1], dtype=bool), (*segment_ids.shape, segment_ids.shape[1]))

    def attention(self, q, k, v, segment_ids, *, dtype, scale=None, dout=None, **options):
        require_declared(self, dtype=dtype, options=attention_options(q, k, v, **options))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = softmax_attention(*(x.astype(np.float64) for x in (q, k, v)), self.visible(segment_ids), scale)
        out = np.where((segment_ids > 0)[..., None, None], out, 0)  # padding queries return exactly 0
        return out.astype(np.float32), {}


class InsideDocuments(CausalOnly):
    description = "the same with the document mask"

    def visible(self, segment_ids):
        return super().visible(segment_ids) & (segment_ids[:, :, None] == segment_ids[:, None, :])


if __name__ == "__main__":
    for name in ("CausalOnly", "InsideDocuments"):
        command = [sys.executable, "-m", "crosspack", "conform", "--backend", f"gate_backend:{name}"]
        done = subprocess.run(
            [*command, "--requirement", "ISO-01"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
        lines = (done.stdout + done.stderr).strip().splitlines()
        broken = [line.strip() for line in lines if "moved" in line] or lines[-1:]
        verdict = "every test passed" if done.returncode == 0 else "".join(broken[:1])
        print(f"{name}: exit status {done.returncode}: {verdict}")
