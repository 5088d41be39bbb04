"""The seal on packed batches: only the entry of a patched model takes them.

Packed rows look like any others to a transformers model that is not patched: it would train on them contaminated,
without a word. So the collators put :data:`SEAL` into their batches, one object under two names of arguments that
packed calls have no use for. Every model of transformers asks at least one of them for its truth value or an attribute
before it returns, and both raise. A patched model takes the seal out at its entry, see :func:`unsealed`.

Checking the model in the collator or in the trainer would be simpler, but neither knows which model will run the batch:
a trainer may rebuild it, and loops of users are nobody's.
"""

from __future__ import annotations

from typing import Any, NoReturn

from packing_core.errors import UnsupportedModelError


class SealedBatchError(UnsupportedModelError, AttributeError):
    """A packed batch reached a model that is not patched. An AttributeError too, so that ``hasattr`` stays usable."""

    def __init__(self) -> None:
        super().__init__(
            "a packed batch reached a model that is not patched, or that was called past its entry: its documents "
            "would see each other. Call crosspack.patch(model) on the model that runs the batch, also on one that was "
            "rebuilt or replaced after the first was patched, and call model(**batch)"
        )


class Seal:
    """Raises where it is used; copied and pickled it stays the one object."""

    def __bool__(self) -> NoReturn:
        raise SealedBatchError

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols of Python that look before they use
        raise SealedBatchError

    def __reduce__(self) -> str:
        return "SEAL"

    def __repr__(self) -> str:
        return "SEAL"


SEAL = Seal()
# Most models ask for attentions before their layers run; Mamba's and RecurrentGemma's, without any, for return_dict.
SEALED = {"output_attentions": SEAL, "return_dict": SEAL}


def unsealed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, or a batch, without the seal."""
    return {name: value for name, value in arguments.items() if not isinstance(value, Seal)}


def unseal(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """:func:`unsealed` as a hook before a module's forward."""
    return args, unsealed(kwargs)
