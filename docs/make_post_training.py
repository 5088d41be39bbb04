"""Audits TRL's trainers whose loss reads each document and writes the table of docs/post-training.md.

python docs/make_post_training.py
"""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from pathlib import Path

import datasets

from torch_backend.stacks.scored import BUILDERS, FAMILIES, scored_verdict

PAGE = Path(__file__).with_name("post-training.md")
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"


def table() -> str:
    """Each trainer by each family: TRL as it is, and after enable_packing."""
    heads = [f"{family} ({what})" for family, (what, _) in FAMILIES.items()]
    lines = [f"| TRL {version('trl')}, transformers {version('transformers')} | " + " | ".join(heads) + " |"]
    lines.append("|---" * (len(heads) + 1) + "|")
    for name in BUILDERS:
        for packed in (False, True):
            cells = [scored_verdict(name, family, packed=packed) for family in FAMILIES]
            label = f"`{name}Trainer`, " + ("`enable_packing`" if packed else "as it is")
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    datasets.disable_progress_bars()
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(before + BEGIN + table() + END + after)
