"""Audio on one GPU: the Qwen2-Audio shape on clips of 2 to 30 seconds, packed against padded batches.

    python -m benchmarks.gpu_audio                              # 16 layers of the decoder, the whole encoder
    python -m benchmarks.gpu_audio --layers 8 --budget 180
    python -m benchmarks.gpu_audio --match ours                 # one contender; 'longest', '30 seconds'
    python -m benchmarks.gpu_audio --row 16384                  # ours in longer rows
    python -m benchmarks.gpu_audio --tiny                       # every contender on the CPU, as a toy

Random weights in bfloat16, fused AdamW, all parameters trained. A record is one clip and a question and an answer of 24
to 96 tokens in all; lengths of clips are log-normal about a median of 7 seconds, as those of speech corpora. Ours are
rows of 8,192 tokens by ``make_train_step``; the others are transformers' own model on batches of eight records, padded
to the longest text, whose clips are padded to 30 seconds, as its processor does, or to the longest of the batch, for
which the encoder is given as many position embeddings. Batches of every contender are pinned before, as the thread of a
DataLoader with workers and ``pin_memory=True`` does. Tokens per second count real tokens; every contender runs the
timed batches once before, because cuDNN looks for an algorithm at each new length.

First, on a model of two layers in float32, the loss and all gradients of a packed row are compared with those of each
record alone in transformers' own model; without that nothing has a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.clock import DEVICE, QUICK, TOY, StepClock, header
from benchmarks.harness import NOTE, Figures, measured, parsed, parser
from benchmarks.report import Result, collected, ratios
from benchmarks.workload import RATE, on_device
from torch_backend import PackedCollator, explain, make_train_step, patch
from torch_backend.collate.vision import VisionReader
from torch_backend.hf.anatomy.audio import audio_of

AUDIO, TEXT = 95, (4, 90) if TOY else (4, 150_000)  # the token of clips, tokens of text
BINS, PADDED = 8 if TOY else 128, 8
ROW = 256 if TOY else 8_192
PER_SECOND, LONGEST = (4, 30) if TOY else (100, 30)  # frames a second, seconds
LIMIT = 1e-3  # of float32 sums in another order, by kernels whose products may be TF32
OURS = "ours"
PADDED_TO = ("padded to the longest", "padded to 30 seconds")


def config(layers: int, encoder_layers: int, *, toy: bool = TOY) -> Any:
    from transformers import AutoConfig

    width, heads, wide, vocabulary = (64, 4, 96, 99) if toy else (4_096, 32, 11_008, 156_032)
    text = {
        "model_type": "qwen2", "hidden_size": width, "intermediate_size": wide, "num_attention_heads": heads,
        "num_key_value_heads": heads, "num_hidden_layers": layers, "vocab_size": vocabulary,
    }  # fmt: skip
    width, heads, wide = (32, 2, 64) if toy else (1_280, 20, 5_120)
    audio = {
        "model_type": "qwen2_audio_encoder", "d_model": width, "encoder_attention_heads": heads,
        "encoder_ffn_dim": wide, "encoder_layers": encoder_layers, "num_mel_bins": BINS,
        "max_source_positions": LONGEST * PER_SECOND // 2,
    }  # fmt: skip
    tokens = {"audio_token_id": AUDIO, "audio_token_index": AUDIO}
    return AutoConfig.for_model("qwen2_audio", text_config=text, audio_config=audio, **tokens)


def make_model(layers: int, encoder_layers: int, dtype: torch.dtype) -> Any:
    from transformers import Qwen2AudioForConditionalGeneration

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Qwen2AudioForConditionalGeneration._from_config(config(layers, encoder_layers), dtype=dtype)
    return model.train()


@cache
def records() -> list[dict[str, Any]]:
    """Records as the family's processor gives them: tokens, features padded to 30 seconds, and their mask."""
    draw, audio = np.random.default_rng(0), audio_of(config(1, 1))
    assert audio is not None and audio.mask is not None
    recorded, noise = [], torch.Generator().manual_seed(0)
    for _ in range(24 if TOY else 40 if QUICK else 600):  # so many that rows are as full as those of a data set
        frames = int(np.clip(draw.lognormal(np.log(7), 0.7), 2, LONGEST) * PER_SECOND)
        text = draw.integers(*TEXT, draw.integers(8, 16) if TOY else draw.integers(24, 97))
        text[text == AUDIO] = AUDIO + 1 if not TOY else AUDIO - 10
        ids = np.concatenate([text[:4], np.full(audio.tokens(frames), AUDIO), text[4:]])
        width = LONGEST * PER_SECOND
        features = nn.functional.pad(torch.randn(1, BINS, frames, generator=noise), (0, width - frames))
        mask = (torch.arange(width) < frames)[None].long()
        recorded.append({"input_ids": ids.tolist(), "input_features": features, audio.mask: mask})
    return recorded


def packed_batches(model: Any, examples: list[dict[str, Any]], row: int, count: int) -> list[dict[str, Any]]:
    """Rows as full as those of a whole data set, one to a batch."""
    collate = PackedCollator(model, row)
    collate.vision = reader = VisionReader(model)
    rows = reader.rows(examples, collate.pack, row, "error")
    starts = np.searchsorted(rows.batch.rows, range(len(rows.batch) + 1))
    parts = [type(rows)(rows.batch[n : n + 1], rows.images[a:b]) for n, (a, b) in enumerate(pairwise(starts))]
    return [collate([part]) for part in parts[: max(1, min(count, len(parts) - 1))]]  # the last one may be half empty


