"""Everything that a user of Crosspack needs, under one import.

Names are looked up on first use, so ``import crosspack`` loads no framework: ``crosspack.pack`` needs numpy only and
``crosspack.patch`` imports torch when it is first called. Verbs that torch and JAX share go by what they are given
(:mod:`crosspack.dispatch`). The imports below are for type checkers, which then see the types of every name, and of a
shared one those of torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosspack.reading import (
        BadRecord as BadRecord,
    )
    from crosspack.reading import (
        Records as Records,
    )
    from crosspack.reading import (
        Row as Row,
    )
    from crosspack.reading import (
        read as read,
    )
    from jax_backend import (
        Decoder as Decoder,
    )
    from jax_backend import (
        DecoderConfig as DecoderConfig,
    )
    from jax_backend import (
        GrainSource as GrainSource,
    )
    from jax_backend import (
        GrainStream as GrainStream,
    )
    from jax_backend import (
        Segments as Segments,
    )
    from jax_backend import (
        TrainState as TrainState,
    )
    from jax_backend import (
        find_segments as find_segments,
    )
    from jax_backend import (
        load as load,
    )
    from jax_backend import (
        merge_attention as merge_attention,
    )
    from jax_backend import (
        restore_state as restore_state,
    )
    from jax_backend import (
        save as save,
    )
    from jax_backend import (
        save_state as save_state,
    )
    from jax_backend import (
        segment_attention as segment_attention,
    )
    from jax_backend import (
        segment_positions as segment_positions,
    )
    from jax_backend import (
        selective_scan as selective_scan,
    )
    from jax_backend import (
        shift_labels as shift_labels,
    )
    from jax_backend import (
        to_batch as to_batch,
    )
    from packing_core import (
        CapacityError as CapacityError,
    )
    from packing_core import (
        ContaminationError as ContaminationError,
    )
    from packing_core import (
        ContextPlan as ContextPlan,
    )
    from packing_core import (
        Cost as Cost,
    )
    from packing_core import (
        LayoutError as LayoutError,
    )
    from packing_core import (
        MissingExtraError as MissingExtraError,
    )
    from packing_core import (
        Mixture as Mixture,
    )
    from packing_core import (
        PackedBatch as PackedBatch,
    )
    from packing_core import (
        PackedDataset as PackedDataset,
    )
    from packing_core import (
        PackingError as PackingError,
    )
    from packing_core import (
        PackPlan as PackPlan,
    )
    from packing_core import (
        PackStream as PackStream,
    )
    from packing_core import (
        Ragged as Ragged,
    )
    from packing_core import (
        ShardedPlan as ShardedPlan,
    )
    from packing_core import (
        UnsupportedError as UnsupportedError,
    )
    from packing_core import (
        UnsupportedModelError as UnsupportedModelError,
    )
    from packing_core import (
        balance as balance,
    )
    from packing_core import (
        concatenate as concatenate,
    )
    from packing_core import (
        context_plan as context_plan,
    )
    from packing_core import (
        join_states as join_states,
    )
    from packing_core import (
        mix as mix,
    )
    from packing_core import (
        pack as pack,
    )
    from packing_core import (
        pack_tree as pack_tree,
    )
    from packing_core import (
        plan as plan,
    )
    from packing_core import (
        stream as stream,
    )
    from torch_backend import (
        AuditReport as AuditReport,
    )
    from torch_backend import (
        PackedCollator as PackedCollator,
    )
    from torch_backend import (
        PackedMetadata as PackedMetadata,
    )
    from torch_backend import (
        PackedRows as PackedRows,
    )
    from torch_backend import (
        PackedVisionDataset as PackedVisionDataset,
    )
    from torch_backend import (
        RoutingRecord as RoutingRecord,
    )
    from torch_backend import (
        StreamedRows as StreamedRows,
    )
    from torch_backend import (
        TokenLogprobs as TokenLogprobs,
    )
    from torch_backend import (
        TrainerReport as TrainerReport,
    )
    from torch_backend import (
        TrainStep as TrainStep,
    )
    from torch_backend import (
        attention as attention,
    )
    from torch_backend import (
        audit as audit,
    )
    from torch_backend import (
        enable_packing as enable_packing,
    )
    from torch_backend import (
        explain as explain,
    )
    from torch_backend import (
        make_train_step as make_train_step,
    )
    from torch_backend import (
        next_token_pairs as next_token_pairs,
    )
    from torch_backend import (
        next_token_targets as next_token_targets,
    )
    from torch_backend import (
        normalise as normalise,
    )
    from torch_backend import (
        pack_dataset as pack_dataset,
    )
    from torch_backend import (
        packed_cross_entropy as packed_cross_entropy,
    )
    from torch_backend import (
        patch as patch,
    )
    from torch_backend import (
        record_routing as record_routing,
    )
    from torch_backend import (
        reduce as reduce,
    )
    from torch_backend import (
        replay_routing as replay_routing,
    )
    from torch_backend import (
        spread as spread,
    )
    from torch_backend import (
        token_logprobs as token_logprobs,
    )
    from torch_backend import (
        unpad as unpad,
    )
    from torch_backend import (
        unpatch as unpatch,
    )
    from torch_backend import (
        with_boundaries as with_boundaries,
    )

    __version__: str

# The first package that exports a name answers for it, unless the name is shared.
_PACKAGES = ("packing_core", "torch_backend", "jax_backend", "crosspack.reading")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version("crosspack")
        except PackageNotFoundError:
            return "unknown"
    if not name.startswith("_"):
        dispatch = import_module("crosspack.dispatch")
        if name in dispatch.SHARED:
            return getattr(dispatch, name)
        for package in _PACKAGES:
            module = import_module(package)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module 'crosspack' has no attribute {name!r}; its names are: {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted({name for package in _PACKAGES for name in import_module(package).__all__})
