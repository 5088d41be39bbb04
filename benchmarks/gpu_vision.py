"""Images in packed rows: updates of a vision-language model against padded batches of 8, and the rate of the data.

    python -m benchmarks.gpu_vision                      # Qwen2.5-VL-3B shape, random weights, bfloat16
    python -m benchmarks.gpu_vision --layers 12          # so many layers of the decoder and of the tower
    python -m benchmarks.gpu_vision --case OCR --match "^packed"
    python -m benchmarks.gpu_vision --budget 500         # begin no contender after so many seconds
    python -m benchmarks.gpu_vision --case OCR --match "^packed$" --profile     # where the time of an update goes
    python -m benchmarks.gpu_vision --tiny               # everything on the CPU; its times mean nothing

An update takes the same documents for every contender: forward, backward and fused AdamW over all weights, those of the
tower too. A document is one image and a text behind it; tokens count both. There are as many as fill the rows of a case
to 98%, as rows of a large data set are. Padded contenders run transformers' model as it is, with sdpa, in batches of 8
as the documents come, or sorted by length, padded to the longest of 8; images are not padded. The best stock packed
path is transformers' own: rows without a mask, whose positions restart, as the first of four axes, by which it masks
other documents. It runs on flash-attention where that is installed, else on sdpa; whether a document moves another is
printed. Packed ones run rows of ``--capacity``
tokens through ``make_train_step``, and are measured first, the one without compiled layers before the other. The first
update, which compiles, is timed by itself; ``--stacks 20`` prints where it is every 20 seconds. The losses of the first
update are compared. Batches are made before they are timed;
the last section times what makes them: decoding 512 x 512 JPEGs, the family's own image processor, and packing.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import io
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.gpu import as_table, header, in_one_line, survived, write
from benchmarks.gpu_clock import DEVICE, TOY, Result, free, seconds_left, set_budget, set_match, synchronize, wanted
from benchmarks.gpu_profile import Profile
from benchmarks.gpu_workload import DTYPE
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.collate.vision import VisionReader, rows_of

SECTION = "images" if not TOY else "images, toy"
IMAGE, PATCH, MERGE = (91, 4, 2) if TOY else (151_655, 14, 2)
WORDS = 90 if TOY else 100_000
CAPACITY = 256 if TOY else 8_192
LOSS_TOLERANCE = 1e-4 if TOY else 2e-2
PADDED, SORTED, PACKED, PLAIN = "padded", "padded, sorted by length", "packed", "packed, layers as they are"
STOCK = "stock, packed"
CONTENDERS = (PLAIN, PACKED, STOCK, PADDED, SORTED)  # in the order in which they are measured
Example = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Documents of an update.

    Attributes:
        image, text: median tokens of an image and of a text, both lognormal.
        spread: the standard deviation of their logarithms.
        rows: of the usual capacity that the documents of an update fill.
    """

    name: str
    image: int
    text: int
    spread: float
    rows: int


CASES = (
    Case("OCR", image=64, text=32, spread=1.0, rows=4),
    Case("mixed resolutions", image=400, text=64, spread=0.7, rows=4),
)


def config(layers: int) -> Any:
    """The config of Qwen2.5-VL-3B with at most so many layers in the decoder and in the tower."""
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {"vocab_size": 151_936, "hidden_size": 2_048, "intermediate_size": 11_008, "num_hidden_layers": layers}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
    vision = {"depth": layers, "hidden_size": 1_280, "num_heads": 16, "intermediate_size": 3_420, "patch_size": PATCH}
    vision |= {"out_hidden_size": 2_048, "window_size": 112, "fullatt_block_indexes": [*range(7, layers, 8)]}
    if TOY:
        rope["mrope_section"] = [2, 3, 3]
        text |= {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4}
        vision |= {"hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    tokens = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1, "tie_word_embeddings": True}
    return Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **tokens)


