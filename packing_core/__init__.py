"""Packing of variable-length token sequences into fixed rows, on numpy alone: the public names, no logic."""

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import PackedDataset, pack
from packing_core.batches.joining import concatenate
from packing_core.batches.trees import pack_tree
from packing_core.errors import (
    CapacityError,
    ContaminationError,
    LayoutError,
    MissingExtraError,
    PackingError,
    UnsupportedError,
    UnsupportedModelError,
)
from packing_core.planning.balance import ShardedPlan, balance
from packing_core.planning.context import ContextPlan, context_plan
from packing_core.planning.cost import Cost
from packing_core.planning.plan import PackPlan, plan
from packing_core.planning.rule import RowRule
from packing_core.storage.ragged import Ragged
from packing_core.streaming.mixing import Mixture, mix
from packing_core.streaming.state import join_states
from packing_core.streaming.stream import PackStream, stream

__all__ = [
    "CapacityError",
    "ContaminationError",
    "ContextPlan",
    "Cost",
    "LayoutError",
    "MissingExtraError",
    "Mixture",
    "PackPlan",
    "PackStream",
    "PackedBatch",
    "PackedDataset",
    "PackingError",
    "Ragged",
    "RowRule",
    "ShardedPlan",
    "UnsupportedError",
    "UnsupportedModelError",
    "balance",
    "concatenate",
    "context_plan",
    "join_states",
    "mix",
    "pack",
    "pack_tree",
    "plan",
    "stream",
]
