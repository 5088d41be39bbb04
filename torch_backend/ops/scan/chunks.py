"""What the kernels of scans over chunks of a row share: their sizes, tiles and grids, and rows of whole chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import LayoutError
from torch_backend.ops.operators import runs_triton
from torch_backend.segments import PackedMetadata, most_pieces

# Tokens. Half as many as others take: documents are short, a state is small beside it, and tiles of 32 rows keep Triton
# off Hopper's wgmma, by which it gets products of narrow heads wrong (3.6, seen with 16 and 32 channels on an H200).
CHUNK = 32
WIDTHS = (16, 32, 64, 128, 256)  # of heads, that tiles take


class Tile(NamedTuple):
    """How a kernel runs: the channels of v that it takes at once, its warps, and the stages of its loop's loads."""

    block_v: int
    warps: int
    stages: int = 1


# In float16 and bfloat16; float32 takes half of the channels, without stages, for its elements are twice as large.
# Measured on an H200 by benchmarks/gpu_scan_tiles.py.
TILES = {
    "prepare": Tile(0, 1),
    "carry": Tile(32, 2, 3),
    "output": Tile(128, 4),
    "values_backward": Tile(128, 4),
    "carry_backward": Tile(32, 2, 2),
    "chunk_backward": Tile(32, 4),
}
# Where documents and heads are so few that what walks documents leaves most of the GPU idle.
FEW = {"carry": Tile(16, 2, 2), "carry_backward": Tile(16, 2, 2)}
_FEW_WALKS = 512  # documents times heads
# Of Kimi's rule, whose decays take registers.
KIMI_TILES = TILES | {
    "prepare": Tile(0, 8),
    "carry": Tile(32, 4, 2),
    "carry_backward": Tile(32, 4, 2),
    "chunk_backward": Tile(32, 8),
}
_HELD = 128 * 128  # numbers of a state in a program, at most: 32 KiB, as float32 takes half of the channels
_GROUP = 16  # heads of v that share a head of k and whose gradients of it one program adds up, at most


def unsupported(v: Tensor, width: int, value_width: int) -> str | None:
    """Why the kernels do not serve values like v, with heads of ``width`` of k and ``value_width`` of v, or None."""
    if not runs_triton(v):
        return f"runs on a GPU in bfloat16, float16 and float32, not on {v.device.type} in {v.dtype}"
    for each in (width, value_width):
        if each not in WIDTHS:
            return f"takes heads of {', '.join(map(str, WIDTHS))} channels, not {each}"
    return None


def with_states(
    packed: PackedMetadata, initial: Tensor | None, inputs: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], Tensor, PackedMetadata, Tensor]:
    """What a scan with states runs on.

    Args:
        packed: N segments of T tokens.
        initial: [N, H, K, V] or None for zeros.
        inputs: q and k [T, Q, K], v [T, H, V] and others [T, ...], some None.

    Returns:
        The inputs in a row where every segment has whole chunks, zeros in between, the states [N, H, V, K] in float32,
        the segments of that row, and int64 [T] the place of each token in it.

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
    whole, place = packed.derived(("aligned", CHUNK), aligned)
    padded = [None if x is None else x.new_zeros(whole.tokens, *x.shape[1:]).index_copy(0, place, x) for x in inputs]
    return padded, initial.float().transpose(2, 3).contiguous(), whole, place


def aligned(packed: PackedMetadata) -> tuple[PackedMetadata, Tensor]:
    """The segments padded to whole chunks, and int64 [T] the place of each token there."""
    lengths = (packed.cu_seqlens.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor") * CHUNK
    boundaries = F.pad(lengths.cumsum(0), (1, 0)).int()
    tokens = most_pieces(packed.tokens, len(lengths), CHUNK) * CHUNK
    place = boundaries.index_select(0, packed.seq_idx) + packed.position_ids
    return PackedMetadata(boundaries, tokens, tokens), place


def like(x: Tensor | None, v: Tensor) -> Tensor:
    """Unwritten memory of the form of x, or none where there is no x."""
    return v.new_empty(0) if x is None else torch.empty_like(x)


class Row:
    """One call: its sizes, and how each kernel is launched."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        beta: Tensor | None,
        initial: Tensor | None,
        boundaries: Tensor,
        tiles: Mapping[str, Tile] = TILES,
    ) -> None:
        self.tiles = tiles
        self.dtype = v.dtype
        self.tokens, self.heads, self.value_width = v.shape
        self.shared, self.width = q.shape[1:]
        self.chunks = -(-self.tokens // CHUNK)
        self.segments = len(boundaries) - 1
        self.sizes: dict[str, Any] = {
            "H": self.heads, "Q": self.shared, "K": self.width, "V": self.value_width, "C": CHUNK,
            "DELTA": beta is not None, "STATES": initial is not None, "GROUP": self.group,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32x3",
        }  # fmt: skip

    @property
    def group(self) -> int:
        """Heads of v in a program of ``chunk_backward``."""
        each = self.heads // self.shared
        return max(n for n in range(1, min(each, _GROUP) + 1) if each % n == 0)

    def states(self, like: Tensor) -> Tensor:
        """[chunks, H, V, K], unwritten where no document reaches from one chunk into the next."""
        make = like.new_zeros if self.sizes["STATES"] else like.new_empty  # then chunks of padding read theirs
        return make(self.chunks, self.heads, self.value_width, self.width)

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Start a kernel, over chunks or segments as its name says, with the constants that it takes."""
        name = kernel.__name__
        wide = self.dtype == torch.float32
        few = FEW if self.segments * self.heads < _FEW_WALKS and self.tiles is TILES else {}
        block, warps, stages = few.get(name, self.tiles[name])
        block = min(block, _HELD // self.width)
        block = min(max(16, block // (1 + wide)), self.value_width)
        first = self.segments if name.startswith("carry") else self.chunks
        second = self.heads // self.group if name == "chunk_backward" else self.heads
        third = self.value_width // block if name in ("carry", "carry_backward", "output") else 1
        known = self.sizes | {"BLOCK_V": block}
        constants = {key: value for key, value in known.items() if key in kernel.arg_names}
        kernel[first, second, third](*arguments, **constants, num_warps=warps, num_stages=1 if wide else stages)
