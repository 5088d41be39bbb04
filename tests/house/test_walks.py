"""The walk of a public function through the code: which files a reader meets who follows one call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.imports import ROOT
from tests.torch_backend.models import tiny
from torch_backend.patching import patch, unpatch


def entered(call: Callable[[], Any], package: str) -> set[str]:
    """Returns the files of a package with a function that runs in a call."""
    folder, files = f"{ROOT / package}/", set[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(folder):
            files.add(file.removeprefix(folder))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return files


def test_a_patch_enters_the_edits_of_layers_only_where_there_are_such_layers() -> None:
    """Calls of the plain model are followed but for the first, which reads signatures and codes."""
    model, hybrid = tiny("llama"), tiny("qwen3_next")
    unpatch(patch(model, verify=False))
    files = entered(lambda: patch(model, verify=False), "torch_backend")
    assert len(files) <= 15, sorted(files)
    edits = {file for file in files if file.startswith("hf/edits/")}
    assert edits == {"hf/edits/head_rows.py", "hf/edits/rotary.py"}
    more = entered(lambda: patch(hybrid, verify=False), "torch_backend") - files
    assert {"hf/edits/mixers.py", "hf/edits/packed_experts.py"} <= more
