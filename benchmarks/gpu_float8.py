"""float8 training: our bfloat16 step against our float8 steps, full fine-tuning of the Llama-3-8B shape.

    python -m benchmarks.gpu_float8 --match 'bfloat16|gw_hp'          # 16 layers, rows of 16,384 tokens: two minutes
    python -m benchmarks.gpu_float8 --budget 240                      # every recipe
    python -m benchmarks.gpu_float8 --layers 8 --memory selective --steps 20
    python -m benchmarks.gpu_float8 --text 200 --data gsm8k_train.jsonl   # losses on real text, and no speed
    python -m benchmarks.gpu_float8 --tiny                            # every contender on the CPU, float8 emulated

Random weights in bfloat16, fused AdamW, ``make_train_step`` with compiled layers and a CUDA graph; every contender
starts from the same weights and trains the same rows, one a step. Documents are of 64 to 4,096 tokens. Tokens per
second count real ones. The loss after the last step may differ from that of bfloat16 by two percent; a contender that
is further off has no figure. The last lines compare each recipe with bfloat16. torchao is needed.

``--text`` trains the SmolLM2-135M shape from random weights on the bytes of GSM8K in that many steps, in bfloat16 from
two seeds and by each recipe from the first, and compares the mean losses of the last tenth.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import DEVICE, TOY, Result, failed, free, highest_gib, seconds_left, synchronize, wanted
from benchmarks.gpu_workload import GSM8K, llama3
from packing_core import pack
from torch_backend import PackedCollator, explain, make_train_step, patch
from torch_backend.hf import float8

ROW, RATE = 256 if TOY else 16_384, "real tokens/s"
BASE = "bfloat16"
CONTENDERS = (BASE, "float8:rowwise_with_gw_hp", "float8:tensorwise", "float8:rowwise")
WARM_UP, OFF = 6, 0.02


@cache
def rows() -> list[dict[str, Any]]:
    """Full rows of documents of log-normal lengths, the same for every contender."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(6, 1, 12 if TOY else 300), *((8, 200) if TOY else (64, 4_096))).astype(int)
    documents = [generator.integers(4, 190 if TOY else 100_000, n) for n in lengths]
    packed, collate = pack(documents, ROW), PackedCollator(capacity=ROW)
    return [collate(packed[row : row + 1]) for row in range(len(packed) - 1)]


