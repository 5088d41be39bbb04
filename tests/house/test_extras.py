"""packing_core.extras: one line for an absent or an old library."""

from __future__ import annotations

import pytest

from packing_core import extras
from packing_core.errors import MissingExtraError


def test_an_absent_library_names_its_extra() -> None:
    with pytest.raises(MissingExtraError) as caught:
        extras.require("surely_absent.part", extra="hf")
    assert str(caught.value) == "surely_absent is not installed: pip install 'crosspack[hf]'"


def test_an_old_library_names_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.MINIMUM, "numpy", "99.1")
    with pytest.raises(MissingExtraError, match=r"numpy \S+ is too old, Crosspack needs 99.1 or newer: pip install"):
        extras.require("numpy", extra="torch")


def test_a_library_that_lacks_a_part_of_its_own_keeps_its_own_message(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_library.py").write_text("import surely_absent_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_absent_dependency"):
        extras.require("broken_library", extra="hf")


@pytest.mark.parametrize(
    ("text", "release"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.23.0", (5, 23, 0)), ("0.11.2.dev3", (0, 11, 2)), ("2.12.0rc1", (2, 12, 0))],
)
def test_releases_compare_by_number(text: str, release: tuple[int, ...]) -> None:
    assert extras._release(text) == release
