"""Sparse attention on one GPU: the step of short documents, attention of long ones by operation, and blocks of keys.

    python -m benchmarks.gpu_sparse                               # all of it; without a GPU tiny, to see that it runs
    python -m benchmarks.gpu_sparse --only step --budget 240      # one section; nothing is measured after that
    python -m benchmarks.gpu_sparse --only attention --limit 90   # the most seconds that a contender may take
    python -m benchmarks.gpu_sparse --output results              # where sparse.json goes, renewed with every figure

- ``step``: optimizer steps of DeepSeek-V3.2's shape cut to a few layers and experts, on rows of 16,384 tokens of
  documents of mean 243, all within its budget of 2,048 tokens, by the rules of ``benchmarks.gpu_step``. Beside it stand
  the same layers without an indexer (deepseek_v3), and the whole decoder on padded batches of documents of similar
  length, as these families ran before.
- ``attention``: one document that is longer than the budget; scores and choice of its keys, attention over them in
  Triton, from the latent vectors that its keys and values are projections of, and in plain torch, and dense attention
  of our Triton kernel, forward and backward. What is selected is held to float32
  on a shorter document.
- ``blocks``: forward and backward of an attention layer of Qwen 4, whose indexer chooses blocks of keys, on a document
  of 4,096 to 16,384 tokens; beside it the stock layer, whose indexer loops over queries, on the same hidden states,
  once. A model of this one layer hands it its arguments. Output and gradients are held to those of the stock layer in
  float32 on a shorter document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch as replaced

import numpy as np
import torch
from torch import Tensor

from benchmarks.clock import DEVICE, DTYPE, QUICK, TOY, gpu_ms, header, once_ms, peak_gib, relative_error, wall_ms
from benchmarks.gpu_step import NOISE, Contender, Loss, ours_alone, ours_compiled, race, stock
from benchmarks.harness import Figures, in_turn, measured, parsed, parser
from benchmarks.report import Result, collected
from benchmarks.shapes import config
from benchmarks.workload import Shape, batches, make_model
from torch_backend.hf.anatomy.families import DOCUMENTS
from torch_backend.ops.attention import attention, request_of
from torch_backend.ops.attention.reference import scores_attention
from torch_backend.ops.attention.selected import (
    Latent,
    LongDocuments,
    SelectedKeys,
    select,
    selected_attention,
    why_not_triton,
)
from torch_backend.segments import PackedMetadata

BOTH = "ms forward and backward"
LIMIT = 2e-2  # of bfloat16 results, in norm
ROWS = (256,) if TOY else (16_384,)
BUDGET = 8 if TOY else 2_048
LONG = (40,) if TOY else (16_384,) if QUICK else (16_384, 65_536)
CHECKED = 40 if TOY else 3_000
HEADS, WIDTH, VALUES = (4, 24, 16) if TOY else (128, 192, 128)
RANK, ROTATED = (32, 8) if TOY else (512, 64)
INDEX_HEADS, INDEX_WIDTH = (2, 16) if TOY else (64, 128)
BLOCKS = (24, 48) if TOY else (4_096,) if QUICK else (4_096, 8_192, 16_384)  # lengths of documents
CHECKED_BLOCKS, CHECKED_BUDGET = (40, 8) if TOY else (700, 128)


# -- the step ----------------------------------------------------------------------------------------------------------


def by_documents(model: Any) -> Loss:
    """The whole decoder on batches of documents, when it is patched and whenever it runs."""
    of_family = {model.config.model_type: "as before"}
    with replaced.dict(DOCUMENTS, of_family):
        loss = ours_alone(model)

    def by_family(batch: Mapping[str, Any]) -> Tensor:
        with replaced.dict(DOCUMENTS, of_family):
            return loss(batch)

    return by_family


def run_step() -> Iterator[Result]:
    ours = [Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True)]
    ours.append(Contender("ours", ours_alone))
    before = [Contender("ours, whole decoder on batches of documents", by_documents)]
    padded = [Contender("padded, SDPA", stock, "padded")]
    for name, racing in (("DeepSeek-V3.2", [*ours, *before, *padded]), ("DeepSeek-V3", ours)):
        make = partial(config, name, layers=3, experts=32)  # in 8 groups
        yield from race(Shape(f"{name}, 3 layers, 32 experts", make, ROWS, steps=4), racing)


# -- attention of long documents ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One document.

    Attributes:
        q, compressed, rotated, weight: [T, H, D], and what keys and values are made of.
        k, v: [T, H, D], [T, H, Dv], made of that.
        out: the gradient of the output; index: an indexer's operands.
    """

    q: Tensor
    compressed: Tensor
    rotated: Tensor
    weight: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    index: list[Tensor]
    packed: PackedMetadata

    @classmethod
    def of(cls, tokens: int) -> Case:
        generator = torch.Generator(device=DEVICE).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, generator=generator).to(DTYPE)

        q, compressed, rotated = normal(tokens, HEADS, WIDTH), normal(tokens, RANK), normal(tokens, ROTATED)
        weight = normal(HEADS * (WIDTH - ROTATED + VALUES), RANK) * RANK**-0.5
        k, v = expanded(compressed, rotated, weight)
        for leaf in (q, compressed, rotated, weight, k, v):
            leaf.requires_grad_()
        sizes = (INDEX_HEADS, INDEX_WIDTH), (INDEX_WIDTH,), (INDEX_HEADS,)
        q_index, k_index, weights = (normal(tokens, *size) for size in sizes)
        out, packed = normal(tokens, HEADS, VALUES), PackedMetadata.from_lengths([tokens], device=DEVICE)
        return cls(q, compressed, rotated, weight, k, v, out, [q_index, k_index, weights.float()], packed)

    @property
    def long(self) -> LongDocuments:
        long = LongDocuments.of(self.packed, BUDGET)
        assert long is not None
        return long

    @property
    def latent(self) -> tuple[Tensor, ...]:
        return self.q, self.compressed, self.rotated, self.weight

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def selected(self) -> Tensor:
        q, k, weights = self.index
        return select(q, k, weights, self.long, top_k=BUDGET)

    def sparse(self, selected: Tensor, implementation: str) -> Tensor:
        latent = Latent(self.compressed, self.rotated, self.weight) if implementation == "triton" else None
        request = request_of(*self.heads, self.packed)
        refused = why_not_triton(request, latent, implementation)
        if implementation == "triton" and refused is not None and not TOY:
            raise RuntimeError(f"selected keys do not run in Triton: {refused}")
        keys = SelectedKeys(selected, self.long, request, latent=latent, implementation=implementation)
        return selected_attention(*self.heads, keys)

    def dense(self) -> Tensor:
        return attention(*self.heads, self.packed, implementation="sdpa" if TOY else "triton")

    def both(self, forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """The output and the gradients."""
        result = forward()
        return [result.detach(), *torch.autograd.grad(result, leaves, self.out)]


def expanded(compressed: Tensor, rotated: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of all heads."""
    k, v = (compressed @ weight.T).unflatten(1, (HEADS, -1)).split([WIDTH - ROTATED, VALUES], -1)
    return torch.cat([k, rotated[:, None].expand(-1, HEADS, -1)], -1), v.contiguous()


def error(implementation: str) -> float:
    """The largest error of the output and of a gradient over the selected keys of a shorter document."""
    case = Case.of(CHECKED)
    selected = case.selected()
    column = torch.where(selected < 0, CHECKED, selected).long()
    visible = torch.zeros(CHECKED, CHECKED + 1, dtype=torch.bool, device=DEVICE).scatter_(1, column, True)[:, :-1]
    in_triton = implementation == "triton" and not TOY
    leaves = case.latent if in_triton else case.heads
    results = case.both(partial(case.sparse, selected, implementation), leaves)
    exact = [x.detach().float().requires_grad_() for x in leaves]
    q, k, v = (exact[0], *expanded(*exact[1:])) if in_triton else exact
    right = scores_attention(q, k, v, request=request_of(q, k, v, case.packed), visible=visible)
    pairs = zip(results, [right.detach(), *torch.autograd.grad(right, exact, case.out.float())], strict=True)
    return max(relative_error(x, y) for x, y in pairs)


def run_attention() -> Iterator[Result]:
    contenders: dict[str, tuple[Callable[[], float] | None, Callable[[int], Figures]]] = {
        "selected keys, triton": (partial(error, "triton"), partial(timed_sparse, "triton")),
        "all keys, triton": (None, timed_dense),
        "selected keys, plain torch": (partial(error, "sdpa"), partial(timed_sparse, "sdpa")),
    }
    for tokens in LONG:
        case = f"a document of {tokens:,}, {HEADS} heads of {WIDTH}, values of {VALUES}"
        for name, (check, measure) in contenders.items():
            yield from measured("attention", case, name, BOTH, partial(measure, tokens), check, LIMIT)


def timed_sparse(implementation: str, tokens: int) -> Figures:
    case = Case.of(tokens)
    selected = case.selected()
    forward = partial(case.sparse, selected, implementation)
    figures = {"ms scores and choice": gpu_ms(case.selected), "GiB at most, of these": peak_gib(case.selected)}
    in_triton = implementation == "triton" and not TOY
    return figures | _both(case, forward, case.latent if in_triton else case.heads)


def timed_dense(tokens: int) -> Figures:
    case = Case.of(tokens)
    return _both(case, case.dense, case.heads)


def _both(case: Case, forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> dict[str, float]:
    with torch.no_grad():
        ahead = gpu_ms(forward)
    both = partial(case.both, forward, leaves)
    return {"ms forward": ahead, BOTH: gpu_ms(both), "GiB at most": peak_gib(both)}


# -- blocks of keys ----------------------------------------------------------------------------------------------------


def qwen4(budget: int) -> Any:
    """The default config of qwen4_exp with one layer and 8 experts; it leaves the sizes of its indexer open."""
    from transformers import AutoConfig

    size: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 199 if TOY else 151_936}
    if TOY:
        size |= {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        size |= {"head_dim": 16, "hc_lowrank": 16}
    size |= {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16 if TOY else 128}
    size |= {"indexer_budget": budget, "indexer_compress_ratio": 4 if TOY else 16}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}  # which fit the indexer's heads
    kinds = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return AutoConfig.for_model("qwen4_exp_text", **size, **kinds, rope_parameters=rope)


class _Reached(Exception):
    """The forward of a model came to the layer of interest, and need not go on."""


class Blocks:
    """The attention layer of a model of Qwen 4's kind, and what the model hands it for one document.

    Args:
        ours: patched; else as transformers has it.
        tokens: of the document.
        budget: of the indexer.
    """

    def __init__(self, ours: bool, tokens: int, budget: int = BUDGET, dtype: torch.dtype = DTYPE) -> None:
        model = make_model(Shape("", lambda few: qwen4(budget), ()), None, few=True, dtype=dtype)
        document = np.random.default_rng(0).integers(1, 199, tokens)
        ids = torch.from_numpy(document)[None].to(DEVICE)
        batch = batches("packed", [document], tokens)[0] if ours else {"input_ids": ids, "labels": ids}
        loss = ours_alone(model) if ours else stock(model)
        self.layer = next(module for module in model.modules() if hasattr(module, "indexer"))

        def take(layer: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
            self.args, self.arguments = args, arguments
            raise _Reached

        hook = self.layer.register_forward_pre_hook(take, with_kwargs=True)
        with suppress(_Reached), torch.no_grad():
            loss(batch)
        hook.remove()
        generator = torch.Generator(device=DEVICE).manual_seed(0)
        size = 1, tokens, model.config.hidden_size
        self.hidden, self.dout = (torch.randn(size, generator=generator, device=DEVICE).to(dtype) for _ in range(2))
        self.hidden.requires_grad_()

    def __call__(self) -> list[Tensor]:
        """The output and the gradients."""
        named = {} if self.args else {"hidden_states": self.hidden}
        output = self.layer(*(self.hidden, *self.args[1:])[: len(self.args)], **self.arguments | named)[0]
        leaves = [self.hidden, *self.layer.parameters()]
        gradients = torch.autograd.grad(output, leaves, self.dout, materialize_grads=True)  # indexers have none
        return [output.detach(), *gradients]


@cache
def right_blocks() -> tuple[list[Tensor], float]:
    """The results of the stock layer in float32, and how far it is off them in bfloat16."""
    exact = Blocks(False, CHECKED_BLOCKS, CHECKED_BUDGET, torch.float32)()
    return exact, norm_error(Blocks(False, CHECKED_BLOCKS, CHECKED_BUDGET)(), exact)


def norm_error(results: list[Tensor], right: list[Tensor]) -> float:
    return max(relative_error(x, y) for x, y in zip(results, right, strict=True) if y.any())


def run_blocks() -> Iterator[Result]:
    for tokens in BLOCKS:
        for name, ours in (("ours", True), ("stock", False)):

            def check(ours: bool = ours) -> float:
                return norm_error(Blocks(ours, CHECKED_BLOCKS, CHECKED_BUDGET)(), right_blocks()[0])

            def measure(ours: bool = ours, tokens: int = tokens) -> Figures:
                layer = Blocks(ours, tokens)
                return {BOTH: wall_ms(layer) if ours else once_ms(layer)}

            limit = 1e-5 if TOY else lambda: NOISE * right_blocks()[1]
            yield from measured("blocks", f"a document of {tokens:,}", name, BOTH, measure, check, limit)


SECTIONS = {"step": run_step, "attention": run_attention, "blocks": run_blocks}


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    chosen = parsed(parser(__doc__, [*SECTIONS]), arguments)
    return collected(in_turn(chosen.only, SECTIONS), header(), chosen.output, "sparse")


if __name__ == "__main__":
    main()