def config(layers: int) -> Any:
    shape = llama3(few=False)
    shape.num_hidden_layers, shape.max_position_embeddings = layers, max(8_192, ROW)
    if TOY:
        shape.update({"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2})
        shape.update({"head_dim": 16, "vocab_size": 199, "num_hidden_layers": 2})
    return shape


def train(precision: str, layers: int, memory: str, steps: int) -> tuple[dict[str, float], str]:
    """Returns the figures of a contender, and how its step runs."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config(layers), dtype=torch.bfloat16)
    patch(model.train(), verify=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    named: Any = {} if precision == BASE else {"precision": precision}
    step = make_train_step(model, optimizer, max_grad_norm=1.0, memory=memory, **named)  # type: ignore[arg-type]
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    batches = rows()
    for number in range(2 if TOY else WARM_UP):
        loss = step(batches[number % len(batches)])["loss"]
    synchronize()
    begin, tokens = time.perf_counter(), 0
    for number in range(steps):
        batch = batches[number % len(batches)]
        loss = step(batch)["loss"]
        tokens += int((batch["labels"] != -100).sum()) + sum(map(len, batch["packed_documents"]))
    synchronize()
    seconds = time.perf_counter() - begin
    figures = {RATE: tokens / seconds, "ms per step": seconds / steps * 1e3, "GiB at most": highest_gib()}
    notes = [f"{part} {what}" for part, what in step.parts.items()]
    notes += [note for note in explain(step).notes if "float8" in note]
    return figures | {"last loss": float(loss)}, "; ".join(notes)


def run(layers: int = 16, memory: str = "none", steps: int = 10) -> Iterator[Result]:
    section = f"float8, {'toy' if TOY else f'Llama-3-8B shape, {layers} layers'}, full fine-tuning"
    case, right = f"rows of {ROW:,}, memory={memory}", None
    for contender in CONTENDERS:
        if not wanted(contender) or seconds_left() < 0:
            continue
        try:
            figures, note = train(contender, layers, memory, steps)
        except Exception as failure:
            yield failed(section, case, contender, RATE, failure)
            continue
        finally:
            torch._dynamo.reset()
            free()
        last = figures["last loss"]
        right = last if contender == BASE else right
        if right is not None and not abs(last - right) <= OFF * right:
            yield Result(
                section, case, contender, None, RATE, f"WRONG: loss {last:.4f}, where bfloat16 has {right:.4f}"
            )
            continue
        for unit, value in figures.items():
            yield Result(section, case, contender, value, unit, note)


def run_on_text(data: Path, steps: int) -> Iterator[Result]:
    """Losses of the last tenth of the steps: in bfloat16 from two seeds, and by each recipe from the first."""
    for contender, seed in ((BASE, 0), (BASE, 1), *((recipe, 0) for recipe in CONTENDERS[1:])):
        if wanted(contender):
            losses = on_text(contender, data, steps, seed)
            loss = sum(losses[-(steps // 10) :]) / (steps // 10)
            yield Result(f"{steps} steps on text", f"seed {seed}", contender, loss, "mean loss of the last tenth")


def on_text(precision: str, data: Path, steps: int, seed: int) -> list[float]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with data.open(encoding="utf-8") as lines:
        texts = [f"{r['prompt']}\n{r['completion']}" for r in map(json.loads, lines)]
    order = np.random.default_rng(seed).permutation(len(texts))[: steps * 40]
    documents = [np.frombuffer(texts[i].encode(), np.uint8).astype(np.int64) for i in order]
    row = 2_048 if TOY else 8_192
    packed, collate = pack(documents, row, seed=seed), PackedCollator(capacity=row)
    wide = {"hidden_size": 576, "intermediate_size": 1_536, "num_attention_heads": 9, "num_key_value_heads": 3}
    narrow = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    size = {**narrow, "num_hidden_layers": 4} if TOY else {**wide, "num_hidden_layers": 30}
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**size, vocab_size=256, tie_word_embeddings=True))
    patch(model.float().train(), verify=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    named: Any = {} if precision == BASE else {"precision": precision}
    if not TOY:  # on the CPU torchao does not follow autocast
        named["autocast"] = torch.bfloat16
    step = make_train_step(model, optimizer, max_grad_norm=1.0, **named)
    return [float(step(collate(packed[n % len(packed) : n % len(packed) + 1]))["loss"]) for n in range(steps)]


def verdict(results: Sequence[Result]) -> str:
    """Compares rates and memory of each recipe with those of bfloat16."""
    values = {(r.contender, r.unit): r.value for r in results if r.value}
    lines = []
    for contender in CONTENDERS[1:]:
        ours, base = values.get((contender, RATE)), values.get((BASE, RATE))
        if ours and base:
            memory = values.get((contender, "GiB at most"), 0.0) / (values.get((BASE, "GiB at most")) or 1.0)
            lines.append(f"{contender}: {ours / base:.2f} times the rate of {BASE}, {memory:.2f} times its memory")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--memory", default="none", help="the level of memory, see make_train_step")
    options.add_argument("--steps", type=int, default=2 if TOY else 10, help="timed, after the warm-up")
    options.add_argument("--text", type=int, metavar="STEPS", help="train on text for so many steps instead")
    options.add_argument("--data", type=Path, default=GSM8K, help="a .jsonl file of prompt and completion")
    chosen = parsed(options, arguments)
    float8.EMULATED = TOY
    on = run_on_text(chosen.data, chosen.text) if chosen.text else run(chosen.layers, chosen.memory, chosen.steps)
    figures = survived("float8", on)
    results = collected(figures, chosen.output, "gpu_float8")
    print(verdict(results), flush=True)
    return results


if __name__ == "__main__":
    main()
