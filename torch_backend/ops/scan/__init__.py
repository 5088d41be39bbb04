"""The scan of a recurrent layer over packed rows: delta rules and state-space scans whose state restarts per segment.

The function that a modeling file calls and the arguments of a call, [B, S, ...] -> :func:`choose` -> :func:`run`. The
first of these that serves the call runs, in the order of :mod:`.order`:

    triton                 our own kernels (:mod:`.modeling_calls`)
    flash_qla, mamba_ssm   a library's kernels as operators (:mod:`.libraries`), if they pass a trial
    fla                    its function with the segment boundaries (:mod:`.libraries.fla`), if it passes a trial
    documents              the function itself on batches of documents of similar length; if a library is beneath it and
                           fails there too, the plain torch beneath that

Segments that continue others start from the state in which their parent ended, by our own kernels; all else scans them
as whole documents, which saves nothing there.

All but the last two read nothing back and run in shapes that do not depend on documents, so compiled layers and CUDA
graphs hold them. A compiled layer cannot make a trial: it runs what the first uncompiled call chose for such heads. So
does a call of whose documents the host does not know the number, as in a step that is recorded as a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packing_core.batches.keys import BatchKey
from torch_backend.ops.document_batches import COARSE, FINE, per_document
from torch_backend.ops.forests import along_documents, documents
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.scan import modeling_calls as triton
from torch_backend.ops.scan.libraries import fla, flash_qla, mamba_ssm
from torch_backend.ops.scan.order import by_time, measured
from torch_backend.ops.scan.request import ABSENT, ScanRequest, Way, parameters, refused, request_of
from torch_backend.segments import PackedMetadata

TRITON, DOCUMENTS = "triton", "documents"
# How a library scans a row.
LIBRARIES: dict[str, Way] = {
    "flash_qla": lambda packed, _, args, kwargs: triton.delta_rule(flash_qla.gated_delta_rule, packed, *args, **kwargs),
    "mamba_ssm": lambda packed, _, args, kwargs: triton.mamba2(mamba_ssm.ssd, packed, *args, **kwargs),
    "fla": fla.scan,
}
FIXED = (TRITON, "flash_qla", "mamba_ssm")
_BOUNDARIES = ("cu_seqlens", BatchKey.NUMBERS)  # what kernels call them
# By the first call for heads of each size where Triton runs and where it does not, for compiled layers.
_chosen: dict[tuple[Any, ...], str] = {}


@dataclass(frozen=True)
class ScanChoice:
    """The implementation that scans a row.

    Attributes:
        implementation: its name.
        words: what ``explain`` says of it.
        rejected: implementations that come before it in the order, each with the reason.
    """

    implementation: str
    words: str = ""
    rejected: tuple[tuple[str, str], ...] = ()

    @property
    def fixed(self) -> bool:
        """Returns whether it reads nothing back, in shapes that do not depend on documents."""
        return self.implementation in FIXED


def choose(
    name: str,
    function: Callable[..., Any],
    libraries: Sequence[str],
    packed: PackedMetadata,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ScanChoice:
    """Chooses the implementation for a call of ``function``, which modeling files call ``name``.

    Args:
        name, function: the function, and its global name in modeling files.
        libraries: that may scan the row, in the order where nothing was measured; ``function`` is bound to the last.
        packed: the segments of the B * S tokens.
        args, kwargs: of the call.
    """
    ours = triton.operands(name, args, kwargs)
    key = ours and (name, runs_triton(ours[0]), *ours[0].shape[2:], *ours[1].shape[2:], ours[1].itemsize)
    if torch.compiler.is_compiling():
        found = TRITON if key is None else _chosen.get(key, TRITON)
        if found == "flash_qla" and ours is not None and ours[0].shape[0] * ours[0].shape[1] < fla.CHUNK:
            found = TRITON
        return ScanChoice(DOCUMENTS if found == TRITON and triton.refused(name, args, kwargs) else found)
    before = _chosen.get(key) if key is not None and packed.lengths is None else None
    found, rejected = DOCUMENTS, dict[str, str]()
    for each in _order(name, libraries, packed, before):
        if each == TRITON:
            reason = triton.refused(name, args, kwargs)
        else:
            limits = flash_qla.unsupported(packed, *ours[:2]) if each == "flash_qla" and ours is not None else None
            reason = refused(_request(function, each, args, kwargs), LIBRARIES[each], limits)
        if reason is None:
            found = each
            break
        rejected[each] = reason
    if key is not None and packed.parents is None:
        _chosen.setdefault(key, found)
    words = f"scan by {'Triton' if found == TRITON else found}"
    if found == DOCUMENTS:
        words = _divided(_request(function, libraries[-1], args, kwargs))[1]
    if TRITON in rejected:
        words = f"{words}, not by Triton: {rejected.pop(TRITON)}"
    if packed.parents is None:
        words += measured(name, found, packed)
    else:
        words += ", which hands states on" if found == TRITON else ", on whole documents"
    return ScanChoice(found, words, tuple(rejected.items()))


def _order(name: str, libraries: Sequence[str], packed: PackedMetadata, before: str | None) -> Sequence[str]:
    """Returns the implementations in the order in which they are tried, the choice of an earlier call first."""
    names: Sequence[str] = (TRITON, *libraries)
    if packed.parents is None:
        names = by_time(name, names, packed)
    return names if before is None else sorted(names, key=lambda each: each != before)


def run(
    choice: ScanChoice,
    name: str,
    function: Callable[..., Any],
    libraries: Sequence[str],
    packed: PackedMetadata,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The call for which :func:`choose` made the choice; the state restarts at every segment.

    Returns:
        What ``function`` returns, states None.
    """
    if choice.implementation == TRITON:
        return triton.scan(name, packed, args, kwargs)
    if packed.parents is not None:

        def on_documents(*args: Any, **kwargs: Any) -> Any:
            return run(choice, name, function, libraries, documents(packed).packed, args, kwargs)

        return along_documents(packed, on_documents, args, kwargs, shape=tuple(args[0].shape[:2]))
    if choice.fixed:
        return LIBRARIES[choice.implementation](packed, function, args, kwargs)
    return _uncompiled(choice.implementation, function, libraries, packed, args, kwargs)


