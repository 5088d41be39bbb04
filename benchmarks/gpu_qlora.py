"""QLoRA by TRL's SFTTrainer: stock packed rows, enable_packing, and the same step over bfloat16 weights.

    python -m benchmarks.gpu_qlora                     # the Qwen3-14B shape cut to 8 layers, rows of 8,192
    python -m benchmarks.gpu_qlora --layers 40 --gib 24 --match auto   # what fits a card of 24 GiB
    python -m benchmarks.gpu_qlora --tiny              # every contender on the CPU; its times mean nothing

Random weights in NF4 with double quantisation that compute in bfloat16, adapters of rank 16 on all linear layers, with
TRL's default checkpointing and without; documents and rows are those of ``benchmarks.gpu_trainers``. The last lines
compare tokens per second. bitsandbytes, peft and trl are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import TOY, Result, free, wanted
from benchmarks.gpu_trainer_runs import measure, sft
from benchmarks.gpu_workload import DTYPE, Shape, qwen2, with_adapters

ROW, RATE = 256 if TOY else 8_192, "real tokens/s"
STOCK, PACKED = "SFTTrainer(packing=True), stock SDPA", "SFTTrainer(packing=True), enable_packing"
AGAIN, AUTO = ", checkpointing", '(memory="auto")'
CONTENDERS = {
    PACKED + AGAIN: partial(sft, checkpointing=True),
    PACKED: sft,
    PACKED + AUTO: partial(sft, memory="auto"),
    STOCK + AGAIN: partial(sft, packed=False, checkpointing=True),
    STOCK: partial(sft, packed=False),
}


def qwen3_14b(layers: int, few: bool) -> Any:
    """The shape of Qwen3-14B with as many layers."""
    from transformers import Qwen3Config

    if TOY:
        return qwen2(few)
    return Qwen3Config(
        hidden_size=5_120, intermediate_size=17_408, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=layers, vocab_size=151_936, tie_word_embeddings=False, max_position_embeddings=40_960,
    )  # fmt: skip


def in_4_bits(gib: float | None, model: Any) -> Any:
    """Adapters over the model, the linear layers of its decoder quantised one by one.

    Args:
        gib: what the process may allocate from then on; None for all that there is.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent in list(model.get_decoder().modules()):
        for name, old in parent.named_children():
            if type(old) is nn.Linear:
                sizes = old.in_features, old.out_features, old.bias is not None
                new = Linear4bit(*sizes, compute_dtype=DTYPE, quant_type="nf4", device="meta")
                packed = Params4bit(old.weight.data, quant_type="nf4", compress_statistics=True, module=new)
                new.weight, new.bias = packed.to(old.weight.device), old.bias
                setattr(parent, name, new)
    model.is_loaded_in_4bit = True
    free()
    if gib is not None and not TOY:
        _allow(gib)
    return with_adapters(model)


def _allow(gib: float | None) -> None:
    there = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * 2**30 / there))


def run(layers: int, epochs: int, gib: float | None) -> Iterator[Result]:
    make = partial(qwen3_14b, layers)
    name = "toy" if TOY else f"Qwen3-14B, {layers} layers" + (f" in {gib:g} GiB" if gib else "")
    for weights, adapters in (("NF4", partial(in_4_bits, gib)), ("bfloat16", with_adapters)):
        shape = Shape(f"{name}, LoRA, {weights}", make, (ROW,), lora=True, adapters=adapters)
        for contender in CONTENDERS:
            if wanted(contender) and (weights == "NF4" or contender.startswith(PACKED)):
                yield from measure(shape, contender, ROW, epochs, 1, contenders=CONTENDERS)
                torch._dynamo.reset()
                free()
                if not TOY:
                    _allow(None)


def verdict(results: Sequence[Result]) -> str:
    """Compares the rates with checkpointing and without: to stock packed rows, and to bfloat16 weights."""
    rates = {(r.section.rpartition(" ")[2], r.contender): r.value for r in results if r.unit == RATE and r.value}
    lines = []
    for again in (AGAIN, ""):
        ours = rates.get(("NF4", PACKED + again))
        for what, other in (
            ("stock packed rows", rates.get(("NF4", STOCK + again))),
            ("bfloat16 weights", rates.get(("bfloat16", PACKED + again))),
        ):
            if ours and other:
                lines.append(f"{ours / other:.2f} times the rate of {what}{again or ', no checkpointing'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--epochs", type=int, default=1, help="timed, after the warm-up")
    options.add_argument("--gib", type=float, help="memory that training over 4-bit weights may take")
    chosen = parsed(options, arguments)
    results = collected(survived("QLoRA", run(chosen.layers, chosen.epochs, chosen.gib)), chosen.output, "gpu_qlora")
    print(verdict(results), flush=True)
    return results


if __name__ == "__main__":
    main()
