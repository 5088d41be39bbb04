"""The clips of a raw example, decoded: one channel, float32, at the rate of the family's feature extractor.

Files are read by soundfile, addresses by transformers, and clips of another rate are resampled by soxr.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import LayoutError, naming
from packing_core.extras import require
from torch_backend.collate.pictures import LEAVE_OUT, media_of, of_uri

Clip = NDArray[np.float32]


def clips_of(example: Mapping[str, Any], where: str, rate: int, longest: int | None = None) -> list[Clip]:
    """Decodes the clips of an example [samples], in the order of their places.

    Args:
        example: ``audios``, a list, or ``audio``; and ``messages`` or a ``prompt`` whose parts may have clips of their
            own (``{"type": "audio", "audio": ...}``, ``path``, ``url`` or ``base64``, or ``input_audio`` as in OpenAI's
            API). Each is a path, a URL, ``{"array": ..., "sampling_rate": ...}``, ``{"bytes": ..., "path": ...}``
            or a decoder, as ``datasets`` gives them, or an array beside a column ``sampling_rate``.
        where: what messages call the example.
        rate: samples per second that the feature extractor takes.
        longest: samples beyond which the model would hear the beginning of a clip alone.

    Raises:
        MissingExtraError: soundfile or soxr is not installed.
        PackingError: a clip cannot be decoded.
        LayoutError: it is longer than the model takes, empty, or there are more or fewer than places without one.
    """
    clips = []
    for number, item in enumerate(media_of(example, "audio", where)):
        clip = _decode(item, f"{where}: clip {number}", rate, example.get("sampling_rate"))
        if longest is not None and len(clip) > longest:
            raise LayoutError(
                f"{where}: clip {number} has {len(clip) / rate:.1f} seconds and the model {longest / rate:g}: cut "
                "it into clips"
            )
        clips.append(clip)
    return clips


def _decode(item: Any, what: str, rate: int, beside: Any) -> Clip:
    with naming(f"{what} cannot be decoded", way_out=LEAVE_OUT, with_kind=True):
        samples, its = _samples(item, rate, beside)
        array = np.asarray(samples)
        if array.ndim != 1:
            raise ValueError(f"an array of shape {list(array.shape)}: pass one channel, such as array.mean(axis)")
        if array.dtype.kind != "f":
            raise TypeError(f"an array of {array.dtype}: pass numbers from -1 to 1")
        clip = resampled(array.astype(np.float32), int(its), rate)
        if not len(clip):
            raise ValueError("it has no samples")
        if not np.isfinite(clip).all():
            raise ValueError("it has samples that are not finite")
        return clip


def _samples(item: Any, rate: int, beside: Any) -> tuple[Any, float]:
    """The samples of a clip, and how many there are in a second."""
    if hasattr(item, "get_all_samples"):  # torchcodec's decoder
        decoded = item.get_all_samples()
        return decoded.data.mean(0).numpy(), decoded.sample_rate
    if isinstance(item, Mapping):
        if item.get("array") is not None:
            return _at_rate(item["array"], item.get("sampling_rate"))
        item = item["bytes"] if item.get("bytes") is not None else item["path"]
    item = of_uri(item)
    if isinstance(item, bytes):
        return _of_file(item)
    if isinstance(item, str) and item.startswith(("http://", "https://")):
        return require("transformers.audio_utils", extra="hf").load_audio(item, sampling_rate=rate), rate
    if isinstance(item, str | Path):
        return _of_file(Path(item).read_bytes())
    return _at_rate(item, beside)


def _at_rate(array: Any, rate: Any) -> tuple[Any, float]:
    if not isinstance(rate, int | float | np.integer | np.floating) or not rate > 0:
        raise ValueError(f"an array whose sampling_rate is {rate!r}: pass how many samples a second has")
    return array, float(rate)


def _of_file(content: bytes) -> tuple[NDArray[Any], float]:
    """The samples of a file, the mean of its channels."""
    samples, rate = require("soundfile", extra="audio").read(io.BytesIO(content), dtype="float32", always_2d=True)
    return samples.mean(1), rate


def resampled(clip: Clip, rate: int, wanted: int) -> Clip:
    """A clip [n] at another rate, [n * wanted / rate]."""
    if rate == wanted:
        return clip
    resampled_clip: Clip = require("soxr", extra="audio").resample(clip, rate, wanted)
    return resampled_clip
