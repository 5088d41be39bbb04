"""QLoRA by TRL's SFTTrainer: stock packed rows, enable_packing, and the same step over bfloat16 weights.

    python -m benchmarks.gpu_qlora                     # the Qwen3-14B shape cut to 8 layers, rows of 8,192
    python -m benchmarks.gpu_qlora --layers 40 --gib 24 --match auto   # what fits a card of 24 GiB
    python -m benchmarks.gpu_qlora --shape Llama-3-8B --layers 32 --gib 24 --match auto
    python -m benchmarks.gpu_qlora --shape Qwen3-0.6B --layers 28   # and Llama-3.2-1B --layers 16
    python -m benchmarks.gpu_qlora --shape gpt-oss-20b --layers 24 --match ', checkpointing'   # experts in MXFP4
    python -m benchmarks.gpu_qlora --shape 'gpt-oss-20b, attention' --layers 24 --rows 2048 --gib 16 --match auto
    python -m benchmarks.gpu_qlora --tiny              # every contender on the CPU; its times mean nothing

Random weights in NF4 with double quantisation that compute in bfloat16, adapters of rank 16 on all linear layers, with
TRL's default checkpointing and without; documents and rows are those of ``benchmarks.gpu_trainers``. Of gpt-oss-20b the
experts are in MXFP4, which stock trainers do not train, and adapters are on attention and experts. Two contenders run
the linear layers with adapters by Unsloth's kernels, over SDPA and over packed attention. The last lines compare tokens
per second. peft and trl are needed, bitsandbytes for NF4, and unsloth for its kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from benchmarks.clock import DTYPE, TOY, header, reset_peak
from benchmarks.gpu_moe_step import adapted_model
from benchmarks.gpu_trainers import SFT, TRAINER, Run, measure, sft, trainer
from benchmarks.harness import free, parsed, parser
from benchmarks.report import Result, collected, ratios
from benchmarks.shapes import config
from benchmarks.workload import RATE, Shape, with_adapters
from torch_backend.hf.anatomy.layers import find_experts
from torch_backend.ops.mxfp4 import GROUP, Mxfp4Weight

ROW = 256 if TOY else 8_192
STOCK = "SFTTrainer(packing=True), stock SDPA"
STACKED = ("gate_up_proj", "down_proj")  # of experts
AGAIN, AUTO, UNSLOTH = ", checkpointing", '(memory="auto")', ", Unsloth's fast_lora"


def by_unsloth(run: Run, model: Any, **options: Any) -> None:
    """Train with Unsloth's kernels in the attention and the MLP of every layer of a model under PEFT."""
    kernels = fast_lora()
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.register_forward_pre_hook(partial(project, kernels.apply_lora_qkv), with_kwargs=True)
        attention.o_proj.forward = partial(kernels.apply_lora_o, attention)
        mlp.forward = MethodType(kernels.apply_lora_mlp_swiglu, mlp)
    sft(run, model, **options)


