"""Everything that a user of Crosspack needs, under one import.

Names are looked up on first use, so ``import crosspack`` loads no framework: ``crosspack.pack`` needs numpy only and
``crosspack.patch`` imports torch when it is first called. Verbs that torch and JAX share go by what they are given
(:mod:`crosspack.dispatch`). The imports below are for type checkers, which then see the types of every name, and of a
shared one those of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # one import for each package; isort would write one for each name
    # isort: off
    from crosspack.reading import *  # noqa: F403
    from packing_core import *  # noqa: F403
    from jax_backend import (
        Decoder as Decoder,
        DecoderConfig as DecoderConfig,
        GrainSource as GrainSource,
        GrainStream as GrainStream,
        Segments as Segments,
        TrainState as TrainState,
        find_segments as find_segments,
        load as load,
        merge_attention as merge_attention,
        restore_state as restore_state,
        save as save,
        save_state as save_state,
        segment_attention as segment_attention,
        segment_positions as segment_positions,
        selective_scan as selective_scan,
        shift_labels as shift_labels,
        to_batch as to_batch,
    )
    from torch_backend import (
        AuditReport as AuditReport,
        PackedCollator as PackedCollator,
        PackedMediaDataset as PackedMediaDataset,
        PackedMetadata as PackedMetadata,
        PackedRows as PackedRows,
        PackedVisionDataset as PackedVisionDataset,
        RoutingRecord as RoutingRecord,
        StreamedRows as StreamedRows,
        TokenLogprobs as TokenLogprobs,
        TrainerReport as TrainerReport,
        TrainStep as TrainStep,
        attention as attention,
        audit as audit,
        disable_packing as disable_packing,
        enable_packing as enable_packing,
        explain as explain,
        load_mxfp4 as load_mxfp4,
        make_train_step as make_train_step,
        next_token_pairs as next_token_pairs,
        next_token_targets as next_token_targets,
        normalise as normalise,
        pack_dataset as pack_dataset,
        packed_cross_entropy as packed_cross_entropy,
        patch as patch,
        record_routing as record_routing,
        reduce as reduce,
        replay_routing as replay_routing,
        spread as spread,
        token_logprobs as token_logprobs,
        unpad as unpad,
        unpatch as unpatch,
        with_boundaries as with_boundaries,
    )
    # isort: on

    __version__: str

# The first package that exports a name answers for it, unless the name is shared.
_PACKAGES = ("packing_core", "torch_backend", "jax_backend", "crosspack.reading")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("packing_core.extras").installed("crosspack") or "unknown"
    if not name.startswith("_"):
        shared = import_module("crosspack.dispatch").SHARED
        if name in shared:
            return shared[name]
        for package in _PACKAGES:
            module = import_module(package)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module 'crosspack' has no attribute {name!r}; its names are: {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted({name for package in _PACKAGES for name in import_module(package).__all__})
