"""Scans whose state is a vector per channel, over packed rows: Mamba's selective scan, and the recurrence of RG-LRU.

u, g [T, E] and the batch's metadata -> :func:`diagonal_scan` -> [T, E], forward and backward by the Triton kernels of
:mod:`.kernels`. :func:`selective_scan` is Mamba's form of it. Nothing is read back from the device. The
backward keeps the inputs, the states that enter chunks and the sums of their gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.ops.forests import by_levels
from torch_backend.ops.operators import operator, runs_triton
from torch_backend.ops.scan.chunks import differentiable_scan, in_whole_chunks, like, placed
from torch_backend.ops.scan.halves import HalvedScan, Tensors
from torch_backend.segments import PackedMetadata

_L = 64  # tokens of a chunk
_WARP = 512  # numbers of a state that a warp holds


class AheadTile(NamedTuple):
    """The launch options of a kernel: its warps, and the tokens whose loads are on the way at once."""

    warps: int
    ahead: int


TILES = {
    "ends": AheadTile(1, 8),
    "carry": AheadTile(1, 1),
    "output": AheadTile(1, 8),
    "ends_backward": AheadTile(1, 8),
    "carry_backward": AheadTile(1, 1),
    "chunk_backward": AheadTile(1, 4),
}
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # of states, that tiles take


def unsupported(u: Tensor, n: int) -> str | None:
    """Explains why the kernels do not run u [T, E] with states of n numbers, None if they do."""
    if not runs_triton(u):
        return f"runs on a GPU in bfloat16, float16 and float32, not on {u.device.type} in {u.dtype}"
    return None if n in WIDTHS else f"takes states of {', '.join(map(str, WIDTHS))} numbers, not {n}"


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, packed: PackedMetadata, *,
    D: Tensor | None = None, z: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The state-space layer of Mamba (Gu and Dao 2023, https://arxiv.org/abs/2312.00752, section 3) in every segment.

    ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t``, ``y_t = (C_t . h_t + D x_t) silu(z_t)``, h = 0 before each segment.

    Args:
        x: [T, E]; dt: [T, E], bias and softplus applied; A: [E, N], negative; B, C: [T, N].
        packed: the segments; they cover all T tokens.
        D: [E], z: [T, E], or None.

    Returns:
        [T, E], dtype of x. Gradients flow to all tensors.

    Raises:
        LayoutError: shapes contradict each other.
        UnsupportedError: Triton does not run on these tensors.
    """
    wide = dt.float()
    return finished(diagonal_scan(wide * x.float(), wide, A, B, C, packed), x, D, z)


def selective_scan_with_states(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, packed: PackedMetadata, *,
    D: Tensor | None = None, z: Tensor | None = None, initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`selective_scan` from a state per segment, and the last states: both float32 [S, E, N].

    See :func:`diagonal_scan_with_states`.
    """
    wide = dt.float()
    y, final = diagonal_scan_with_states(wide * x.float(), wide, A, B, C, packed, initial=initial)
    return finished(y, x, D, z), final


def finished(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """The output of Mamba's layer: y of its states, with its skip D x and its gate silu(z), in the dtype of x."""
    if D is not None:
        y = y + D.float() * x.float()
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype)


def diagonal_scan(u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, packed: PackedMetadata) -> Tensor:
    """``s_t = exp(g_t A) s_{t-1} + u_t B_t``, ``y_t = C_t . s_t`` for each channel, s [N] zero before each segment.

    Args:
        u, g: [T, E]; A: [E, N], with g A at most 0; B, C: [T, N].
        packed: the segments; they cover all T tokens.

    Returns:
        [T, E], dtype of u, contiguous. Gradients flow to u, g, A, B and C.

    Raises:
        LayoutError: shapes contradict each other.
        UnsupportedError: Triton does not run on these tensors, or N is another.
    """
    _check(u, g, A, B, C, packed)
    if packed.parents is not None:

        def with_states(u: Tensor, g: Tensor, B: Tensor, C: Tensor, *rest: Any, **initial: Any) -> Any:
            return diagonal_scan_with_states(u, g, A, B, C, *rest, **initial)

        return by_levels(packed, with_states, u, g, B, C)
    return _scan(u, g, A, B, C, None, packed.cu_seqlens, packed.seq_idx)[0]


