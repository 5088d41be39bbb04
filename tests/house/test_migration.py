"""docs/migration.md names options that exist.

What it shows of Crosspack is executed by ``test_readme``.
"""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import grain
import pytest
from trl import SFTConfig

import crosspack

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
COMMON = "What every switch has in common"
OURS = {
    name
    for function in (crosspack.plan, crosspack.pack, crosspack.stream, crosspack.PackedCollator)
    for name in inspect.signature(function).parameters
}


def test_the_options_of_ours_exist() -> None:
    ours = [line.split("|")[2] for line in SECTIONS[COMMON].splitlines() if line.startswith("|")][2:]
    named = {option for cell in ours for option in re.findall(r"`([a-z_]+)(?:=|`)", cell)}
    assert len(named) >= 6 and named <= OURS


def test_what_0_3_removed_is_gone_and_its_replacement_is_there() -> None:
    rows = [line.split(" | ") for line in SECTIONS["From 0.2 to 0.3"].splitlines() if line.startswith("| `")]
    gone = {name for old, _ in rows for name in re.findall(r"`plan\((\w+)=\.\.\.", old)}
    assert gone == {"alignment", "window"} and not gone & OURS
    named = [name for _, new in rows for name in re.findall(r"`(torch_backend[\w.]+)`", new)]
    assert named and all(find_spec(name) for name in named)


@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
def test_long_documents_raise_unless_overflow_says_otherwise(overflow) -> None:
    assert f'"{overflow}"' in SECTIONS[COMMON]
    with pytest.raises(crosspack.CapacityError):
        crosspack.plan([9], 8)
    crosspack.plan([9, 1], 8, overflow=overflow)


def test_the_options_of_installed_libraries_exist() -> None:
    packing = inspect.signature(grain.experimental.FirstFitPackIterDataset).parameters
    assert {"length_struct", "num_packing_bins", "max_sequences_per_bin"} <= set(packing)
    (strategies,) = [
        field.metadata["help"] for name, field in SFTConfig.__dataclass_fields__.items() if name == "packing_strategy"
    ]
    assert all(f"'{name}'" in strategies for name in ("bfd", "bfd_split", "wrapped"))
