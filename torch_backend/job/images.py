"""Records with images as TRL's trainers read them.

The records of a TaskJob -> every image is decoded once, so that errors name the record before anything is trained ->
a ``datasets.Dataset`` whose images TRL's collators decode again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packing_core.errors import LayoutError, PackingError
from packing_core.extras import require
from packing_core.training.tasks import TaskJob
from torch_backend.collate.pictures import has_own_pictures, pictures_of
from torch_backend.collate.vision import place_of

_CHATS = ("prompt", "completion", "chosen", "rejected")


def image_dataset(job: TaskJob, records: Sequence[Mapping[str, Any]], skipped: list[str]) -> Any:
    """The records with a column ``images``, as TRL's trainers take them.

    Args:
        skipped: gets the reason for each record that is left out.

    Raises:
        PackingError: a record cannot be used, or under ``on_error="skip"`` none can.
    """
    datasets = require("datasets", extra="hf")
    examples = []
    for number, record in enumerate(records):
        try:
            examples.append(_with_images(record, place_of(record, number)))
        except PackingError as error:
            if job.on_error == "stop":
                raise
            skipped.append(str(error))
    if not examples:
        raise PackingError(f"none of the {len(records):,} records can be used, the first because {skipped[0]}")
    return datasets.Dataset.from_list(examples).cast_column("images", datasets.Sequence(datasets.Image()))


def _with_images(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record with all its images in one column, after they were decoded."""
    if any(has_own_pictures(record.get(name)) for name in _CHATS):
        raise LayoutError(f"{where} has images in its messages: put them into the column images, where TRL reads them")
    images = record.get("images")
    if images is None:
        images = [] if record.get("image") is None else [record["image"]]
    pictures_of({"images": images}, where)
    return {**{name: value for name, value in record.items() if name != "image"}, "images": list(images)}
