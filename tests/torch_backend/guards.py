"""Stand-ins for a device: a guard that takes tensors on the CPU for tensors that cannot be read without waiting."""

from __future__ import annotations

from torch import Tensor

from torch_backend.hf.inputs.guard import Guard


class SlowCopy:
    """A copy from a device to the host, which arrives when the test says so."""

    arrived = False

    def __init__(self, flag: Tensor) -> None:
        self.flag = flag

    def ready(self) -> bool:
        return self.arrived

    def value(self) -> bool:
        return bool(self.flag)


class DeviceGuard(Guard):
    """A guard to which nothing lies on the host; ``copies`` are those it has started."""

    def __init__(self) -> None:
        super().__init__(immediate=lambda x: False, read_back=self._start)
        self.copies: list[SlowCopy] = []

    def _start(self, flag: Tensor) -> SlowCopy:
        self.copies.append(SlowCopy(flag))
        return self.copies[-1]
