"""The launch side of scans over chunks of a row: sizes, tiles and grids, and rows of whole chunks.

The operators of a delta rule -> :func:`differentiable_scan` -> :func:`scan`, or :func:`scan_with_states`, on whole
chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import LayoutError
from torch_backend.ops.operators import differentiable, runs_triton
from torch_backend.pieces import most_pieces
from torch_backend.segments import PackedMetadata

# Tokens. Half as many as others take: tiles of 32 rows keep Triton off Hopper's wgmma, by which it gets products of
# narrow heads wrong (3.6, seen with 16 and 32 channels on an H200).
CHUNK = 32
LONG, _NOT_NARROW = 64, 64  # where heads are not narrow, fewer states go through memory in longer chunks
WIDTHS = (16, 32, 64, 128, 256)  # of heads, that tiles take


class ChunkTile(NamedTuple):
    """The launch options of a kernel: the channels of v that it takes at once, its warps, its loop's stages."""

    block_v: int
    warps: int
    stages: int = 1


# In float16 and bfloat16; float32 takes half of the channels, without stages, for its elements are twice as large.
# Measured on an H200 by benchmarks/gpu_scan_tiles.py, which is at commit 82638478.
TILES = {
    "prepare": ChunkTile(0, 1),
    "carry": ChunkTile(32, 2, 3),
    "output": ChunkTile(128, 4),
    "values_backward": ChunkTile(128, 4),
    "carry_backward": ChunkTile(32, 2, 2),
    "chunk_backward": ChunkTile(32, 4),
}
# Where documents and heads are so few that what walks documents leaves most of the GPU idle.
FEW = {"carry": ChunkTile(16, 2, 2), "carry_backward": ChunkTile(16, 2, 2)}
_FEW_WALKS = 512  # documents times heads
# Of Kimi's rule, whose decays take registers.
KIMI_TILES = TILES | {
    "decay": ChunkTile(0, 8),
    "score": ChunkTile(0, 4),
    "solve": ChunkTile(0, 1),
    "carry": ChunkTile(32, 4, 2),
    "carry_backward": ChunkTile(32, 4, 2),
    "chunk_backward": ChunkTile(32, 4),
}
LINEAR_TILES = {
    "prepare": ChunkTile(0, 4),
    "carry": ChunkTile(64, 4, 2),
    "output": ChunkTile(64, 4),
    "values_backward": ChunkTile(64, 4),
    "carry_backward": ChunkTile(64, 8, 2),
    "chunk_backward": ChunkTile(32, 8),
}
LINEAR_FEW = {"carry": ChunkTile(16, 2, 2)}
# Of linear attention by the widest heads where shared memory does not hold the tiles above: compiled for sm_86, where a
# program has 99 KB.
LINEAR_SMALL = {"output": ChunkTile(32, 4), "carry_backward": ChunkTile(32, 4)}
_HELD = 128 * 128  # numbers of a state in a program, at most: 32 KiB, as float32 takes half of the channels
MOST_SHARING = 16  # heads of v that share a head of k and whose gradients of it one program adds up, at most


def unsupported(v: Tensor, width: int, value_width: int) -> str | None:
    """Explains why the kernels do not support values like v, with heads of ``width`` and ``value_width``; or None."""
    if not runs_triton(v):
        return f"runs on a GPU in bfloat16, float16 and float32, not on {v.device.type} in {v.dtype}"
    for each in (width, value_width):
        if each not in WIDTHS:
            return f"takes heads of {', '.join(map(str, WIDTHS))} channels, not {each}"
    return None


def chunk_length(width: int, v: Tensor) -> int:
    """Tokens of a chunk for heads of ``width`` of k, by kernels that take either length."""
    wide = min(width, v.shape[2]) >= _NOT_NARROW and v.dtype != torch.float32
    return LONG if wide else CHUNK


Scan = Callable[..., tuple[Tensor, Tensor]]


def differentiable_scan(ahead: Callable[..., Any], behind: Callable[..., Any]) -> Scan:
    """(five inputs, initial states, boundaries, segments, options) -> output and final states, with gradients.

    Args:
        ahead: operator of these arguments -> output, final states, what its backward keeps.
        behind: operator of the tensors among these arguments, what was kept, the gradients of output and final states,
            and the options -> gradients of inputs and initial states.
    """
    return differentiable(ahead, behind, tensors=8, outputs=2, contiguous=True)


def scan(
    apply: Scan, inputs: Sequence[Tensor | None], packed: PackedMetadata, scale: float | None, *options: Any
) -> Tensor:
    """The output [T, H, V] of a scan of q, k, v, ... whose state is zero before each segment.

    Args:
        apply: see :func:`differentiable_scan`.
        inputs: q and k [T, Q, K], v [T, H, V] and others [T, ...], some None.
        packed: the segments.
        scale: of the output; K ** -0.5 by default.
        options: others that ``apply`` takes.
    """
    return apply(*_of_one_dtype(inputs), None, packed.cu_seqlens, packed.seq_idx, _scale(inputs, scale), *options)[0]


