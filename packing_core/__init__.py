"""Packing of variable-length token sequences into fixed rows, on numpy alone: the public names, no logic."""

from packing_core.errors import (
    CapacityError,
    ContaminationError,
    LayoutError,
    MissingExtraError,
    PackingError,
    UnsupportedError,
    UnsupportedModelError,
)
from packing_core.plan import PackPlan

__all__ = [
    "CapacityError",
    "ContaminationError",
    "LayoutError",
    "MissingExtraError",
    "PackPlan",
    "PackingError",
    "UnsupportedError",
    "UnsupportedModelError",
]
