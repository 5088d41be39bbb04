"""``--push-to-hub``: uploads the output folder of a run, by the library that transformers uploads with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.checkpoints import FOLDER
from packing_core.training.job import is_hub_name

_KEPT_HERE = [f"{FOLDER}/*", "tensorboard/*", ".crosspack*"]


def create_repository(name: str | None, output: Path | None) -> None:
    """Makes the repository of ``--push-to-hub``, before any work, as the hub may refuse the name or the token.

    Raises:
        PackingError: there is no output to push, no token, or the hub refuses.
    """
    if name is None:
        return
    if output is None:
        raise PackingError("--push-to-hub pushes the folder of the run: pass --output too")
    if not is_hub_name(name):
        raise PackingError(f"--push-to-hub {name}: pass a name on the hub, `owner/name`")
    hub: Any = require("huggingface_hub", extra="hf")
    if hub.get_token() is None:
        raise PackingError("--push-to-hub needs a token of the hub: run `hf auth login`, or set HF_TOKEN")
    try:
        hub.HfApi().create_repo(name, exist_ok=True)
    except Exception as error:  # of the network and of the hub, by several libraries
        raise PackingError(f"--push-to-hub {name}: {first_line(error)}") from error


def push(folder: Path, name: str) -> str:
    """Uploads the folder of a run without its checkpoints; returns where it is.

    Raises:
        PackingError: the hub refuses; the folder is there all the same.
    """
    hub: Any = require("huggingface_hub", extra="hf")
    try:
        found = hub.HfApi().upload_folder(
            repo_id=name, folder_path=folder, ignore_patterns=_KEPT_HERE, commit_message="Train with crosspack"
        )
    except Exception as error:  # of the network and of the hub, by several libraries
        raise PackingError(
            f"--push-to-hub {name}: {first_line(error)}: the model is in {folder}; push it by "
            f"`hf upload {name} {folder}`"
        ) from error
    return str(getattr(found, "repo_url", found))
