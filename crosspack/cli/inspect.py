"""``crosspack inspect``: one packed row, document by document: where each stands, what carries loss, and its text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import numpy as np
import typer

from crosspack.cli import options
from crosspack.cli.console import OUT, figures
from crosspack.cli.models import check_name
from crosspack.cli.options import check_data
from crosspack.encoding.kinds import kind_of_row
from crosspack.encoding.tokenizer import load_tokenizer
from crosspack.encoding.tokens import token_documents
from packing_core.errors import PackingError, plural
from packing_core.training.schedule import EncodedDocument

WIDTH = 80
LABELS = {True: "loss", False: "no loss"}


def inspect(
    data: Annotated[str, typer.Argument(help="A packed folder or file, or other data that holds token ids.")],
    row: Annotated[int, typer.Option(min=0, help="Which row, from 0.")] = 0,
    split: options.Split = "train",
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A folder or a hub name. Default: that of the packed folder.")
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show the documents of a packed row, and what of them carries loss."""
    check_name("--tokenizer", tokenizer)
    records = check_data([data], split, tokenizer, option="DATA")
    first = next(iter(records))
    if kind_of_row(first) != "input_ids":
        raise PackingError(f"DATA {data}: its records hold no token ids: pack it with `crosspack pack`")
    record = next(islice(iter(records), row, None), None)
    if record is None:
        rows = sum(1 for _ in records)
        raise PackingError(f"--row {row}: {data} has {plural(rows, 'row')}, counted from 0")
    own = Path(data) / "tokenizer"
    name = tokenizer or (str(own) if own.is_dir() else None)
    loaded = None if name is None else load_tokenizer(name, trust_remote_code=trust_remote_code)
    shown = list(_described((document for document, _ in token_documents(record, record.where, {})), loaded))
    tokens, trained = (sum(document[key] for document in shown) for key in ("tokens", "trained"))
    found = {"row": row, "where": record.where, "tokens": tokens, "trained": trained, "documents": shown}
    figures(found)
    for line in _lines(found, decoded=loaded is not None):
        OUT.print(line, markup=False, soft_wrap=True)


def _described(documents: Iterator[EncodedDocument], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Each document with its place in the row and the runs of tokens that carry loss and that do not."""
    begin = 0
    for number, document in enumerate(document for document in documents if len(document.ids)):
        trained = document.trained.copy()
        trained[:1] = False  # nothing predicts the first token of a document
        cuts = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
        runs = []
        for a, b in pairwise(cuts):
            ids = document.ids[a:b].tolist()
            text = None if tokenizer is None else tokenizer.decode(ids)
            runs.append({"loss": bool(trained[a]), "positions": [a, b - 1], "input_ids": ids, "text": text})
        yield {
            "document": number,
            "begin": begin,
            "tokens": len(trained),
            "trained": int(trained.sum()),
            "runs": runs,
        }
        begin += len(trained)


def _lines(found: dict[str, Any], *, decoded: bool) -> Iterator[str]:
    documents = plural(len(found["documents"]), "document")
    yield f"row {found['row']}, {found['where']}"
    yield f"{plural(found['tokens'], 'token')} in {documents}, {found['trained']:,} with loss"
    if not decoded:
        yield "token ids, because there is no tokenizer: pass --tokenizer"
    for document in found["documents"]:
        begin, length = document["begin"], document["tokens"]
        yield ""
        yield f"document {document['document']}: tokens {begin:,} to {begin + length - 1:,} of the row, " + (
            f"positions 0 to {length - 1:,}, {document['trained']:,} with loss"
        )
        for run in document["runs"]:
            text = " ".join(map(str, run["input_ids"])) if run["text"] is None else _visible(run["text"])
            label = f"  {LABELS[run['loss']]:<9}"
            lines = wrap(text, WIDTH - len(label), drop_whitespace=run["text"] is None) or [""]
            yield from (f"{label if not number else ' ' * len(label)}{line}" for number, line in enumerate(lines))


def _visible(text: str) -> str:
    """Text on one line, with line ends and other control characters written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
