"""Writes the board as Markdown and as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from html import escape
from typing import Any

from benchmarks._report import table, versions

TITLE = "What released stacks do with packed documents"
LEGEND = """\
Each cell is a test that anyone can rerun: the stack's released code packs four documents, a tiny random model of the
class runs them on the CPU in float32, and then one document after the other is exchanged.

- **exact**: no other document's logits or loss move by more than 1e-4 of the largest value, and the gradients are those
  of each document alone.
- **contaminated**: they move, and the figures say by how much.
- **differs**: no document moves another one, but the gradients are not those of each document alone.
- **refused**: the stack raises instead of training. Fused kernels that need a GPU may lift it there.
- **not run**: the stack, or this part of it, could not be run on the CPU.

`flash` rows run the stack's FlashAttention path with FlashAttention's two functions written in plain torch. For MaxText
and EasyDeL the board runs the released packers and loss masks, in our patched model, which honours their segments: what
it finds is in their batches. `kept` is the share of real tokens that are trained (lognormal lengths of mean 600, rows
of 2,048; some documents are longer), `filled` is the share of slots that hold one. Speed is tokens/s relative to
crosspack in the same run, on tiny models and a CPU that other work shared: halves and doubles are noise, and nothing
follows for a GPU."""


def markdown(lines: Sequence[Any], models: dict[str, str], day: date) -> str:
    """Returns the page."""
    header, rows, reasons = _table(lines, models)
    speeds = table(["tokens/s, relative to crosspack", *header[4:]], _speeds(lines, models))
    parts = [f"# {TITLE}", f"{day}, {_versions()}.", LEGEND, table(header, rows)]
    notes = "\n".join(f"- {line.stack}: {line.note}." for line in lines if line.note)
    numbered = "\n".join(f"{number}. `` {reason} ``" for number, reason in enumerate(reasons, 1))
    again = "Run it again, all of it or one cell:\n\n```text\n" + "\n".join(COMMANDS) + "\n```"
    return (
        "\n\n".join(
            [*parts, "What was raised:", numbered, "## Speed", speeds, "## Notes", notes, "## How to run it", again]
        )
        + "\n"
    )


def html(lines: Sequence[Any], models: dict[str, str], day: date) -> str:
    """Returns the page as HTML, with each cell coloured by its verdict."""
    header, rows, reasons = _table(lines, models)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_coloured, row))}</tr>\n" for row in rows)
    legend = "".join(f"<p>{escape(part)}</p>" for part in LEGEND.split("\n\n"))
    raised = "".join(f"<li><code>{escape(reason)}</code></li>" for reason in reasons)
    style = (
        "body{font:15px system-ui;margin:2em;max-width:90em}table{border-collapse:collapse}"
        "td,th{border:1px solid #ccc;padding:.4em;text-align:left;vertical-align:top}"
        ".exact{background:#d9f2dd}.contaminated{background:#f7c9c5}.differs{background:#fbe6c0}.refused{background:#eee}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title><style>{style}</style>'
        f"</head>\n<body><h1>{TITLE}</h1><p>{day}, {escape(_versions())}</p>{legend}\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"
        f"<p>What was raised:</p><ol>{raised}</ol></body></html>\n"
    )


COMMANDS = (
    "python -m benchmarks.board --install FOLDER",
    "python -m benchmarks.board --folder FOLDER",
    "python -m benchmarks.board --folder FOLDER --stack axolotl --model qwen3_next",
)


def _versions() -> str:
    return versions("torch", "transformers", "trl")


def _table(lines: Sequence[Any], models: dict[str, str]) -> tuple[list[str], list[list[str]], list[str]]:
    """Returns the header, the rows, and the reasons that cells give by number."""
    header = ["stack", "version", "kept", "filled", *(f"{kind} ({model})" for model, kind in models.items())]
    reasons = list(dict.fromkeys(cell.reason for line in lines for cell in line.cells.values() if cell.reason))

    def text(cell: Any) -> str:
        return f"{cell.text()} [{reasons.index(cell.reason) + 1}]" if cell.reason else cell.text()

    rows = [
        [line.stack, line.version, _share(line.kept), _share(line.filled), *(text(line.cells[m]) for m in models)]
        for line in lines
    ]
    return header, rows, reasons


def _speeds(lines: Sequence[Any], models: dict[str, str]) -> list[list[str]]:
    ours = next((line for line in lines if line.stack == "crosspack"), None)

    def relative(line: Any, model: str) -> str:
        seconds, base = line.cells[model].seconds, ours.cells[model].seconds if ours else 0.0
        return f"{base / seconds:.1f}" if seconds and base else ""

    return [[line.stack, *(relative(line, model) for model in models)] for line in lines]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _coloured(text: str) -> str:
    return f'<td class="{escape(text.partition(":")[0].split(" ")[0])}">{escape(text)}</td>'
