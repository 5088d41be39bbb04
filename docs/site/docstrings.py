"""An extension of griffe, which reads docstrings for the API reference: what they mean that Markdown does not know.

- ``q, k, v: ...`` under "Args:" says once what several parameters mean. Griffe takes that for one parameter, which the
  signature does not have. Each parameter gets the text; misnamed parameters are still reported.
- A doctest outside an "Examples:" section is prose to Markdown, and its lists would be links.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# An entry of "Args:" for several names, with the deeper indented lines below it.
_GROUP = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+):(?= )(.*(?:\n\1 +.*)*)", flags=re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", flags=re.MULTILINE)


def readable(docstring: str) -> str:
    """
    >>> print(readable("Args:\\n    a, b: [T],\\n        floats.\\n    c: one"))
    Args:
        a: [T],
            floats.
        b: [T],
            floats.
        c: one
    """
    head, arguments, rest = docstring.partition("Args:\n")
    listed, end, rest = rest.partition("\n\n")
    docstring = head + arguments + _GROUP.sub(_entries, listed) + end + rest
    return _DOCTEST.sub(lambda lines: f"```pycon\n{lines[0]}\n```", docstring)


def _entries(group: re.Match[str]) -> str:
    indent, names, text = group.groups()
    return "\n".join(f"{indent}{name}:{text}" for name in names.split(", "))


class ReadableDocstrings(griffe.Extension):
    """Applies `readable` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = readable(obj.docstring.value)
