"""Ragged storage: N variable-length sequences over memory that somebody else owns.

``Ragged(values, offsets)`` looks at a flat buffer; ``Ragged.of`` accepts whatever users hold (flat buffers, Arrow
lists, lists of arrays or of Python lists) and copies nothing that is an array already. Data leaves through ``copy_to``,
which writes chosen pieces of chosen sequences into an array of the caller's. Memory-mapped storage is pickled by path
(``_mapped``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import ArrayLike

from packing_core.errors import LayoutError, PackingError, first_line, naming
from packing_core.storage.arrays import Array, Int64, as_array, read_only, row_number
from packing_core.storage.arrow import is_arrow, lists_of
from packing_core.storage.mapped import MappedFile, by_path, opened
from packing_core.storage.segment_indexing import blocks, copy_runs, offsets_of

VALUES, OFFSETS = "values.npy", "offsets.npy"


class Ragged:
    """N sequences in one flat buffer: sequence i is ``values[offsets[i]:offsets[i + 1]]``.

    Nothing is copied. Iterating and indexing give read-only views.

    >>> import numpy as np
    >>> documents = Ragged(np.array([5, 6, 7, 8, 9]), np.array([0, 3, 5]))
    >>> len(documents), documents.lengths, documents[1]
    (2, array([3, 2]), array([8, 9]))

    Args:
        values: [T] contiguous numeric array, possibly a memory map.
        offsets: [N+1] integers that never decrease, the first not below 0 and the last not above T.
        name: what error messages call the sequences.

    Attributes:
        values: [T] as given, read-only.
        offsets: [N+1] as given, read-only.

    Raises:
        LayoutError: the two contradict each other, or ``values`` is not a contiguous 1-D numeric array.
    """

    def __init__(self, values: Array, offsets: ArrayLike, *, name: str = "sequences") -> None:
        self.name = name
        if not isinstance(values, np.ndarray):
            raise LayoutError(f"{name}.values is a {type(values).__name__}: pass a numpy array")
        self.values = read_only(as_array(values, f"{name}.values"))
        if self.values.ndim != 1 or not self.values.flags.c_contiguous:
            raise LayoutError(
                f"{name}.values has shape {list(self.values.shape)} and strides {list(self.values.strides)}: "
                f"Ragged needs one flat contiguous buffer, pass np.ascontiguousarray(values).reshape(-1)"
            )
        self.offsets = read_only(as_array(offsets, f"{name}.offsets", "iu"))
        if self.offsets.ndim != 1 or len(self.offsets) < 2:
            raise LayoutError(
                f"{name}.offsets has shape {list(self.offsets.shape)}: pass [N+1] offsets for N sequences, N at least 1"
            )
        falls = self.offsets[1:] < self.offsets[:-1]  # a difference of unsigned numbers is never negative
        if falls.any():
            bad = int(np.argmax(falls))
            begin, end = int(self.offsets[bad]), int(self.offsets[bad + 1])
            raise LayoutError(
                f"{name}[{bad}] has length {end - begin:,} (offsets {begin:,} to {end:,}): offsets must never decrease"
            )
        if self.offsets[0] < 0 or self.offsets[-1] > len(self.values):
            raise LayoutError(
                f"{name}.offsets runs from {self.offsets[0]:,} to {self.offsets[-1]:,} and there are "
                f"{len(self.values):,} values: offsets must stay inside the values"
            )

    @staticmethod
    def of(sequences: Any, *, name: str = "sequences") -> Ragged:
        """The same sequences as a Ragged, copying nothing that is an array already.

        Args:
            sequences: a Ragged; an Arrow list array (``list``, ``large_list`` or ``fixed_size_list``, whole, sliced or
                chunked) or what has ``to_arrow()``; a 2-D numpy array; or a list of 1-D arrays, CPU tensors or Python
                lists. Python lists are converted, which costs more than all the rest; arrays with strides are copied.
            name: what error messages call the sequences.

        Raises:
            LayoutError: a sequence is not one flat stretch of numbers, or is null.
            PackingError: there are no sequences, or they come from something without a length.
        """
        if isinstance(sequences, Ragged):
            return sequences
        if hasattr(sequences, "to_arrow") and not is_arrow(sequences):
            try:
                sequences = sequences.to_arrow()
            except Exception as error:  # another library's
                raise LayoutError(f"{name}.to_arrow() raises ({first_line(error)}): pass lists or arrays") from None
        if is_arrow(sequences):
            return _joined([Ragged(*lists, name=name) for lists in lists_of(sequences, name)], name)
        if isinstance(sequences, np.ndarray) and sequences.ndim == 2 and len(sequences):
            rows, length = sequences.shape
            flat = np.ascontiguousarray(as_array(sequences, name)).reshape(-1)
            return Ragged(flat, np.arange(rows + 1, dtype=np.int64) * length, name=name)
        return _ArrayList(_listed(sequences, name), name)

    @property
    def lengths(self) -> Int64:
        """int64 [N]: tokens of each sequence."""
        offsets = self.offsets.astype(np.int64, copy=False)
        return offsets[1:] - offsets[:-1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of every sequence."""
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Array:
        index = row_number(index, len(self), "sequence")
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self):,} sequences, {int(self.lengths.sum()):,} tokens, {self.dtype})"

    def copy_to(self, out: Array, at: Int64, source: Int64, start: Int64, length: Int64) -> None:
        """Copy tokens ``start[p] : start[p] + length[p]`` of sequence ``source[p]`` to ``out[at[p]:]``, for every p.

        Args:
            out: contiguous 1-D array of this dtype, written in place.
            at: int64 [P] first index in ``out``.
            source: int64 [P] sequence index.
            start: int64 [P] first token within the sequence.
            length: int64 [P] tokens; the piece must lie inside its sequence.
        """
        copy_runs(out, at, self.values, self.offsets[source].astype(np.int64, copy=False) + start, length)

    def flat(self) -> Ragged:
        """The same in one buffer from offset 0 to its end: a view where the storage is one buffer, else a copy."""
        begin, end = int(self.offsets[0]), int(self.offsets[-1])
        return Ragged(self.values[begin:end], self.offsets.astype(np.int64, copy=False) - begin, name=self.name)

    def save(self, folder: str | Path) -> None:
        """Write the sequences to ``folder`` as ``values.npy`` and ``offsets.npy``, which ``Ragged.open`` maps.

        Raises:
            PackingError: the folder cannot be written.
        """
        flat = self.flat()
        with naming(f"{folder} cannot be written", way_out="pass a folder with room that you may write to"):
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            np.save(path / VALUES, flat.values)
            np.save(path / OFFSETS, flat.offsets)

    @staticmethod
    def open(folder: str | Path, *, name: str = "sequences") -> Ragged:
        """Map what ``save`` wrote, without reading it.

        Raises:
            PackingError: the folder lacks one of the two files, or they are not what ``save`` wrote.
        """
        with naming(f"{folder} is no folder of Ragged.save", way_out="write it with Ragged.save(folder)"):
            path = Path(folder)
            missing = [file for file in (VALUES, OFFSETS) if not (path / file).is_file()]
            if missing:
                raise PackingError(
                    f"{path} has no {' and no '.join(missing)}: write the folder with Ragged.save(folder)"
                )
            values, offsets = (np.load(path / file, mmap_mode="r", allow_pickle=False) for file in (VALUES, OFFSETS))
            return Ragged(values, offsets, name=name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (by_path([self.values, self.offsets]), self.name)


class _ArrayList(Ragged):
    """N contiguous arrays that stay where they are."""

    def __init__(self, sequences: Sequence[Any], name: str) -> None:
        self.name = name
        if len(sequences) == 0:
            raise PackingError(f"{name} is empty: pass at least one sequence")
        self.arrays = _arrays(sequences, name)
        self.dtypes = {array.dtype for array in self.arrays if len(array)} or {np.dtype(np.int64)}
        self._dtype = _common_dtype(self.dtypes, name)
        self._lengths = np.fromiter(map(len, self.arrays), np.int64, len(self.arrays))
        if not self._lengths.all():  # NumPy says float64 of an empty list
            self.arrays = [array if len(array) else np.zeros(0, self._dtype) for array in self.arrays]

    @property
    def lengths(self) -> Int64:
        return self._lengths

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> Array:
        return read_only(self.arrays[row_number(index, len(self), "sequence")])

    def copy_to(self, out: Array, at: Int64, source: Int64, start: Int64, length: Int64) -> None:
        whole = not start.any() and bool((length == self._lengths[source]).all())
        for block in blocks(length):
            if whole:
                pieces = [self.arrays[i] for i in source[block].tolist()]
            else:
                cuts = zip(source[block].tolist(), start[block].tolist(), length[block].tolist())
                pieces = [self.arrays[i][begin : begin + count] for i, begin, count in cuts]
            # The bytes are joined where they can be: NumPy spends more than twice as long on every array it joins.
            alike = len(self.dtypes) == 1
            joined = np.frombuffer(b"".join(pieces), out.dtype) if alike else np.concatenate(pieces, dtype=out.dtype)
            ends = np.cumsum(length[block])
            # what stands side by side in a row is copied at once
            first = np.append(0, np.flatnonzero(at[block][1:] != at[block][:-1] + length[block][:-1]) + 1)
            begin = np.append((ends - length[block])[first], ends[-1]).tolist()
            for to, begins, stops in zip(at[block][first].tolist(), begin, begin[1:], strict=False):
                out[to : to + stops - begins] = joined[begins:stops]

    def flat(self) -> Ragged:
        offsets = offsets_of(self._lengths)
        return Ragged(np.concatenate(self.arrays, dtype=self.dtype), offsets, name=self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unlisted, (by_path(self.arrays), self.name)


class _Joined(Ragged):
    """Several Ragged one after the other, as the chunks of an Arrow array are."""

    def __init__(self, parts: list[Ragged], name: str) -> None:
        self.name = name
        self.parts = parts
        self.first = offsets_of([len(part) for part in parts])

    @property
    def lengths(self) -> Int64:
        return np.concatenate([part.lengths for part in self.parts])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, index: int) -> Array:
        index = row_number(index, len(self), "sequence")
        part = int(np.searchsorted(self.first, index, side="right")) - 1
        return self.parts[part][index - int(self.first[part])]

    def copy_to(self, out: Array, at: Int64, source: Int64, start: Int64, length: Int64) -> None:
        if self._buffer is not None:
            values, begins = self._buffer
            copy_runs(out, at, values, begins[source] + start, length)
            return
        home = np.searchsorted(self.first, source, side="right") - 1
        for number in np.unique(home).tolist():
            here = home == number
            local = source[here] - self.first[number]
            self.parts[number].copy_to(out, at[here], local, start[here], length[here])

    @cached_property
    def _buffer(self) -> tuple[Array, Int64] | None:
        """All parts as one buffer and where each sequence begins in it; None if their values do not line up.

        The chunks of an Arrow table lie in one mapped file, thousands of them, and a copy chunk by chunk takes 0.1 ms
        for each. So they are addressed from the lowest one. What lies between them is never read.
        """
        if any(type(part) is not Ragged or part.dtype != self.dtype for part in self.parts):
            return None
        addresses = np.array([part.values.__array_interface__["data"][0] for part in self.parts])
        low, size = addresses.min(), self.dtype.itemsize
        if ((addresses - low) % size).any():
            return None
        firsts = (addresses - low) // size
        reach = max(int(first) + len(part.values) for first, part in zip(firsts, self.parts, strict=True))
        lowest = self.parts[int(addresses.argmin())].values
        begins = [first + part.offsets[:-1] for first, part in zip(firsts, self.parts, strict=True)]
        return as_strided(lowest, (reach,), (size,), writeable=False), np.concatenate(begins)

    def flat(self) -> Ragged:
        parts = [part.flat() for part in self.parts]
        offsets = offsets_of(self.lengths)
        return Ragged(np.concatenate([part.values for part in parts], dtype=self.dtype), offsets, name=self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (by_path([array for part in self.parts for array in (part.values, part.offsets)]), self.name)


def _listed(sequences: Any, name: str) -> Sequence[Any]:
    """The sequences as something that has a length and can be indexed."""
    try:
        if isinstance(sequences, (str, bytes, dict, set, frozenset)):
            raise TypeError
        return sequences if isinstance(sequences, (list, tuple)) else [sequences[i] for i in range(len(sequences))]
    except Exception:  # it has no length, is a single number, or raises what it likes when it is indexed
        raise PackingError(
            f"{name} is a {type(sequences).__name__}: pass a list of token arrays, an Arrow list array or "
            f"Ragged(values, offsets); for a source that is read once use crosspack.stream"
        ) from None


def _arrays(sequences: Sequence[Any], name: str) -> list[Array]:
    """The sequences as flat arrays, those that are arrays as they are."""
    if set(map(type, sequences)) == {np.ndarray}:  # there may be millions
        layouts = {(array.dtype, array.ndim) for array in sequences}
        if all(dtype.kind in "iufb" and dtype.isnative and ndim == 1 for dtype, ndim in layouts):
            return list(map(np.ascontiguousarray, sequences))
    return [np.ascontiguousarray(_sequence(sequence, i, name)) for i, sequence in enumerate(sequences)]


def _sequence(sequence: Any, index: int, name: str) -> Array:
    if sequence is None:
        raise LayoutError(f"{name}[{index}] is None: drop it, or pass an array")
    if isinstance(sequence, (str, bytes)):
        raise LayoutError(f"{name}[{index}] is text: tokenise it first and pass its token ids")
    array = as_array(sequence, f"{name}[{index}]", "iufbO")
    if array.ndim == 0:
        raise LayoutError(
            f"{name}[{index}] is a number and must be a sequence with a number per token: leave the column out, or "
            f"pass [{name}] if it is a single sequence"
        )
    if array.ndim != 1:
        raise LayoutError(f"{name}[{index}] has shape {list(array.shape)} and must be flat: flatten it")
    return as_array(array, f"{name}[{index}]")


def _common_dtype(dtypes: set[np.dtype[Any]], name: str) -> np.dtype[Any]:
    """The dtype that holds all of them; integers stay integers."""
    common = np.result_type(*dtypes)
    if common.kind == "f" and all(dtype.kind in "iub" for dtype in dtypes):
        raise LayoutError(
            f"{name} mixes {' and '.join(sorted(map(str, dtypes)))}, which no integer dtype holds: convert them to one"
        )
    return common


def _joined(parts: list[Ragged], name: str) -> Ragged:
    if not parts:
        raise PackingError(f"{name} is empty: pass at least one sequence")
    return parts[0] if len(parts) == 1 else _Joined(parts, name)


def _unlisted(places: list[Array | MappedFile], name: str) -> Ragged:
    return _ArrayList([opened(place) for place in places], name)


def _unpickled(places: list[Array | MappedFile], name: str) -> Ragged:
    arrays = [opened(place) for place in places]
    return _joined([Ragged(*pair, name=name) for pair in zip(arrays[::2], arrays[1::2], strict=True)], name)
