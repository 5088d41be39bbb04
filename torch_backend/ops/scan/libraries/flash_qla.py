"""FlashQLA's kernels of the gated delta rule as operators: compilers do not look inside, CUDA graphs record them.

q, k, v, g, beta [T, ...] and the batch's metadata -> :func:`gated_delta_rule` -> [T, H, V]. The library's own function
turns compilation off and reads the boundaries back to list the chunks. Its forward and backward take a list, and here
it is made on the device (:func:`tables`). Its context parallelism, which reads boundaries back too, stays off.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import UnsupportedError
from torch_backend.ops.operators import differentiable, operator
from torch_backend.ops.scan.libraries.fla import CHUNK, chunk_counts, chunks
from torch_backend.segments import PackedMetadata

WIDTH = 128  # of the only heads that it takes
DTYPES = (torch.bfloat16, torch.float16)
_LISTED = "_flash_qla_prepared_varlen"  # where on the boundaries its prepare_varlen_metadata leaves the list


def unsupported(packed: PackedMetadata, q: Tensor, v: Tensor) -> str | None:
    """Explains why such heads are not supported on such a row, else None: its kernels take minutes to compile."""
    if q.shape[-1] != WIDTH or v.shape[-1] != WIDTH:
        return f"it takes heads of {WIDTH} channels, not of {q.shape[-1]} and {v.shape[-1]}"
    if v.dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {str(v.dtype).removeprefix('torch.')}"
    if packed.tokens < CHUNK:  # at an empty segment its backward reads the chunk before
        return f"it takes rows of {CHUNK} tokens or more, not of {packed.tokens}"
    return None


def gated_delta_rule(packed: PackedMetadata, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """FlashQLA's gated delta rule: arguments and result as of the project's own, with g in float32 inside.

    Raises:
        UnsupportedError: this version of the library takes no list of chunks, or another one.
    """
    boundaries, starts, listed = packed.derived("flash_qla", tables)
    found: Tensor = _rule(q.to(v.dtype), k.to(v.dtype), v, g.float(), beta, boundaries, starts, listed)
    return found


def tables(packed: PackedMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Boundaries with an empty segment more, int32 [N+2] the first chunk of each, (segment, chunk) of all chunks."""
    boundaries, listed = packed.derived("chunks", chunks)
    return boundaries, F.pad(chunk_counts(boundaries).cumsum(0), (1, 0)).int(), listed


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, boundaries: Tensor, starts: Tensor, listed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_qla import chunk_gated_delta_rule_fwd

    _list_chunks(boundaries, starts, listed)
    rows = (x[None] for x in (q, k, v, g, beta))
    sums, inverses, out, *_ = chunk_gated_delta_rule_fwd(
        *rows, output_final_state=False, cu_seqlens=boundaries, auto_cp=False
    )
    return out[0].to(v.dtype), sums[0], inverses[0]


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, boundaries: Tensor, starts: Tensor, listed: Tensor,
    sums: Tensor, inverses: Tensor, dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_qla import chunk_gated_delta_rule_bwd

    _list_chunks(boundaries, starts, listed)
    rows = (x[None] for x in (q, k, v, sums, beta, inverses, dout))
    dq, dk, dv, dbeta, dg, _ = chunk_gated_delta_rule_bwd(*rows, cu_seqlens=boundaries, auto_cp=False)
    return tuple(dx[0].to(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v), (dg, g), (dbeta, beta)))


def _list_chunks(boundaries: Tensor, starts: Tensor, listed: Tensor) -> None:
    if not _takes_lists():
        raise UnsupportedError("this version of flash_qla would read the boundaries back")
    setattr(boundaries, _LISTED, (CHUNK, starts, len(listed), listed))


@cache
def _takes_lists() -> bool:
    """Tries on the host whether this version of the library keeps such a list on the boundaries."""
    from flash_qla.utils.index import prepare_varlen_metadata

    packed = PackedMetadata.from_lengths((70, 29))
    boundaries, starts, listed = tables(packed)
    size, *found = getattr(prepare_varlen_metadata(boundaries.clone(), boundaries), _LISTED, (0,))
    right = [starts.tolist(), len(listed), listed.tolist()]
    return size == CHUNK and [x.tolist() if isinstance(x, Tensor) else x for x in found] == right


_forward = operator(
    "flash_qla_gated_delta_rule",
    _launch_forward,
    lambda q, k, v, g, *_: (torch.empty_like(v), torch.empty_like(g), k.new_empty(*v.shape[:2], CHUNK)),
)
_backward = operator(
    "flash_qla_gated_delta_rule_backward",
    _launch_backward,
    lambda q, k, v, g, beta, *_: tuple(torch.empty_like(x) for x in (q, k, v, g, beta)),
)
_rule = differentiable(_forward, _backward, tensors=8, contiguous=True)