def scan_with_states(
    apply: Scan,
    inputs: Sequence[Tensor | None],
    packed: PackedMetadata,
    initial: Tensor | None,
    scale: float | None,
    size: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """The same from a state per segment, and the last states: both [N, H, K, V], in float32. None for zeros.

    It runs on a row where every segment has whole chunks of ``size`` tokens, zeros in between.

    Raises:
        LayoutError: ``initial`` has another shape.
    """
    q, _, v = inputs[:3]
    assert q is not None and v is not None
    shape = len(packed.cu_seqlens) - 1, v.shape[1], q.shape[2], v.shape[2]
    if initial is None:
        initial = v.new_zeros(shape, dtype=torch.float32)
    if initial.shape != shape:
        raise LayoutError(f"initial states are {list(shape)} [N, H, K, V] here, got {list(initial.shape)}")
    whole, place = in_whole_chunks(packed, size)
    padded = [None if x is None else placed(x, place, whole.tokens) for x in _of_one_dtype(inputs)]
    transposed = initial.float().transpose(2, 3).contiguous()
    out, final = apply(*padded, transposed, whole.cu_seqlens, whole.seq_idx, _scale(inputs, scale), *options)
    return out.index_select(0, place), final.transpose(2, 3)


def _of_one_dtype(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """q and k in the dtype of v."""
    q, k, v, *others = inputs
    assert q is not None and k is not None and v is not None
    return [q.to(v.dtype), k.to(v.dtype), v, *others]


def _scale(inputs: Sequence[Tensor | None], scale: float | None) -> float:
    assert inputs[0] is not None
    return float(inputs[0].shape[-1] ** -0.5) if scale is None else scale


def in_whole_chunks(packed: PackedMetadata, size: int) -> tuple[PackedMetadata, Tensor]:
    """The segments padded to whole chunks of ``size`` tokens, and int64 [T] the place of each token there."""

    def find(packed: PackedMetadata) -> tuple[PackedMetadata, Tensor]:
        lengths = (packed.cu_seqlens.diff() + (size - 1)).div(size, rounding_mode="floor") * size
        boundaries = F.pad(lengths.cumsum(0), (1, 0)).int()
        tokens = most_pieces(packed.tokens, len(lengths), size) * size
        place = boundaries.index_select(0, packed.seq_idx) + packed.position_ids
        return PackedMetadata(boundaries, tokens, tokens), place

    return packed.derived(("whole chunks", size), find)


def placed(x: Tensor, place: Tensor, tokens: int) -> Tensor:
    """x [T, ...] at its places in a row of so many tokens, zeros in between."""
    return x.new_zeros(tokens, *x.shape[1:]).index_copy(0, place, x)


def like(x: Tensor | None, v: Tensor) -> Tensor:
    """Unwritten memory of the form of x, or none where there is no x."""
    return v.new_empty(0) if x is None else torch.empty_like(x)


def gradients_like(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, other: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    """Unwritten memory for the gradients of a scan's arguments."""
    return tuple(like(x, v) for x in (q, k, v, g, beta, other))


def group_of(heads: int, shared: int, most: int) -> int:
    """Returns how many heads of v that share a head of k one program takes: at most ``most``, and a divisor of all."""
    each = heads // shared
    return max(n for n in range(1, min(each, most) + 1) if each % n == 0)


def gradient_parts(q: Tensor, groups: int) -> Tensor:
    """Unwritten memory [T, groups, K] for a gradient of q [T, Q, K] or k, in float32 where programs share a head."""
    dtype = q.dtype if groups == q.shape[1] else torch.float32
    return q.new_empty(q.shape[0], groups, q.shape[2], dtype=dtype)


def summed_parts(parts: Tensor, q: Tensor) -> Tensor:
    """Adds up what :func:`gradient_parts` holds, [T, groups, K], to [T, Q, K] in the dtype of q [T, Q, K]."""
    if parts.shape[1] == q.shape[1]:
        return parts
    return parts.unflatten(1, (q.shape[1], -1)).sum(2).to(q.dtype)


class ChunkLaunch:
    """One call: its sizes, and how each kernel is launched."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        beta: Tensor | None,
        initial: Tensor | None,
        boundaries: Tensor,
        tiles: Mapping[str, ChunkTile],
        chunk: int,
    ) -> None:
        self.dtype = v.dtype
        self.tokens, self.heads, self.value_width = v.shape
        self.shared, self.width = q.shape[1:]
        self.chunks = -(-self.tokens // chunk)
        self.segments = len(boundaries) - 1
        few = LINEAR_FEW if tiles is LINEAR_TILES else FEW
        self.tiles = {**tiles, **few} if self.segments * self.heads < _FEW_WALKS else tiles
        self.sizes: dict[str, Any] = {
            "H": self.heads, "Q": self.shared, "K": self.width, "V": self.value_width, "C": chunk,
            "GAIN": beta is not None, "STATES": initial is not None, "GROUP": self.group,
            "LEVELS": chunk.bit_length() - 1,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32x3",
        }  # fmt: skip

    @property
    def group(self) -> int:
        """Heads of v in a program of ``chunk_backward``."""
        return group_of(self.heads, self.shared, MOST_SHARING)

    def states(self, like: Tensor) -> Tensor:
        """[chunks, H, V, K], unwritten where no document reaches from one chunk into the next."""
        make = like.new_zeros if self.sizes["STATES"] else like.new_empty  # then chunks of padding read theirs
        return make(self.chunks, self.heads, self.value_width, self.width)

    def grid(self, name: str, block: int) -> tuple[int, int, int]:
        """The programs of a kernel: over chunks or segments, heads, and parts of the channels of v."""
        first = self.segments if name.startswith("carry") else self.chunks
        second = self.heads // self.group if name == "chunk_backward" else self.heads
        return first, second, self.value_width // block if name in ("carry", "carry_backward", "output") else 1

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Start a kernel with the constants that it takes."""
        name = kernel.__name__
        wide = self.dtype == torch.float32
        block, warps, stages = self.tiles[name]
        block = min(block, _HELD // self.width)
        block = min(max(16, block // (1 + wide)), self.value_width)
        known = self.sizes | {"BLOCK_V": block}
        constants = {key: value for key, value in known.items() if key in kernel.arg_names}
        kernel[self.grid(name, block)](*arguments, **constants, num_warps=warps, num_stages=1 if wide else stages)