def model_of(layers: int, attention: str = "sdpa") -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration as Model

    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Model._from_config(config(layers), dtype=DTYPE, attn_implementation=attention).train()


def stock_attention() -> str:
    """The fastest attention of transformers that is installed."""
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if is_flash_attn_2_available() else "sdpa"


def documents(case: Case) -> list[Example]:
    """Processed examples, as the family's processor makes them: text is trained, images are not."""
    generator, torch_generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    shrink = 16 if TOY else 1

    def drawn(median: int) -> int:
        return int(np.clip(generator.lognormal(np.log(median), case.spread), 4, 16 * median)) // shrink

    found: list[Example] = []
    while (tokens := sum(len(x["input_ids"]) for x in found)) < 0.95 * case.rows * CAPACITY:
        side = max(1, round(drawn(case.image) ** 0.5))
        grid = torch.tensor([[1, side * MERGE, side * MERGE]])
        before, after = (torch.from_numpy(generator.integers(4, WORDS, n)) for n in (3, max(2, drawn(case.text))))
        ids = torch.cat([before, torch.full((side**2,), IMAGE), after])
        if tokens + len(ids) > 0.98 * case.rows * CAPACITY:
            continue
        pixels = torch.randn(int(grid.prod()), 3 * 2 * PATCH**2, generator=torch_generator)
        found.append({"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid})
    return found


def padded_batches(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Batches of 8 as a collator of transformers makes them, padded at the right."""
    batches = []
    for first in range(0, len(examples), 8):
        several = examples[first : first + 8]
        longest = max(len(x["input_ids"]) for x in several)
        ids = torch.stack([F.pad(x["input_ids"], (0, longest - len(x["input_ids"]))) for x in several])
        mask = torch.stack([(torch.arange(longest) < len(x["input_ids"])).long() for x in several])
        batches.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "mm_token_type_ids": (ids == IMAGE).int(),
                "labels": ids.masked_fill((ids == IMAGE) | (mask == 0), -100),
                "pixel_values": torch.cat([x["pixel_values"] for x in several]),
                "image_grid_thw": torch.cat([x["image_grid_thw"] for x in several]),
            }
        )
    return batches


def stock_rows(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our packed rows as transformers' models take them without us."""
    taken = ("input_ids", "labels", "pixel_values", "image_grid_thw")
    return [
        {name: batch[name] for name in taken}
        | {"position_ids": torch.cat([places(batch), batch["position_ids"]]), "use_cache": False}
        for batch in batches
    ]


def places(batch: dict[str, Any]) -> torch.Tensor:
    """int64 [1, 1, S]: the place of each token in its document, from 0."""
    return torch.cat([torch.arange(n) for n in batch["packed_lengths"]])[None, None]


@torch.no_grad()
def moved(model: Any, batch: dict[str, Any], first: int) -> float:
    """Returns how far other documents move, relative to the largest state, when the text of the first one changes."""
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    changed = given["input_ids"].clone()
    changed[:, :first] = torch.where(changed[:, :first] == IMAGE, IMAGE, 5)
    states = [model.model(**{**given, "labels": None, "input_ids": ids})[0] for ids in (given["input_ids"], changed)]
    one, other = (x[:, first:].float() for x in states)
    return float((one - other).abs().max() / one.abs().max())


def padded_update(model: Any, optimizer: Any, batches: Sequence[dict[str, Any]]) -> float:
    """An update of all batches; the loss is the mean over their targets."""
    optimizer.zero_grad()
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    loss = torch.zeros((), device=DEVICE)
    for batch in batches:
        count = int((batch["labels"][:, 1:] != -100).sum())
        given = {
            name: x.to(DEVICE, non_blocking=True) if isinstance(x, torch.Tensor) else x for name, x in batch.items()
        }
        part = model(**given).loss * (count / total)
        part.backward()
        loss += part.detach()
    optimizer.step()
    return float(loss)


def collator(model: Any, capacity: int, collate: Any = None) -> PackedCollator:
    found = PackedCollator(model, capacity, max_seqlen=capacity, bucket=64)
    found.vision, found.pad_id = VisionReader(model, collate=collate), 0
    return found


def measure(
    name: str, case: Case, layers: int, capacity: int, updates: int, *, profile: bool = False
) -> Iterator[Result]:
    """Times the updates of one contender after the first two; with ``profile`` prints where the time of one goes."""
    model = model_of(layers, stock_attention() if name == STOCK else "sdpa")
    examples = documents(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not TOY)
    tokens = sum(len(x["input_ids"]) for x in examples)
    step = None
    if name in (PADDED, SORTED):
        order = sorted(examples, key=lambda x: len(x["input_ids"])) if name == SORTED else examples
        batches = padded_batches(order)
    elif name == STOCK:
        packed = packed_rows(patch(model_of(min(layers, 2)), verify=False), examples, capacity)
        batches = stock_rows(packed)
        leak = moved(model, batches[0], packed[0]["packed_lengths"][0])
        print(f"{name}, {stock_attention()}: changing one document moves the others by {leak:.1e}", flush=True)
    else:
        patch(model, verify=False)
        batches = packed_rows(model, examples, capacity)
        step = make_train_step(model, optimizer, compile="auto" if name == PACKED else False)
    computed = sum(batch["input_ids"].numel() for batch in batches)

    def update() -> float:
        return padded_update(model, optimizer, batches) if step is None else float(step(batches)["loss"])

    begin = time.perf_counter()
    first = update()
    synchronize()
    compiling = time.perf_counter() - begin
    print(f"{case.name}, {name}: the first update took {compiling:.1f} s", flush=True)
    update()
    free()
    if profile:
        seen = Profile()
        seen.start()
        update()
        seen.stop()
        print(seen.report(steps=1), flush=True)
    before = 0 if TOY else torch.cuda.memory_allocated()
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(updates):
        synchronize()
        begin = time.perf_counter()
        update()
        synchronize()
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    parts = "" if step is None else f"layers {step.parts['layers']}; loss {step.parts['loss']}"
    yield Result(SECTION, case.name, name, tokens / seconds, "tokens/s", parts)
    yield Result(SECTION, case.name, name, len(examples) / seconds, "images/s")
    yield Result(SECTION, case.name, name, 100 * tokens / computed, "% full")
    if not TOY:
        yield Result(SECTION, case.name, name, (torch.cuda.max_memory_allocated() - before) / 2**30, "GiB")
    yield Result(SECTION, case.name, name, first, "first loss")
    yield Result(SECTION, case.name, name, compiling, "s, first update")


def packed_rows(model: Any, examples: Sequence[Example], capacity: int) -> list[dict[str, Any]]:
    """The rows of all examples, a batch each."""
    collate = collator(model, capacity)
    assert collate.vision is not None
    documents = [collate.vision.read(example, "an example") for example in examples]
    packed = collate.pack([document.columns for document in documents])
    return [collate(rows_of(row, documents.__getitem__)) for row in packed.single_rows()]


def verdict(case: str, results: list[Result]) -> list[str]:
    """Lines on whether all losses agree, and how often packed is as fast as padded."""
    figures = {(r.contender, r.unit): r.value for r in results if r.case == case and r.value is not None}
    losses = {name: value for (name, unit), value in figures.items() if unit == "first loss"}
    lines = []
    if losses:
        apart = (max(losses.values()) - min(losses.values())) / max(losses.values())
        lines.append(f"{case}: losses {'agree' if apart <= LOSS_TOLERANCE else 'DIFFER'}, by {apart:.1e}")
    packed = figures.get((PACKED, "tokens/s"))
    others = {name: figures.get((name, "tokens/s")) for name in (STOCK, PADDED, SORTED, PLAIN)}
    return lines + [f"{case}: packed is {packed / x:.2f} times {name}" for name, x in others.items() if packed and x]


# -- the rate of the data ----------------------------------------------------------------------------------------------


class Decoded:
    """A collator as users of ``Trainer`` write it: one JPEG through the family's image processor, and a text."""

    def __init__(self) -> None:
        import transformers

        sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
        most = {"min_pixels": 64, "max_pixels": 1_024} if TOY else {}
        self.images = transformers.Qwen2VLImageProcessor(**sizes, **most)

    def __call__(self, examples: Sequence[Example]) -> Example:
        from PIL import Image

        (example,) = examples
        picture = Image.open(io.BytesIO(example["jpeg"])).convert("RGB")
        found = dict(self.images(images=[picture], return_tensors="pt"))
        shown = int(found["image_grid_thw"].prod()) // MERGE**2
        ids = torch.cat([torch.arange(4, 7), torch.full((shown,), IMAGE), torch.arange(4, 36)])[None]
        return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), **found}


def measure_loading(layers: int, capacity: int, workers: int, count: int) -> Iterator[Result]:
    """Images per second that a loader decodes, processes and packs."""
    from PIL import Image

    (side, known), random = (32, 8) if TOY else (512, 64), np.random.default_rng(0)
    jpegs = []
    for _ in range(known):
        stream = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (side, side, 3), np.uint8)).save(stream, "JPEG", quality=90)
        jpegs.append(stream.getvalue())
    with torch.device("meta"):
        from transformers import Qwen2_5_VLForConditionalGeneration as Model

        model = Model(config(min(layers, 2)))
    loader = DataLoader(
        [{"jpeg": jpegs[i % known]} for i in range(count)],
        batch_size=16,
        num_workers=workers,
        collate_fn=collator(model, capacity, Decoded()),
    )
    batches = iter(loader)
    next(batches)  # the workers have started
    begin, images = time.perf_counter(), 0
    for batch in batches:
        images += len(batch["image_grid_thw"])
    rate = images / (time.perf_counter() - begin)
    yield Result(SECTION, f"data, {side} x {side} JPEGs", f"{workers} workers", rate, "images/s")


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2 if TOY else 32)
    parser.add_argument("--capacity", type=int, default=CAPACITY)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--match", default="", help="contenders whose name this regular expression matches")
    parser.add_argument("--updates", type=int, default=1 if TOY else 3)
    parser.add_argument("--images", type=int, default=48 if TOY else 1_024, help="of the rate of the data")
    parser.add_argument("--no-data", action="store_true", help="leave the rate of the data out")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one update, and waits of the host")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--stacks", type=float, help="print the stacks of all threads every so many seconds")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    chosen = parser.parse_args(arguments)
    set_match(chosen.match)
    set_budget(chosen.budget)
    if chosen.stacks:
        faulthandler.dump_traceback_later(chosen.stacks, repeat=True)
    about, results = header(), []
    print(about, flush=True)

    def add(name: str, found: list[Result]) -> None:
        results.extend(found)
        print(f"{name}: {in_one_line(found)}", flush=True)
        if chosen.output:
            write(chosen.output, about, results, "gpu_vision")
        gc.collect()
        free()

    for case in CASES:
        if chosen.case and case.name not in chosen.case:
            continue
        for name in CONTENDERS:
            if wanted(name) and seconds_left() >= 0:
                options = {"profile": chosen.profile}
                found = measure(name, case, chosen.layers, chosen.capacity, chosen.updates, **options)
                add(f"{case.name}, {name}", list(survived(name, found)))
        print("\n".join(verdict(case.name, results)), flush=True)
    for workers in () if chosen.no_data else (0, 2) if TOY else (0, 8):
        if seconds_left() >= 0:
            count = chosen.images if workers else max(32, chosen.images // 8)
            found = measure_loading(chosen.layers, chosen.capacity, workers, count)
            add(f"data, {workers} workers", list(survived("data", found)))
    faulthandler.cancel_dump_traceback_later()
    print(f"\n{as_table(results)}")
    return results


if __name__ == "__main__":
    main()