def prepare(packed: PackedMetadata) -> None:
    """Derive what compiled layers read of a batch."""
    if "flash_qla" in _chosen.values():
        packed.derived("flash_qla", flash_qla.tables)


@torch.compiler.disable  # the libraries disable compilation of their kernels too: one graph break instead of several
def _uncompiled(
    implementation: str,
    function: Callable[..., Any],
    libraries: Sequence[str],
    packed: PackedMetadata,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    request = _request(function, libraries[-1], args, kwargs)
    kwargs = {name: kwargs[name] for name, *_ in request.arguments[request.positional :]}
    if implementation != DOCUMENTS:
        return LIBRARIES[implementation](packed, function, args, kwargs)
    # On a GPU the launches of each batch dominate, so there are fewer batches, with more padding.
    sizes = COARSE if args[0].is_cuda else FINE
    return per_document(packed, _divided(request)[0], args, kwargs, sizes=sizes)


def _request(function: Callable[..., Any], library: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ScanRequest:
    """Filters the arguments that the function takes, without boundaries."""
    known = parameters(function)
    given = {name: kwargs[name] for name in known if name in kwargs and name not in _BOUNDARIES}
    return request_of(function, library, args, given)


def _divided(request: ScanRequest) -> tuple[Callable[..., Any], str]:
    """Chooses what scans batches of documents, and says so: the function, or plain torch where its library fails."""
    library, reason = request.library, refused(request, LIBRARIES[request.library])
    fails = refused(request, per_document)
    if fails is None:
        return request.function, f"scan by {library} on batches of documents (not on the row: {reason})"
    plain = request.function if fails == ABSENT else inspect.unwrap(request.function)
    return plain, f"scan by plain torch on batches of documents (not {library}: {reason})"
