"""Decides which calls of a patched model share the beginnings of their documents, and counts the tokens it saves.

The token ids of a packed row, read from the device once -> :func:`~torch_backend.hf.shared_rows.share_row` -> a
SharedRow where it is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from packing_core.batches.trees import LEAST_SAVED, LONG, SHORTEST, part_saved
from packing_core.errors import UnsupportedModelError
from packing_core.planning.cost import cost_of
from torch_backend.hf.inputs.forests import WAY_OUT, why_no_attention, why_not_this_call
from torch_backend.hf.shared_rows import SharedRow, share_row

Sharing = bool | Literal["auto"]


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

    def of(self, kwargs: Mapping[str, Any]) -> SharedRow | None:
        """The shared row of a call, None where its documents run as they are.

        Args:
            kwargs: all arguments of the packed call, whose ids are [1, T].

        Raises:
            UnsupportedModelError: the model cannot, and ``sharing`` is True.
        """
        lengths, ids = kwargs["packed_lengths"], kwargs["input_ids"]
        self.given += sum(lengths)
        self.computed += sum(lengths)
        if (reason := self._why_not(kwargs)) is not None:
            if self.sharing is True:
                name = type(self.state.root).__name__
                raise UnsupportedModelError(f"{name} cannot run shared prefixes: {reason}; {WAY_OUT}")
            self.refused = reason
            return None
        shortest = LONG if self.sharing == "auto" else SHORTEST
        if len(lengths) == 1 or sorted(lengths)[-2] <= shortest:
            return None
        shared = share_row(ids[0].cpu().numpy(), lengths, shortest=shortest, device=ids.device)
        segments = shared.segments
        if segments.parents is None:
            return None
        assert segments.lengths is not None
        saved = part_saved(segments.lengths, segments.parents, lengths, self.cost)
        if self.sharing == "auto" and saved < LEAST_SAVED:
            self.declined = saved
            return None
        self.computed -= sum(lengths) - segments.tokens
        return shared

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
