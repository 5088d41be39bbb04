"""``crosspack report``: what packing would save on this data, as a table and a picture. Only lengths are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from crosspack.cli import options
from crosspack.cli.figures import report_figure
from crosspack.cli.options import OUT, Source
from crosspack.cli.progress import counted
from crosspack.cli.tables import lengths_table, savings_table
from crosspack.cli.text import Policy
from packing_core.errors import PackingError
from packing_core.extras import require
from packing_core.plan import plan as make_plan

BATCHES = (8, 16)  # sizes of the padded batches that packing is compared with


def report(
    data: options.Data = None,
    split: options.Split = "train",
    tokenizer: options.TokenizerName = None,
    capacity: options.Capacity = 2048,
    overflow: options.OverflowPolicy = "truncate",
    loss: options.LossOn = "completion",
    bos: options.Bos = None,
    eos: options.Eos = None,
    seed: options.Seed = 0,
    output: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("runs/report.png"),
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show what packing would save on your data."""
    require("matplotlib.figure", extra="plot")
    source = Source.open(data, split, tokenizer, Policy(loss, bos, eos), trust_remote_code=trust_remote_code)
    lengths, trained = [], 0
    for document in counted(OUT, "documents read", source.encoder(source.records)):
        lengths.append(len(document.ids))
        trained += int(np.count_nonzero(document.trained[1:]))
    if not lengths:
        raise PackingError("no document has a token to train on: check --data, its columns and --loss")
    documents = np.array(lengths, np.int64)
    packed = make_plan(documents, capacity, overflow=overflow, seed=seed)
    OUT.print(source.describe(), highlight=False)
    OUT.print(lengths_table(documents, trained=trained))
    for what, ids in (("truncated", packed.truncated), ("dropped", packed.dropped)):
        if len(ids):
            OUT.print(f"{len(ids):,} documents are longer than {capacity:,} tokens and {what} (--overflow)")
    OUT.print(savings_table(packed, batches=BATCHES, seed=seed))
    OUT.print(packed.composition(), highlight=False)
    report_figure(documents, packed, output, batches=BATCHES, seed=seed, title=f"Packing {source.records.name}")
    OUT.print(f"picture: {output}", highlight=False)
