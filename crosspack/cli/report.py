"""``crosspack report``: what packing would save on this data, as tables and on request a picture.

Only the lengths of the documents are kept; only the picture needs matplotlib.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from crosspack.cli import options
from crosspack.cli.console import OUT, figures
from crosspack.cli.figures import report_figure
from crosspack.cli.models import check_name
from crosspack.cli.options import Source
from crosspack.cli.progress import counted
from crosspack.cli.tables import composition_table, computed_tokens, lengths_table, savings_table
from crosspack.cli.text import Policy
from packing_core.errors import PackingError, plural
from packing_core.extras import require
from packing_core.plan import plan as make_plan

BATCHES = (8, 16)  # sizes of the padded batches that packing is compared with
PICTURES = (".png", ".pdf", ".svg")


def report(
    data: options.Data = None,
    split: options.Split = "train",
    tokenizer: options.TokenizerName = None,
    capacity: options.Capacity = 2048,
    overflow: options.OverflowPolicy = "truncate",
    packing: options.Packing = "mixed",
    loss: options.LossOn = "completion",
    bos: options.Bos = None,
    eos: options.Eos = None,
    seed: options.Seed = 0,
    output: Annotated[Path | None, typer.Option(help="Draw a picture there: .png, .pdf or .svg.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture that --output names.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show what packing would save on your data."""
    if output is not None:
        _check_picture(output, overwrite=overwrite)
    check_name("--tokenizer", tokenizer)
    source = Source.open(data, split, tokenizer, Policy(loss, bos, eos), trust_remote_code=trust_remote_code)
    lengths, trained = [], 0
    for document in counted(OUT, "documents read", source.documents(capacity, overflow)):
        lengths.append(len(document.ids))
        trained += int(np.count_nonzero(document.trained[1:]))
    if not lengths:
        raise PackingError("no document has a token to train on: check --data, its columns and --loss")
    documents = np.array(lengths, np.int64)
    packed = make_plan(documents, capacity, overflow=overflow, strategy=packing, seed=seed)
    shuffled = np.random.default_rng(seed).permutation(packed.length)
    random = make_plan(shuffled, capacity, strategy="sequential", seed=None)
    OUT.print(source.describe(), highlight=False)
    OUT.print(lengths_table(documents, trained=trained))
    long = int(np.count_nonzero(documents > capacity))
    lost = int(documents.sum()) - packed.n_tokens
    composition = packed.composition()
    if long:
        OUT.print(
            f"{plural(long, 'document')} longer than {capacity:,} tokens, under --overflow {overflow}: "
            f"{lost:,} tokens ({lost / documents.sum():.1%}) are left out of the table below",
            highlight=False,
        )
    OUT.print(savings_table(packed, batches=BATCHES, seed=seed))
    OUT.print(composition_table(composition, random.composition()))
    figures(
        {
            "data": source.records.name,
            "tokenizer": source.tokenizer,
            "documents": len(documents),
            "tokens": int(documents.sum()),
            "trained_tokens": trained,
            "longest": int(documents.max()),
            "capacity": capacity,
            "overflow": overflow,
            "packing": packing,
            "longer_than_capacity": long,
            "tokens_left_out": lost,
            "computed_tokens": computed_tokens(packed, batches=BATCHES, seed=seed),
            "composition": asdict(composition),
        }
    )
    if output is not None:
        title = f"Packing {source.records.name}"
        report_figure(documents, packed, random, output, batches=BATCHES, seed=seed, title=title)
        OUT.print(f"picture: {output}", highlight=False)


def _check_picture(path: Path, *, overwrite: bool) -> None:
    """Refuse a picture that cannot be drawn or would replace a file, before anything is read."""
    require("matplotlib.figure", extra="plot")
    if path.suffix.lower() not in PICTURES:
        raise PackingError(f"--output {path}: name a picture that ends in {', '.join(PICTURES)}")
    if path.is_dir():
        raise PackingError(f"--output {path} is a folder: name a picture inside it")
    if path.exists() and not overwrite:
        raise PackingError(f"--output {path} exists: pass --overwrite or another name")
