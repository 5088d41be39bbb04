"""Finds products of two 32-bit numbers that a kernel knows only when it runs, and by which it addresses memory.

Triton's own representation of a kernel (``.ttir``, :mod:`.compiling`) -> the offsets that are added to pointers -> the
products in them. An index times a stride passes 2^31 along any axis of a large tensor: of tokens, heads or channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"\s*(%[\w#]+)(?::\d+)? = ([\w.]+) (.*) loc\((#loc\d*)\)")
_SAME = ("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "arith.extsi")
_ENDS = ("tt.load", "arith.cmpi")  # what is loaded or compared is no factor of an offset


class _Operation(NamedTuple):
    name: str
    operands: list[str]
    type: str
    place: str


def narrow_products(folder: Path) -> set[str]:
    """Returns the places in ``torch_backend/ops``, ``file:line``, of such products in all kernels under a folder."""
    return {place for path in folder.rglob("*.ttir") for place in _of_kernel(path.read_text())}


def _of_kernel(text: str) -> Iterator[str]:
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    operations = {}
    for found in filter(None, map(_LINE.match, text.splitlines())):
        name, operation, rest, place = found.groups()
        operands, _, kind = rest.partition(" : ")
        operations[name] = _Operation(operation, re.findall(r"%[\w#]+", operands), kind, place)
    for each in list(operations.values()):
        if each.name == "tt.addptr":
            for product in _products(operations, each.operands[1], set()):
                yield _line(places, product.place)


def _products(operations: dict[str, _Operation], name: str, seen: set[str]) -> Iterator[_Operation]:
    operation = operations.get(name)
    if operation is None or name in seen or operation.name in _ENDS:
        return
    seen.add(name)
    narrow = operation.name == "arith.muli" and re.search(r"\bi32>?$|xi32>$", operation.type)
    if narrow and not any(_is_constant(operations, x) for x in operation.operands):
        yield operation
    for operand in operation.operands:
        yield from _products(operations, operand, seen)


def _is_constant(operations: dict[str, _Operation], name: str) -> bool:
    operation = operations.get(name)
    if operation is None:
        return False
    return operation.name == "arith.constant" or (
        operation.name in _SAME and _is_constant(operations, operation.operands[0])
    )


def _line(places: dict[str, str], place: str) -> str:
    """Follows a location to the line of its file; of an inlined call the innermost."""
    while (found := re.search(r'ops/([^"]*)":(\d+)', places[place])) is None:
        place = re.findall(r"#loc\d*", places[place])[0]
    return ":".join(found.groups())
