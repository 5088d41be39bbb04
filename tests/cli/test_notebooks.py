"""The notebooks run from the first cell to the last, and hold neither outputs nor links that lead nowhere.

Their cells are plain Python, so they run in this process: a kernel would import torch once more.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for number, code in enumerate(cells(notebook, "code")):
        exec(compile(code, f"{notebook.name}, code cell {number}", "exec"), namespace)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_its_links_lead_somewhere(notebook) -> None:
    stored = json.loads(notebook.read_text())
    assert stored["nbformat"] == 4
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in stored["cells"])
    for link in re.findall(r"\]\(([^)#]+)", "\n".join(cells(notebook, "markdown"))):
        assert (notebook.parent / link).exists(), link
