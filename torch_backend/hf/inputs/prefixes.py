"""Decides which calls of a patched model share the beginnings of their documents, and counts the tokens it saves.

The token ids of a packed row, read from the device once -> :func:`~torch_backend.hf.shared_rows.share_row` -> a
SharedRow where it is worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from packing_core.batches.trees import LEAST_SAVED, LONG, SHORTEST
from packing_core.errors import UnsupportedModelError
from torch_backend.hf.inputs.forests import WAY_OUT, why_not_now
from torch_backend.hf.shared_rows import SharedRow, share_row

Sharing = bool | Literal["auto"]


class Prefixes:
    """Shares the common beginnings of the documents of a model's calls.

    Args:
        state: of the patched model.
        sharing: True, or ``"auto"``, which leaves calls as they are where the model cannot or little is saved.

    Attributes:
        given, computed: tokens of the calls so far, and those that the layers computed of them.
        refused: why the last call that could not share did not; None if there was none.
    """

    def __init__(self, state: Any, sharing: Sharing) -> None:
        self.state = state
        self.sharing = sharing
        self.given = self.computed = 0
        self.refused: str | None = None

    def of(self, ids: Tensor, lengths: Sequence[int]) -> SharedRow | None:
        """The shared row of documents whose ids are [1, T], None where they run as they are.

        Raises:
            UnsupportedModelError: the model cannot, and ``sharing`` is True.
        """
        self.given += sum(lengths)
        self.computed += sum(lengths)
        if (reason := why_not_now(self.state.anatomy)) is not None:
            if self.sharing is True:
                name = type(self.state.root).__name__
                raise UnsupportedModelError(f"{name} cannot run shared prefixes: {reason}; {WAY_OUT}")
            self.refused = reason
            return None
        if len(lengths) == 1:
            return None
        shared = share_row(
            ids[0].cpu().numpy(), lengths, shortest=LONG if self.sharing == "auto" else SHORTEST, device=ids.device
        )
        saved = sum(lengths) - shared.segments.tokens
        if shared.segments.parents is None or (self.sharing == "auto" and saved < LEAST_SAVED * sum(lengths)):
            return None
        self.computed -= saved
        return shared

    def __str__(self) -> str:
        if self.refused is not None and self.computed == self.given:
            return f"not shared: {self.refused}"
        if not self.given:
            return "decided at the first packed call"
        saved = self.given - self.computed
        return f"{saved:,} of {self.given:,} tokens saved ({100 * saved / self.given:.0f}%)"
