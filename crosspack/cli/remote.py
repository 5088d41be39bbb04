"""``--output`` as a URL: the result is made in a local folder and uploaded when it is complete, the manifest last.

The local folder has a name that follows from the URL, so a run that was killed goes on, and so does an upload.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crosspack.cli.listing import parse_listing
from crosspack.reading.files import masked, remote
from crosspack.reading.folders import LISTING
from packing_core.errors import PackingError
from packing_core.training.files import check_own_folder


@contextmanager
def staged(url: str, manifest: str, *, overwrite: bool) -> Iterator[Path]:
    """A local folder for what belongs to ``url``; what is in it afterwards is uploaded.

    Args:
        manifest: the file whose presence says that the result is complete: it is deleted first and uploaded last.

    Raises:
        PackingError: there is something, or it cannot be written.
    """
    folder = _own_folder() / hashlib.sha256(url.encode()).hexdigest()[:16]
    with remote(url) as (system, path):
        held = system.find(path) if system.exists(path) else []
        if held and not overwrite:
            raise PackingError(f"--output {masked(url)} is not empty: pass --overwrite or another folder")
        if held and not system.exists(f"{path.rstrip('/')}/{LISTING}"):
            raise PackingError(
                f"--overwrite: {masked(url)} has no {LISTING}, so it holds something else: pass another folder"
            )
        listing = f"{path.rstrip('/')}/{LISTING}"
        old = [file.name for file in parse_listing(system.cat(listing), masked(f"{url}/{LISTING}"))[0]] if held else []
    yield folder
    with remote(url) as (system, path):
        path = path.rstrip("/")
        local = folder / LISTING
        new = [file.name for file in parse_listing(local.read_bytes(), str(local))[0]]
        if manifest in old:
            system.rm(f"{path}/{manifest}")
        for name in [LISTING, *(name for name in new if name != manifest), manifest]:
            parent = f"{path}/{name}".rpartition("/")[0]
            system.makedirs(parent, exist_ok=True)
            system.put_file(str(folder / name), f"{path}/{name}")
        for name in set(old) - set(new):
            system.rm(f"{path}/{name}")
    shutil.rmtree(folder)


def _own_folder() -> Path:
    """The folder of this user, which no other user can read, for results on their way to URLs."""
    folder = Path(tempfile.gettempdir(), f"crosspack-{os.geteuid() if hasattr(os, 'geteuid') else 'uploads'}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_own_folder(folder, private=True)
    return folder