def diagonal_scan_with_states(
    u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, packed: PackedMetadata, *, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`diagonal_scan` that continues from a state per segment and returns the last ones.

    Segments are padded to whole chunks for it, so it is slower than the scan without states where they are short.

    Args:
        u, g, A, B, C, packed: as there.
        initial: [S, E, N], the state before the first token of each of the S segments of ``packed.cu_seqlens``; of a
            segment without tokens too. None for zeros.

    Returns:
        [T, E] and the states [S, E, N] in float32 after each segment's last token. Gradients flow to and from both.

    Raises:
        LayoutError, UnsupportedError: as there; ``initial`` has another shape.
    """
    _check(u, g, A, B, C, packed)
    shape = len(packed.cu_seqlens) - 1, *A.shape
    if initial is None:
        initial = u.new_zeros(shape, dtype=torch.float32)
    if initial.shape != shape:
        raise LayoutError(f"initial states are {list(shape)} [S, E, N] here, got {list(initial.shape)}")
    whole, place = in_whole_chunks(packed, _L)
    u, g, B, C = (placed(x, place, whole.tokens) for x in (u, g, B, C))
    states = initial.float().transpose(1, 2)
    y, final = _scan(u, g, A, B, C, states, whole.cu_seqlens, whole.seq_idx)
    return y.index_select(0, place), final.transpose(1, 2)


def _check(u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, packed: PackedMetadata) -> None:
    shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in (("u", u), ("g", g), ("A", A), ("B", B), ("C", C)))
    channels = u.ndim == 2 and g.shape == u.shape and A.ndim == 2 and A.shape[0] == u.shape[1]
    if not (channels and B.shape == C.shape == (u.shape[0], A.shape[1])):
        raise LayoutError(f"diagonal_scan takes u, g [T, E], A [E, N] and B, C [T, N], got {shapes}")
    packed.check_covers("u", u.shape[0])
    reason = unsupported(u, A.shape[1])
    if reason is not None:
        raise UnsupportedError(f"the diagonal scan {reason}")


class _SelectiveLaunch:
    """One call: its sizes, and how each kernel is launched. Results are float32, but for those of u, g, A, B and C."""

    def __init__(self, u: Tensor, A: Tensor, boundaries: Tensor, *, states: bool) -> None:
        from torch_backend.ops.scan.selective import kernels

        self.kernels = kernels
        self.tokens, (self.channels, self.numbers) = u.shape[0], A.shape
        self.chunks, self.segments = -(-self.tokens // _L), len(boundaries) - 1
        self.rates, self.boundaries, self.states = A.t().contiguous(), boundaries, states

    def block(self, name: str) -> int:
        """Channels of a program."""
        most = TILES[name].warps * max(1, _WARP // self.numbers)
        return min(most, 1 << (self.channels - 1).bit_length())

    def blocks(self, name: str) -> int:
        """Programs that share the channels."""
        return -(-self.channels // self.block(name))

    def __call__(self, kernel: Any, *arguments: Any) -> None:
        name = kernel.__name__
        known = {
            "E": self.channels, "N": self.numbers, "L": _L, "SUB": TILES[name].ahead, "BLOCK": self.block(name),
            "STATES": self.states,
        }  # fmt: skip
        constants = {key: value for key, value in known.items() if key in kernel.arg_names}
        walks = self.segments if name.startswith("carry") else self.chunks
        kernel[walks, self.blocks(name)](*arguments, **constants, num_warps=TILES[name].warps)

    def ends(self, u: Tensor, g: Tensor, B: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """The last states of chunks from zero [chunks, N, E], and the sums of their gates [chunks, E]."""
        local = u.new_empty(self.chunks, self.numbers, self.channels, dtype=torch.float32)
        fading = u.new_empty(self.chunks, self.channels, dtype=torch.float32)
        self(self.kernels.ends, u, g, self.rates, B, segments, local, fading, self.tokens)
        return local, fading

    def carry(self, local: Tensor, fading: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """The states that enter chunks [chunks, N, E], and the last ones of segments [S, N, E]."""
        entering, final = self._between(local), like(initial, local)
        self(self.kernels.carry, local, fading, self.rates, self.boundaries, initial, entering, final)
        return entering, final

    def output(self, u: Tensor, g: Tensor, B: Tensor, C: Tensor, segments: Tensor, entering: Tensor) -> Tensor:
        """y [T, E]."""
        y = torch.empty_like(u)
        self(self.kernels.output, u, g, self.rates, B, C, segments, entering, y, self.tokens)
        return y

    def ends_backward(self, g: Tensor, C: Tensor, dy: Tensor, segments: Tensor) -> Tensor:
        """The gradients of the states that enter chunks [chunks, N, E], but for what leaves these."""
        local = g.new_empty(self.chunks, self.numbers, self.channels, dtype=torch.float32)
        self(self.kernels.ends_backward, g, self.rates, C, dy, segments, local, self.tokens)
        return local

    def carry_backward(self, local: Tensor, fading: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the states that leave chunks [chunks, N, E], and of those before segments [S, N, E]."""
        leaving, dinitial = self._between(local), torch.empty_like(dfinal)
        self(self.kernels.carry_backward, local, fading, self.rates, self.boundaries, dfinal, leaving, dinitial)
        return leaving, dinitial

    def chunk_backward(
        self, u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, dy: Tensor, segments: Tensor, entering: Tensor,
        leaving: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of u, g, A, B and C."""
        du, dg, dA = torch.empty_like(u), torch.empty_like(g), torch.empty_like(entering)
        blocks = self.chunks * _L // TILES["chunk_backward"].ahead
        kept = u.new_empty(blocks, self.numbers, self.channels, dtype=torch.float32)
        parts = self.blocks("chunk_backward")
        dB, dC = (u.new_empty(parts, *B.shape, dtype=torch.float32) for _ in range(2))
        self(
            self.kernels.chunk_backward, u, g, self.rates, B, C, dy, segments, entering, leaving, kept, du, dg, dA, dB,
            dC, self.tokens,
        )  # fmt: skip
        return du, dg, dA.sum(0).t().to(A.dtype).contiguous(), dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype)

    def _between(self, local: Tensor) -> Tensor:
        """States between chunks, to be written; zeros where segments have states, for chunks of padding read theirs."""
        return torch.zeros_like(local) if self.states else torch.empty_like(local)


def _launch_forward(
    u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, initial: Tensor | None, boundaries: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    launch = _SelectiveLaunch(u, A, boundaries, states=initial is not None)
    local, fading = launch.ends(u, g, B, segments)
    entering, final = launch.carry(local, fading, initial)
    return launch.output(u, g, B, C, segments, entering), final, entering, fading


def _made(u: Tensor, A: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates what :func:`_launch_forward` returns."""
    chunks = -(-u.shape[0] // _L)
    entering = u.new_empty(chunks, *A.shape[::-1], dtype=torch.float32)
    fading = u.new_empty(chunks, A.shape[0], dtype=torch.float32)
    return torch.empty_like(u), like(initial, entering), entering, fading


def _launch_backward(
    u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, initial: Tensor | None, boundaries: Tensor, segments: Tensor,
    entering: Tensor, fading: Tensor, dy: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    launch = _SelectiveLaunch(u, A, boundaries, states=initial is not None)
    local = launch.ends_backward(g, C, dy, segments)
    leaving, dinitial = launch.carry_backward(local, fading, dfinal)
    del local  # its memory is for what follows
    return *launch.chunk_backward(u, g, A, B, C, dy, segments, entering, leaving), dinitial


_forward = operator("diagonal_scan", _launch_forward, lambda u, g, A, B, C, initial, *_: _made(u, A, initial))
_backward = operator(
    "diagonal_scan_backward",
    _launch_backward,
    lambda u, g, A, B, C, *others: tuple(torch.empty_like(x) for x in (u, g, A, B, C, others[-1])),
)
_scan = differentiable_scan(_forward, _backward)


class DiagonalHalves(HalvedScan):
    """u, g, B and C are the inputs, A the parameter; states are [S, N, E]."""

    gates = 1

    def chunk(self, given: Tensors) -> int:
        return _L

    def fade(self, states: Tensor, gates: Tensor, given: Tensors) -> Tensor:
        return states * (gates[:, None] * given[-1].t().float()).exp()

    def forward(self, given: Tensors, packed: PackedMetadata) -> tuple[Tensor, Tensors]:
        u, g, B, C, A = given
        _check(u, g, A, B, C, packed)
        y, _, *kept = _forward(u, g, A, B, C, None, packed.cu_seqlens, packed.seq_idx)
        return y, kept

    def backward(self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor) -> Tensors:
        u, g, B, C, A = given
        none = kept[0].new_empty(0)
        du, dg, dA, dB, dC, _ = _backward(u, g, A, B, C, None, packed.cu_seqlens, packed.seq_idx, *kept, dy, none)
        return du, dg, dB, dC, dA

    def begin(self, given: Tensors, packed: PackedMetadata) -> tuple[Tensors, Tensor]:
        u, g, B, C, A = given
        _check(u, g, A, B, C, packed)
        launch = _SelectiveLaunch(u, A, packed.cu_seqlens, states=True)
        local, fading = launch.ends(u, g, B, packed.seq_idx)
        _, last = launch.carry(local, fading, local.new_zeros(launch.segments, *local.shape[1:]))
        return (local, fading), last

    def finish(self, given: Tensors, packed: PackedMetadata, work: Tensors, initial: Tensor) -> tuple[Tensor, Tensors]:
        (u, g, B, C, A), (local, fading) = given, work
        launch = _SelectiveLaunch(u, A, packed.cu_seqlens, states=True)
        entering, _ = launch.carry(local, fading, initial)
        return launch.output(u, g, B, C, packed.seq_idx, entering), (entering, fading)

    def begin_backward(
        self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor
    ) -> tuple[Tensors, Tensor]:
        (u, g, _, C, A), (_, fading) = given, kept
        launch = _SelectiveLaunch(u, A, packed.cu_seqlens, states=True)
        local = launch.ends_backward(g, C, dy, packed.seq_idx)
        _, dinitial = launch.carry_backward(local, fading, local.new_zeros(launch.segments, *local.shape[1:]))
        return (local,), dinitial

    def finish_backward(
        self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor, work: Tensors, dfinal: Tensor
    ) -> Tensors:
        (u, g, B, C, A), (entering, fading), (local,) = given, kept, work
        launch = _SelectiveLaunch(u, A, packed.cu_seqlens, states=True)
        leaving, _ = launch.carry_backward(local, fading, dfinal)
        du, dg, dA, dB, dC = launch.chunk_backward(u, g, A, B, C, dy, packed.seq_idx, entering, leaving)
        return du, dg, dB, dC, dA


HALVES = DiagonalHalves()
