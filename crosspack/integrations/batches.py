"""Checks of the first packed batch inside somebody else's training loop: it carries its segments, and they are kept.

A batch of :class:`crosspack.PackedCollator` and the patched model that runs it -> :class:`FirstBatch` ->
:func:`check_batch` -> :func:`audit_batch`, which compares logits, and leaves gradients and random state as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packing_core.batches.keys import BatchKey
from packing_core.budget import FLOAT32, NARROW, noticed
from packing_core.errors import ContaminationError, PackingError, UnsupportedError

CARRIED = (*BatchKey.STOCK, BatchKey.LENGTHS, BatchKey.DOCUMENTS, "position_ids")
_KNOWN = {"input_ids", "labels", "attention_mask", *CARRIED}


class FirstBatch:
    """Checks the first training batch of a run, and that the call of the model on it gets its segments.

    Args:
        audit: compare its logits with each document alone, and stop if they see each other.
    """

    def __init__(self, *, audit: bool) -> None:
        self.audit = audit
        self.seen = False

    def check(self, module: nn.Module, batch: Any) -> None:
        """Check a batch if it is the first; the audit's figures are printed once for all ranks.

        Raises:
            PackingError, ContaminationError, UnsupportedError: it carries no segments, or they do not hold.
        """
        if self.seen:
            return
        self.seen = True
        check_batch(batch, "train_dataloader")
        if self.audit:
            report = audit_batch(module, batch)
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(report)


def check_batch(batch: Any, loader: str) -> None:
    """Check that a batch carries segments.

    Args:
        batch: what a dataloader gave.
        loader: which dataloader, for messages.

    Raises:
        PackingError: it carries none.
    """
    if not (isinstance(batch, Mapping) and BatchKey.LENGTHS in batch):
        raise PackingError(
            f"the first batch of {loader} carries no segments: let it take rows of crosspack.PackedDataset with "
            "collate_fn=crosspack.PackedCollator(model), or wrap its collator in crosspack.with_boundaries"
        )


@torch.no_grad()
def audit_batch(module: nn.Module, batch: Mapping[str, Any]) -> str:
    """Compare the logits of a packed batch with those of each of its documents alone.

    In float32 they have to be equal. In every dtype, other documents' logits must stay when one document is replaced.
    Documents without a trained token are left out.

    Args:
        module: the patched transformers model, or a module that holds it.
        batch: input_ids and labels int64 [B, S], and the segments of ``PackedCollator``.

    Returns:
        The figures, as a line.

    Raises:
        ContaminationError: documents see each other.
        PackingError: the batch has no trained document.
        UnsupportedModelError: the module holds several models, and one of them is not patched.
        UnsupportedError: a document of the batch is more than its tokens.
    """
    from torch_backend.auditing.compare import relative_error
    from torch_backend.hf.anatomy.structure import causal_lm, in_mode

    if unknown := sorted(set(batch) - _KNOWN):
        raise UnsupportedError(
            f"the audit of a batch runs documents of tokens alone, and this one has {unknown[0]}: pass audit=False; "
            "crosspack.patch has audited the model"
        )
    model = causal_lm(module)
    lengths = batch[BatchKey.LENGTHS]
    ids, labels = (batch[name].reshape(-1).split(lengths) for name in ("input_ids", "labels"))
    trained = [i for i, each in enumerate(labels) if bool((each != -100).any())]
    if not trained:
        raise PackingError("no token of the first batch is trained, by its labels: give -100 to those of prompts alone")
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    rows = [start // batch["input_ids"].shape[1] for start in accumulate(lengths, initial=0)]
    replaced = next((i for i, after in pairwise(trained) if rows[i] == rows[after]), trained[0])  # one with a neighbour
    changed = list(ids)
    changed[replaced] = (ids[replaced] + 1) % model.get_input_embeddings().num_embeddings
    with in_mode(model, training=False):
        packed = _logits(model, inputs, lengths)
        probed = _logits(model, {**inputs, "input_ids": torch.cat(changed).view_as(batch["input_ids"])}, lengths)
        alone = {i: model(input_ids=ids[i][None], use_cache=False).logits[0] for i in trained}
    error = max(relative_error(packed[i], logits) for i, logits in alone.items())
    leak = max((relative_error(probed[i], packed[i]) for i in trained if i != replaced), default=0.0)
    exact = packed[0].dtype == torch.float32
    worst, tolerance = (max(error, leak), FLOAT32) if exact else (leak, NARROW)
    report = (
        f"{type(model).__name__}, first batch: {len(trained)} documents in {len(batch['input_ids'])} rows, logits "
        f"{error:.1e} off each document alone, leak {leak:.1e}, tolerance {tolerance:.0e}"
    )
    if worst > tolerance or not noticed(relative_error(probed[replaced], packed[replaced]), leak):
        raise ContaminationError(f"audit: documents that are packed together see each other: {report}")
    return report


def _logits(model: Any, inputs: Mapping[str, Any], lengths: Any) -> tuple[Tensor, ...]:
    return tuple(model(**inputs, use_cache=False).logits.flatten(0, 1).split(lengths))
