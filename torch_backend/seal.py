"""The seal on packed batches: only the entry of a patched model takes them.

Packed rows look like any others to a transformers model that is not patched: it would train on them contaminated,
without a word. So the collators put :data:`SEAL` into their batches, one object under two names of arguments that
packed calls have no use for. Every model of transformers asks at least one of them for its truth value or an attribute
before it returns, and both raise. A patched model takes the seal out at its entry, see :func:`unsealed`.

Checking the model in the collator or in the trainer would be simpler, but neither knows which model will run the batch:
a trainer may rebuild it, and loops of users are nobody's.

Code that picks ``input_ids`` out of a batch leaves the seal behind. So a seal also remembers the rows that it stands
for (:mod:`.known_rows`), and a patched model refuses those of the last batches without their boundaries. Loops that
shift tokens themselves call the model on ``ids[:, :-1]``, so rows are known without their last token and without their
first one, too, unless their labels are their own tokens. A seal that comes from another process, a DataLoader's worker,
brings them along.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from packing_core.errors import UnsupportedModelError
from torch_backend.known_rows import fingerprints, remember_rows


class SealedBatchError(UnsupportedModelError, AttributeError):
    """A packed batch reached a model that is not patched. An AttributeError too, so that ``hasattr`` stays usable."""

    def __init__(self) -> None:
        super().__init__(
            "a packed batch reached a model that is not patched, or that was called past its entry: its documents "
            "would see each other. Call crosspack.patch(model) on the model that runs the batch, also on one that was "
            "rebuilt or replaced after the first was patched, and call model(**batch)"
        )


class Seal:
    """Raises where it is used; also copied and pickled.

    Args:
        rows: length and fingerprint of each packed row of its batch, and of its part before the last token and after
            the first one, where they hold several documents, and whether it is the whole row.
    """

    def __init__(self, rows: tuple[tuple[int, int, bool], ...] = ()) -> None:
        self.rows = rows
        remember_rows(rows)

    def __bool__(self) -> NoReturn:
        raise SealedBatchError

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols of Python that look before they use
        raise SealedBatchError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seal)  # whatever its rows: recorded steps take batches that differ in tensors alone

    def __hash__(self) -> int:
        return hash(Seal)

    def __reduce__(self) -> tuple[Any, ...]:
        return Seal, (self.rows,)

    def __repr__(self) -> str:
        return "SEAL"


def _under_names(seal: Seal) -> dict[str, Any]:
    # most models ask for attentions before their layers run; Mamba's and RecurrentGemma's, without any, for return_dict
    return {"output_attentions": seal, "return_dict": seal}


SEALED = _under_names(Seal())  # for batches whose rows hold one document each


def sealed(ids: Tensor, starts: Tensor) -> dict[str, Any]:
    """The seal of a packed batch.

    Args:
        ids: [B, S], on the host.
        starts: where its documents begin among the B * S tokens.
    """
    (rows, length), firsts = ids.shape, torch.arange(len(ids)) * ids.shape[1]
    documents = torch.bincount(starts // length, minlength=rows)
    last_alone = torch.isin(firsts + length - 1, starts).long()
    first_alone = torch.isin(firsts + 1, starts).long()
    parts = [(ids, documents), (ids[:, :-1], documents - last_alone), (ids[:, 1:], documents - first_alone)]
    found = [(part.shape[1], row, part is ids) for part, held in parts for row in fingerprints(part[held > 1]).tolist()]
    return _under_names(Seal(tuple(found)))


def unsealed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, or a batch, without the seal."""
    return {name: value for name, value in arguments.items() if not isinstance(value, Seal)}


def unseal(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """:func:`unsealed` as a hook before a module's forward."""
    return args, unsealed(kwargs)
