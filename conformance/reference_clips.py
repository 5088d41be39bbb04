"""The reference backend's clips: the convolutions of an audio encoder over one row of all clips, in numpy.

Each rule that a mutant breaks is a method of its own.
"""

from __future__ import annotations

import numpy as np

from packing_core.protocol import Array, Backend, Gradients, OperationCall, takes_call
from packing_core.reference.clips import convolved, convolved_vjp


class ClipMethods(Backend):
    """`clips` of a backend that puts them into one row."""

    @takes_call("features", "up", "up_bias", "down")
    def clips(self, call: OperationCall) -> tuple[Array, Gradients]:
        x, up, up_bias, down = (np.asarray(array, np.float64) for array in call.operands.values())
        frames, dout = call.options["frames"], call.dout
        width = x.shape[1]
        seen = np.minimum(frames + self.beyond(), width)
        slots = seen + 2 - seen % 2  # a zero or two; a clip begins where the stride does
        starts = np.cumsum(slots) - slots
        clip = np.repeat(np.arange(len(frames)), slots)
        place = np.arange(len(clip)) - starts[clip]
        kept = place < seen[clip]
        row = np.where(kept[:, None], x[clip, np.minimum(place, width - 1)], 0.0)
        mask = self.mask(kept)[:, None]
        middle = (convolved(row, up) + up_bias) * mask
        outputs = np.concatenate([start + 2 * np.arange((n + 1) // 2) for start, n in zip(starts, frames, strict=True)])
        out = self.finished(convolved(middle, down)[outputs]).astype(np.float32)
        if dout is None:
            return out, {}
        spread = np.zeros((len(row), down.shape[0]))
        spread[outputs] = dout
        dmiddle, ddown = convolved_vjp(middle, down, spread)
        dmiddle = dmiddle * self.mask_of_gradients(kept)[:, None]
        drow, dup = convolved_vjp(row, up, dmiddle)
        dx = np.zeros(x.shape)
        dx[clip[kept], place[kept]] = drow[kept]
        gradients = {"features": dx, "up": dup, "up_bias": dmiddle.sum(0), "down": ddown}
        return out, {name: gradient.astype(np.float32) for name, gradient in gradients.items()}

    def beyond(self) -> int:
        """Frames behind the end of a clip that its last output sees."""
        return 2

    def mask(self, kept: Array) -> Array:
        """The places of the row that are of a clip after the first convolution."""
        return kept

    def mask_of_gradients(self, kept: Array) -> Array:
        """The same places in the backward."""
        return kept

    def finished(self, out: Array) -> Array:
        """The outputs of the row, as they are returned."""
        return out