def padded_batches(examples: list[dict[str, Any]], size: int, *, longest: bool) -> list[dict[str, Tensor]]:
    """Batches for transformers' own model, in the order of the records."""
    batches = []
    for start in range(0, len(examples) - size + 1, size):
        some = examples[start : start + size]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(x["input_ids"]) for x in some], True, -1)
        mask = torch.cat([x["feature_attention_mask"] for x in some])
        last = int(mask.sum(-1).max()) + 3 & ~1 if longest else mask.shape[-1]
        batches.append({
            "input_ids": ids.clamp(min=0),
            "attention_mask": (ids >= 0).long(),
            "labels": ids.masked_fill((ids == AUDIO) | (ids < 0), -100),
            "input_features": torch.cat([x["input_features"] for x in some])[..., :last],
            "feature_attention_mask": mask[:, :last],
        })  # fmt: skip
    return batches


class Shortened(nn.Module):
    """The position embeddings of an encoder, as many as its features of the present batch ask for."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.whole, self.count = embedding, embedding.num_embeddings

    @property
    def weight(self) -> Tensor:
        return self.whole.weight[: self.count]


def shorten(model: Any) -> None:
    """Make transformers' encoder take features that are shorter than 30 seconds."""
    tower = model.model.audio_tower
    tower.embed_positions = Shortened(tower.embed_positions)

    def to_length(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tower.embed_positions.count = tower.config.max_source_positions = (args[0].shape[-1] + 1) // 2

    tower.register_forward_pre_hook(to_length, with_kwargs=True)


# -- the check ---------------------------------------------------------------------------------------------------------


def error() -> float:
    """The largest relative error of the loss and of a gradient of a packed row, against each record alone."""
    model, examples = make_model(1, 2, torch.float32), records()[:6]
    alone = [on_device(batch) for batch in padded_batches(examples, 1, longest=False)]
    right = _update(model, alone)
    patch(model, verify=False)
    ours = _update(model, [on_device(packed_batches(model, examples, ROW, 1)[0])])
    parts = {name: "loss" if name == "loss" else "audio" if "audio" in name else "text" for name in right}
    largest = {
        part: max(float(x.norm()) for name, x in right.items() if parts[name] == part) for part in parts.values()
    }
    return max(float((ours[name] - x).norm()) / largest[parts[name]] for name, x in right.items())


def _update(model: Any, batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    model.zero_grad()
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = torch.zeros((), device=DEVICE)
    for batch in batches:
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits[:, :-1].float()
        target = batch["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / count
        loss.backward()
        total += loss.detach()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total, **gradients}


# -- the step ----------------------------------------------------------------------------------------------------------


def train(contender: str, layers: int, encoder_layers: int, row: int, steps: int) -> Figures:
    """Returns the figures of a contender, and how its step runs."""
    torch._dynamo.reset()
    model, ours = make_model(layers, encoder_layers, torch.bfloat16), contender == OURS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if ours:
        patch(model, verify=False)
        step: Any = make_train_step(model, optimizer, max_grad_norm=1.0)
        batches = packed_batches(model, records(), row, steps)
    else:
        batches = padded_batches(records(), PADDED, longest="longest" in contender)
        if "longest" in contender:
            shorten(model)

        def stock(batch: dict[str, Any]) -> Any:
            loss = model(**on_device(batch)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": loss}

        step = stock
    data: Any = batches
    batches = list(DataLoader(data, batch_size=None, pin_memory=not TOY))
    clock = StepClock(steps, steps)  # the timed batches first, so that cuDNN and the allocator know their shapes
    sums = clock.loop(step, (batches[number % steps % len(batches)] for number in range(2 * steps)))
    timed = [batches[number % len(batches)] for number in range(steps)]
    tokens = sum(_real_tokens(batch) for batch in timed)
    how = [f"{part} {what}" for part, what in step.parts.items()] if ours else []
    how += [line for line in explain(step).notes if "audio" in line] if ours else []
    return {
        RATE: tokens / clock.seconds,
        "clips/s": sum(len(batch["input_features"]) for batch in timed) / clock.seconds,
        "% full": 100 * tokens / sum(batch["labels"].numel() for batch in timed),
        "ms per step": clock.ms,
        "GiB at most": clock.peak,
        "last loss": float(sums["loss"].detach()),
        NOTE: "; ".join(how),
    }


def _real_tokens(batch: dict[str, Any]) -> int:
    """Tokens of the documents of a batch."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return sum(batch["packed_lengths"][number] for document in batch["packed_documents"] for number in document)


def run(layers: int, encoder_layers: int, row: int, steps: int) -> Iterator[Result]:
    section = f"audio, {'toy' if TOY else f'Qwen2-Audio shape, {layers} layers'}, full fine-tuning"
    check = cache(error)  # of the packed row, once
    for contender in (OURS, *PADDED_TO):
        measure = partial(train, contender, layers, encoder_layers, row, steps)
        yield from measured(section, "clips of 2 to 30 seconds", contender, RATE, measure, check, LIMIT)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=2 if TOY else 16, help="of the decoder")
    options.add_argument("--encoder-layers", type=int, default=2 if TOY else 32)
    options.add_argument("--row", type=int, default=ROW, help="tokens of a packed row")
    options.add_argument("--steps", type=int, default=2 if TOY else 8, help="timed, after the warm-up")
    chosen = parsed(options, arguments)
    figures = run(chosen.layers, chosen.encoder_layers, chosen.row, chosen.steps)
    results = collected(figures, header(), chosen.output, "gpu_audio")
    print(ratios(results, RATE, [(OURS, name) for name in PADDED_TO]))
    return results


if __name__ == "__main__":
    main()
