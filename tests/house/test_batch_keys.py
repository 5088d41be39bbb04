"""The keys under which a batch carries its segments are spelt in one file."""

from __future__ import annotations

import ast

from packing_core.batches.keys import BatchKey
from tests.imports import PACKAGES, ROOT, files_of

HOME = ROOT / "packing_core/batches/keys.py"


def keys_in(code: str) -> set[str]:
    """Returns the keys of a batch among the strings of a module; sentences that name a key are not counted."""
    texts = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    return texts & {*BatchKey.ALL, BatchKey.SHARE}


def test_the_keys_of_a_batch_are_spelt_in_one_file() -> None:
    files = {file.relative_to(ROOT): file for package in PACKAGES for file in files_of(package) if file != HOME}
    spelt = {str(name): keys for name, file in files.items() if (keys := keys_in(file.read_text()))}
    assert not spelt, "take them from packing_core.batches.keys.BatchKey"


def test_a_key_that_is_spelt_again_is_found() -> None:
    assert keys_in('KEYS = ("packed_lengths", f(batch.get("cu_seq_lens_q")))') == {"packed_lengths", "cu_seq_lens_q"}
    assert keys_in('"""seq_idx"""\nraise Error("packed_lengths is wrong")') == {"seq_idx"}