def project(apply: Any, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compute queries, keys and values at once; the three layers return them."""
    hidden = args[0] if args else kwargs["hidden_states"]
    for name, projected in zip(("q_proj", "k_proj", "v_proj"), apply(attention, hidden), strict=True):
        getattr(attention, name).forward = lambda _, kept=[projected]: kept.pop()  # without holding its graph


def fast_lora() -> Any:
    """Unsloth's module of linear layers with adapters, without its package, which changes transformers and TRL."""
    spec = importlib.util.find_spec("unsloth")
    if spec is None:
        raise ImportError("unsloth is not installed")
    os.environ["UNSLOTH_IS_PRESENT"] = "1"
    sys.modules.setdefault("unsloth", importlib.util.module_from_spec(spec))
    return importlib.import_module("unsloth.kernels.fast_lora")


CONTENDERS = {
    SFT + AGAIN: partial(sft, checkpointing=True),
    SFT: sft,
    SFT + AUTO: partial(sft, memory="auto"),
    STOCK + AGAIN: partial(sft, packed=False, checkpointing=True),
    STOCK: partial(sft, packed=False),
    STOCK + UNSLOTH + AGAIN: partial(by_unsloth, packed=False, checkpointing=True),
    SFT + UNSLOTH + AGAIN: partial(by_unsloth, fast=False, checkpointing=True),
    SFT + UNSLOTH: partial(by_unsloth, fast=False),
}
ON_EXPERTS = {  # TRL would add the router's loss
    TRAINER + AGAIN: partial(trainer, memory="full"),
    TRAINER: trainer,
    TRAINER + AUTO: partial(trainer, memory="auto"),
}


def in_nf4(model: Any) -> None:
    """Quantises the linear layers of a decoder one by one."""
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


def in_mxfp4(model: Any) -> None:
    """Puts random blocks and scales in place of the weights of experts, as a published checkpoint is loaded."""
    options = {"dtype": torch.uint8, "device": model.device}
    weights = {(m, name): getattr(m, name).shape for m in find_experts(model).values() for name in STACKED}
    for module, name in weights:
        setattr(module, name, None)
    free()  # before blocks are made, which would lie between values
    for (module, name), (count, width, outer) in weights.items():
        blocks = torch.randint(256, (count, outer, width // 2), **options)
        scales = torch.randint(118, 123, (count, outer, width // GROUP), **options)
        setattr(module, name, nn.Parameter(Mxfp4Weight(blocks, scales, model.dtype), requires_grad=False))


@dataclass(frozen=True)
class Workload:
    """A shape, and the weights in fewer bits that stand beside bfloat16.

    Attributes:
        bits: the name of these weights; quantise: makes them of a model, in place.
        adapters: model -> the model under PEFT.
    """

    shape: str
    bits: str = "NF4"
    quantise: Callable[[Any], None] = in_nf4
    adapters: Callable[[Any], Any] = with_adapters
    contenders: Mapping[str, Any] = field(default_factory=lambda: CONTENDERS)
    attention: str = "sdpa"


# as published, all layers are 40, 32, 16, 28 and 24
WORKLOADS = {name: Workload(name) for name in ("Qwen3-14B", "Llama-3-8B", "Llama-3.2-1B", "Qwen3-0.6B")}
ROUTED = Workload("gpt-oss-20b", "MXFP4", in_mxfp4, adapted_model, ON_EXPERTS, "eager")
WORKLOADS |= {"gpt-oss-20b": ROUTED, "gpt-oss-20b, attention": replace(ROUTED, adapters=with_adapters)}


def in_4_bits(workload: Workload, gib: float | None, model: Any) -> Any:
    """Adapters over the model in 4 bits.

    Args:
        gib: what the process may allocate from then on; None for all that there is.
    """
    workload.quantise(model)
    free()
    if not TOY:  # a checkpoint is loaded without the values of all weights
        reset_peak()
        _allow(gib)
    return workload.adapters(model)


def _allow(gib: float | None) -> None:
    there = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * 2**30 / there))


def run(chosen: str, layers: int, rows: int, epochs: int, gib: float | None) -> Iterator[Result]:
    workload = WORKLOADS[chosen]
    make = partial(config, workload.shape, layers=layers)
    name = "toy" if TOY else f"{chosen}, {layers} layers" + (f" in {gib:g} GiB" if gib else "")
    for weights, adapters in ((workload.bits, partial(in_4_bits, workload, gib)), ("bfloat16", workload.adapters)):
        shape = Shape(
            f"{name}, LoRA, {weights}", make, (rows,), lora=True, attention=workload.attention, adapters=adapters
        )
        for contender in workload.contenders:
            if weights == workload.bits or not (contender.startswith(STOCK) or UNSLOTH in contender):
                yield from measure(shape, contender, rows, epochs, 1, contenders=workload.contenders)
                if not TOY:
                    _allow(None)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--shape", choices=WORKLOADS, default="Qwen3-14B")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--rows", type=int, default=ROW, help="tokens of a row")
    options.add_argument("--epochs", type=int, default=1, help="timed, after the warm-up")
    options.add_argument("--gib", type=float, help="memory that training over 4-bit weights may take")
    chosen = parsed(options, arguments)
    figures = run(chosen.shape, chosen.layers, chosen.rows, chosen.epochs, chosen.gib)
    results = collected(figures, header(), chosen.output, "gpu_qlora")
    bits = WORKLOADS[chosen.shape].bits
    names = WORKLOADS[chosen.shape].contenders
    ours = [name for name in names if not name.startswith(STOCK) and UNSLOTH not in name]
    others = [(name, name.replace(UNSLOTH, "").replace(STOCK, SFT)) for name in names if name not in ours]
    pairs = [((bits, name), (bits, other)) for other, name in others]
    pairs += [((bits, name), ("bfloat16", name)) for name in ours]
    print(ratios(results, RATE, pairs, lambda r: (r.section.rpartition(" ")[2], r.contender)))
    return results


if __name__ == "__main__":
    main()
