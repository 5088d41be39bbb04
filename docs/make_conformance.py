"""Write the protocol into docs/conformance.md, from packing_core/protocol.py: ``python docs/make_conformance.py``.

What stands between the two marks of the page is replaced; a test compares it with what this makes.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from packing_core import protocol

PAGE = Path(__file__).parent / "conformance.md"
BEGIN, END = "<!-- protocol: written by docs/make_conformance.py -->", "<!-- end of the protocol -->"


def signature(method: str) -> str:
    """The method's definition as the protocol writes it, without its docstring and body."""
    source = inspect.cleandoc(inspect.getsource(getattr(protocol.Backend, method)))
    return source[: source.index('"""')].rstrip() + " ..."


def described(kind: type) -> str:
    """The attributes that a dataclass documents, as its docstring lists them."""
    text = inspect.getdoc(kind) or ""
    return text[text.index("Attributes:") :].removeprefix("Attributes:\n")


def made() -> str:
    """The section, from mark to mark."""
    methods = [method for level in protocol.LEVELS.values() for method in level]
    options = [
        f"| {method} | `{option}` | {meaning} |"
        for method, offered in protocol.OPTIONS.items()
        for option, meaning in offered.items()
    ]
    blocks = [
        BEGIN,
        "Signatures of `Backend`. `Array` is a numpy array, `Gradients` a dict of arrays by name,\n"
        "`Place` a tuple of a row, a first token and the one after the last.",
        "```python\n" + "\n\n\n".join(signature(method) for method in methods) + "\n```",
        "Attributes of `Document`:",
        "```text\n" + described(protocol.Document) + "\n```",
        "Attributes of `Batch`, what `collate` returns and `forward` and `gradients` take:",
        "```text\n" + described(protocol.Batch) + "\n```",
        "Attributes of `Capabilities`, what a backend declares:",
        "```text\n" + described(protocol.Capabilities) + "\n```",
        "Options, by the names of `Capabilities.options`. A call outside of them must raise `UnsupportedError`.\n"
        "A promise is about values: without it the suite does not send them.",
        "\n".join(["| method | option | a call that takes it |", "|---|---|---|", *options]),
        END,
    ]
    return "\n\n".join(blocks)


def replaced(page: str) -> str:
    """The page with the section as it is made now."""
    before, _, rest = page.partition(BEGIN)
    return before + made() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
