"""The report of a backend to ``crosspack doctor``; imports no framework.

A function that an installed package registers under the entry point group ``crosspack.doctors`` takes no argument and
returns a :class:`Diagnosis`. It raises ``MissingExtraError`` where its framework is absent or too old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GROUP = "crosspack.doctors"


@dataclass(frozen=True)
class LayerChoice:
    """One kind of layer.

    Attributes:
        layer: the kind, in words.
        implementation: what would run it here, or "none".
        reason: why, and why nothing that comes before it in the order.
    """

    layer: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """A backend on this machine.

    Attributes:
        devices: what the framework finds.
        judged: the device and dtype that ``layers`` holds for: the ones that ``--device auto`` takes.
        layers: every kind of layer.
        faster: what is missing for more speed, each with the way to get it.
    """

    devices: tuple[str, ...]
    judged: str
    layers: tuple[LayerChoice, ...]
    faster: tuple[str, ...]


def first_served(layer: str, answers: Mapping[str, str | None]) -> LayerChoice:
    """The choice among implementations in the order they are tried, each with the reason against it or None."""
    passed: list[str] = []
    for name, reason in answers.items():
        if reason is None:
            return LayerChoice(layer, name, "; ".join(passed) or "first in this device's order")
        passed.append(f"not {name}: {reason}")
    return LayerChoice(layer, "none", "; ".join(passed))


def has_nvidia_driver() -> bool:
    """Returns whether this machine has an NVIDIA driver, which a framework built for CPUs does not use."""
    return Path("/proc/driver/nvidia/version").exists()
