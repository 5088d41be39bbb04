"""Arrays that lie in memory-mapped files: pickled as a place in the file, so that workers map it instead of reading it.

NumPy says which of its arrays are maps. Arrow does not, so on Linux the address is looked up among the maps of this
process, which also name the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from packing_core.errors import PackingError
from packing_core.storage.arrays import Array

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class MappedFile:
    """Location of an array in a file; pickled in place of the array."""

    path: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def open(self) -> Array:
        """Map the array.

        Raises:
            PackingError: the file is gone, or ends before the array does.
        """
        path = Path(self.path)
        if not path.is_file():
            raise PackingError(
                f"{self.path} is gone: memory-mapped sequences are pickled by path, so the file must exist where they "
                f"are unpickled"
            )
        count = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        if path.stat().st_size < self.offset + count:
            raise PackingError(
                f"{self.path} is shorter than it was when the sequences in it were pickled: leave mapped files as they "
                f"are while workers read them"
            )
        if not count:
            return np.zeros(self.shape, self.dtype)
        return _whole(path)[self.offset : self.offset + count].view(self.dtype).reshape(self.shape)


# A column of many chunks lies in one file, and a process may hold only so many maps.
_OPENED: WeakValueDictionary[tuple[str, int, int, int], Any] = WeakValueDictionary()


def _whole(path: Path) -> Array:
    state = path.stat()
    key = (str(path), state.st_ino, state.st_mtime_ns, state.st_size)
    mapped = _OPENED.get(key)
    if mapped is None:
        mapped = _OPENED[key] = np.memmap(path, np.uint8, mode="r")
    return mapped


def by_path(arrays: Sequence[Array]) -> list[Array | MappedFile]:
    """For each array its place in a file where it is a map of one that others see as it does, else the array."""
    maps: list[_Map] | None = None
    places: list[Array | MappedFile] = []
    for array in arrays:
        place = _of_numpy(array) if array.flags.c_contiguous else None
        if place is None and array.flags.c_contiguous and array.nbytes:
            maps = _read_maps() if maps is None else maps
            place = _of_process(array, maps)
        places.append(array if place is None else place)
    return places


def opened(place: Array | MappedFile) -> Array:
    """The array that :func:`by_path` was given."""
    return place.open() if isinstance(place, MappedFile) else place


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _of_numpy(array: Array) -> MappedFile | None:
    root: Any = array
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None or root.mode == "c":
        return None
    offset = root.offset + _address(array) - _address(root)
    return MappedFile(str(root.filename), offset, array.dtype, array.shape)


@dataclass(frozen=True)
class _Map:
    """Addresses ``begin`` to ``end`` show a file from ``offset``."""

    begin: int
    end: int
    offset: int
    inode: int
    path: str


def _read_maps() -> list[_Map]:
    """The read-only maps of files in this process, by address, without libraries, which loaders change."""
    if not _MAPS.exists():
        return []
    maps = []
    for line in _MAPS.read_text().splitlines():
        addresses, access, offset, _, inode, *path = line.split(maxsplit=5)
        if access[:3] == "r--" and path and path[0].startswith("/") and ".so" not in path[0]:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            maps.append(_Map(begin, end, int(offset, 16), int(inode), path[0]))
    return sorted(maps, key=lambda found: found.begin)


def _of_process(array: Array, maps: list[_Map]) -> MappedFile | None:
    begin = _address(array)
    at = bisect_right(maps, begin, key=lambda found: found.begin) - 1
    if at < 0 or begin + array.nbytes > maps[at].end:
        return None
    path = Path(maps[at].path)
    if not path.is_file() or path.stat().st_ino != maps[at].inode:  # deleted or replaced since
        return None
    return MappedFile(str(path), maps[at].offset + begin - maps[at].begin, array.dtype, array.shape)
