"""Rotary embedding: q and k forward and backward beside the copy floor, transformers, Liger and Unsloth.

The floor is the time to read and write every byte once at the measured copy bandwidth. Liger's kernel and Unsloth's are
those of their PyPI packages; of Unsloth only the kernel's own file is loaded, because importing the package patches
transformers. Liger's kernel and Unsloth's (on contiguous inputs) write in place, so a copy stands before every call in
their correctness check and none in the measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_clock import (
    DEVICE,
    QUICK,
    TOY,
    Result,
    copy_bandwidth,
    gated,
    graph_ms,
    relative_error,
    wall_ms,
    wanted,
)
from torch_backend.ops.rope import apply_rope

HEADS, KV_HEADS, WIDTH = (4, 2, 16) if TOY else (32, 8, 128)
TABLE = (64,) if TOY else (8_192,) if QUICK else (2_048, 8_192, 32_768)
# q, k [B, H, S, D] over memory [B, S, H, D], full-width cos and sin [B, S, D], as transformers holds them
Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def run() -> Iterator[Result]:
    for name in CONTENDERS:
        for tokens in TABLE:
            yield from _table(tokens, name)


def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    return apply_rope(q, k, cos[..., :half], sin[..., :half], heads_first=True)


def transformers_eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, cos, sin)


def liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


def unsloth(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _unsloth().Fast_RoPE_Embedding_QK.apply(q, k, cos[0], sin[0], None)


def copy(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Copies as many bytes of q and k and rotates nothing: how near the floor a copy of this size comes."""
    return q.clone(), k.clone()


# what takes long to compile comes last
CONTENDERS: dict[str, Rotation] = {
    "ours": ours,
    "plain copy": copy,
    "liger": liger,
    "unsloth": unsloth,
    "transformers eager": transformers_eager,
    "transformers, torch.compile": torch.compile(transformers_eager),
}
IN_TOY = ("ours", "plain copy", "transformers eager")


def _table(tokens: int, name: str) -> Iterator[Result]:
    if (TOY and name not in IN_TOY) or not wanted(name):
        return
    case, rotation = f"{tokens:,} tokens", CONTENDERS[name]
    inputs = _inputs(tokens, packed=True)
    floor = _floor_ms(inputs)
    q, k, cos, sin = inputs

    def both(leaves: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(rotation(*leaves, cos, sin), leaves, gradients)

    def measure() -> dict[str, float]:
        scratch = q.clone(), k.clone()
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        gradients = [torch.randn_like(x) for x in (q, k)]
        forward = graph_ms(lambda: rotation(*scratch, cos, sin))
        return {
            "forward": forward,
            "backward": graph_ms(lambda: both(leaves, gradients)) - forward,
            "us, eager call": wall_ms(lambda: rotation(*scratch, cos, sin)),
            "us, eager call and backward": wall_ms(lambda: both(leaves, gradients)),
        }

    def check() -> float:
        return 0.0 if rotation is copy else _error(rotation, tokens)

    figures, note = gated(check, 1e-2, measure)
    if name == "plain copy":
        figures = {kind: ms for kind, ms in figures.items() if "backward" not in kind}
        note = f"the floor is {floor * 1e3:.1f} us"
    if not figures:
        yield Result("rope", case, name, None, "of the floor, forward", note)
    for kind, ms in figures.items():
        eager = kind.startswith("us")
        unit = kind if eager else f"of the floor, {kind}"
        yield Result("rope", case, name, ms * 1e3 if eager else ms / floor, unit, note)


def _inputs(tokens: int, packed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def drawn(heads: int) -> Tensor:
        x = torch.randn(1, tokens, heads, WIDTH, device=DEVICE, generator=generator)
        return x.to(torch.float32 if TOY else torch.bfloat16).transpose(1, 2)

    positions = torch.arange(tokens, device=DEVICE) % (min(tokens, 260) if packed else tokens)
    frequencies = 10_000 ** (-torch.arange(0, WIDTH, 2, device=DEVICE) / WIDTH)
    angles = torch.cat([positions[:, None] * frequencies] * 2, -1)[None]
    q, k = drawn(HEADS), drawn(KV_HEADS)
    return q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype)


def _floor_ms(inputs: tuple[Tensor, ...]) -> float:
    q, k, cos, sin = inputs
    # cos and sin repeat each angle: half of their bytes are all there is to read
    return (2 * (q.nbytes + k.nbytes) + (cos.nbytes + sin.nbytes) / 2) / copy_bandwidth() * 1e3


def _rotated_exactly(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return transformers_eager(*(x.double() for x in inputs))


def _error(rotation: Rotation, tokens: int, packed: bool = True) -> float:
    """Measures the error of the output and of the gradients, which turn the other way."""
    inputs = _inputs(tokens, packed)
    q, k, cos, sin = inputs
    right = (*_rotated_exactly(inputs), *_rotated_exactly((q, k, cos, -sin)))
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
    out = rotation(leaves[0] * 1, leaves[1] * 1, cos, sin)
    found = [x.detach().clone() for x in out]
    # what works in place overwrites the gradients that it is given
    gradients = torch.autograd.grad(out, leaves, [q.clone(), k.clone()])
    return max(relative_error(x, y) for x, y in zip((*found, *gradients), right, strict=True))


@cache
def _unsloth() -> ModuleType:
    """Unsloth's kernel file, without its package: what the file takes from its neighbours is stood in for."""
    spec = find_spec("unsloth")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("unsloth is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "kernels"
    import triton

    def stand_in(name: str, **names: Any) -> None:
        module = ModuleType(f"unsloth_alone{name}")
        module.__dict__.update(names, __path__=[])
        sys.modules[module.__name__] = module

    stand_in("")
    stand_in(".kernels")
    stand_in(".device_type", DEVICE_COUNT=1, DEVICE_TYPE_TORCH="cuda")
    indexing = _load("unsloth_alone.kernels.indexing", folder / "indexing.py")
    helpers = {"torch_gpu_device": lambda device: nullcontext(), "torch_device_stream": torch.cuda.current_stream}
    helpers |= {"long_indexing": indexing.long_indexing, "next_power_of_2": triton.next_power_of_2}
    stand_in(".kernels.utils", **helpers)
    names = {"_BF16_TRACEABLE": False, "_TRACEABLE": False, "_eager_kernel": lambda kernel: kernel}
    names |= {"_tag_compile_cache": lambda path: None, "_traced_kernel": lambda kernel: kernel}
    stand_in(".kernels.rms_layernorm", **names)
    return _load("unsloth_alone.kernels.rope_embedding", folder / "rope_embedding.py")


def _load(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
