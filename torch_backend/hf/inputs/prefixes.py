"""Decides which calls of a patched model share the beginnings of their documents, and counts the tokens it saves.

The token ids of a packed row, of its collator or read from the device -> the beginnings that its documents share
(:mod:`torch_backend.hf.shared_rows`) -> a SharedRow where it is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from packing_core.batches.keys import BatchKey
from packing_core.batches.trees import LEAST_SAVED, LONG, SHORTEST, part_saved
from packing_core.errors import LayoutError, PackingError
from packing_core.planning.cost import cost_of
from torch_backend.hf.inputs.forests import refuse, why_no_attention, why_not_this_call
from torch_backend.hf.shared_rows import RowIds, SharedRow
from torch_backend.segments import to_device

Sharing = bool | Literal["auto"]


def changed(token: int) -> PackingError:
    return LayoutError(
        f"token {token} of a call is not that of its data collator, by whose batch common beginnings are found: change "
        "token ids in the data collator, or pass share_prefix=False"
    )


class Prefixes:
    """Shares the common beginnings of the documents of a model's calls.

    Args:
        state: of the patched model.
        sharing: True, or ``"auto"``, which leaves calls as they are where the model cannot share, or where it saves
            less than ``LEAST_SAVED`` of a call's work, as :func:`packing_core.batches.trees.part_saved` counts it.

    Attributes:
        given, computed: tokens of the calls so far, and those that the layers computed of them.
        refused: why the last call that could not share did not; None if there was none.
        declined: the part of its work that the last call would have saved, which was too little; None without one.
    """

    def __init__(self, state: Any, sharing: Sharing) -> None:
        self.state = state
        self.sharing = sharing
        self.given = self.computed = 0
        self.refused: str | None = None
        self.declined: float | None = None
        self.cost = cost_of([state.decoder.config])

    def of(self, kwargs: Mapping[str, Any], given: RowIds | None = None) -> SharedRow | None:
        """The shared row of a call, None where its documents run as they are.

        Args:
            kwargs: all arguments of the packed call, whose ids are [1, T].
            given: the ids on the host; read from the device if None, which waits for it.

        Raises:
            UnsupportedModelError: the model cannot, and ``sharing`` is True.
        """
        lengths, ids = kwargs[BatchKey.LENGTHS], kwargs["input_ids"]
        self.given += sum(lengths)
        self.computed += sum(lengths)
        if (reason := self._why_not(kwargs)) is not None:
            if self.sharing is True:
                refuse(self.state.root, reason)
            self.refused = reason
            return None
        shortest = LONG if self.sharing == "auto" else SHORTEST
        if len(lengths) == 1 or sorted(lengths)[-2] <= shortest:
            return None
        if given is None:
            given = RowIds(ids[0].cpu().numpy())
        else:
            self._check(ids[0], given)
        shared = given.shared(lengths, shortest=shortest)
        if max(shared.parents) < 0:
            return None
        saved = part_saved(shared.lengths, shared.parents, lengths, self.cost)
        if self.sharing == "auto" and saved < LEAST_SAVED:
            self.declined = saved
            return None
        self.computed -= sum(lengths) - sum(shared.lengths)
        return shared.row(ids.device)

    def _check(self, ids: Tensor, given: RowIds) -> None:
        """Raise, perhaps in a later call, if the ids of a call are not those that its collator saw."""
        if len(ids) != len(given.ids):
            raise changed(0)
        its = torch.from_numpy(given.ids)
        self.state.guard.check("input_ids of shared prefixes", lambda: ids != to_device(its, ids.device), changed)

    def _why_not(self, kwargs: Mapping[str, Any]) -> str | None:
        state = self.state
        if torch.compiler.is_compiling():
            return "torch.compile traces the model as a whole, and token ids are read"
        found = why_not_this_call(state.anatomy, kwargs) or why_no_attention(state.device, state.implementation)
        if found is None and self.sharing == "auto" and state.compiled:
            refused = state.why_no_compiled_forest(state.compiled)
            return None if refused is None else f"its layers are compiled, and {refused}"
        return found

    def __str__(self) -> str:
        if self.refused is not None and self.computed == self.given:
            return f"not shared: {self.refused}"
        if not self.given:
            return "decided at the first packed call"
        saved = self.given - self.computed
        found = f"{saved:,} of {self.given:,} tokens saved ({100 * saved / self.given:.0f}%)"
        if self.declined is None:
            return found
        return (
            f"{found}; calls that would save less than {LEAST_SAVED:.0%} of their work are left as they are, the last "
            f"of them {self.declined:.0%}"
        )
