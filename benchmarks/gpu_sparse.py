"""DeepSeek's sparse attention on one GPU: the step of short documents, and attention of long ones by operation.

    python -m benchmarks.gpu_sparse                               # all of it; without a GPU tiny, to see that it runs
    python -m benchmarks.gpu_sparse --only step --budget 240      # one section; ends within 240 seconds
    python -m benchmarks.gpu_sparse --only attention --limit 90   # the most seconds that a contender may take
    python -m benchmarks.gpu_sparse --output results              # where sparse.json goes, renewed with every figure

- ``step``: optimizer steps of DeepSeek-V3.2's shape cut to a few layers and experts, on rows of 16,384 tokens of
  documents of mean 243, all within its budget of 2,048 tokens, by the rules of ``benchmarks.gpu_step``. Beside it stand
  the same layers without an indexer (deepseek_v3), and the whole decoder on padded batches of documents of similar
  length, as these families ran before.
- ``attention``: one document that is longer than the budget; scores and choice of its keys, attention over them, and
  dense attention of our Triton kernel, forward and backward. What is selected is held to float32 on a shorter document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch as replaced

import torch
from torch import Tensor

from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import (
    DEVICE,
    QUICK,
    TOY,
    Result,
    ending_within,
    free,
    gated,
    gpu_ms,
    peak_gib,
    relative_error,
    set_limit,
    wall_ms,
    wanted,
)
from benchmarks.gpu_moe_shapes import deepseek
from benchmarks.gpu_step import Contender, Loss, ours_alone, ours_compiled, race, stock
from benchmarks.gpu_workload import DTYPE, Shape
from torch_backend.hf.anatomy.families import DOCUMENTS
from torch_backend.ops.attention import attention, request_of
from torch_backend.ops.attention.reference import scores_attention
from torch_backend.ops.attention.selected import LongDocuments, select, selected_attention
from torch_backend.segments import PackedMetadata

LIMIT = 2e-2  # of bfloat16 results, in norm
ROWS = (256,) if TOY else (16_384,)
BUDGET = 8 if TOY else 2_048
LONG = (40,) if TOY else (16_384,) if QUICK else (16_384, 65_536)
CHECKED = 40 if TOY else 3_000
HEADS, WIDTH, VALUES = (4, 24, 16) if TOY else (128, 192, 128)
INDEX_HEADS, INDEX_WIDTH = (2, 16) if TOY else (64, 128)


# -- the step ----------------------------------------------------------------------------------------------------------


def sparse(layers: int, experts: int) -> Any:
    """The config of deepseek_v32 in the sizes of :func:`deepseek`."""
    from transformers import DeepseekV32Config

    names = set(DeepseekV32Config().to_dict()) - {"model_type", "architectures", "transformers_version"}
    same = {name: value for name, value in deepseek(layers, experts).to_dict().items() if name in names}
    kinds = ["dense"] + ["sparse"] * (layers - 1)
    index = {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_WIDTH, "index_topk": 2_048}
    return DeepseekV32Config(**same | index, mlp_layer_types=kinds)


def shape(name: str, config: Callable[[int, int], Any]) -> Shape:
    return Shape(name, lambda few: config(2 if few or TOY else 3, 8 if TOY else 32), ROWS, steps=4)  # in 8 groups


def by_documents(model: Any) -> Loss:
    """The whole decoder on batches of documents."""
    with replaced.dict(DOCUMENTS, {model.config.model_type: "as before"}):
        return ours_alone(model)


def run_step() -> Iterator[Result]:
    ours = [Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True)]
    ours.append(Contender("ours", ours_alone))
    before = [Contender("ours, whole decoder on batches of documents", by_documents)]
    padded = [Contender("padded, SDPA", stock, "padded")]
    yield from race(shape("DeepSeek-V3.2, 3 layers, 32 experts", sparse), [*ours, *before, *padded])
    yield from race(shape("DeepSeek-V3, 3 layers, 32 experts", deepseek), ours)


# -- attention of long documents ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One document: queries, keys and values [T, H, D], the gradient of the output, and an indexer's operands."""

    inputs: list[Tensor]
    out: Tensor
    index: list[Tensor]
    packed: PackedMetadata

    @classmethod
    def of(cls, tokens: int) -> Case:
        generator = torch.Generator(device=DEVICE).manual_seed(0)
        sizes = ((HEADS, WIDTH), (HEADS, WIDTH), (HEADS, VALUES), (HEADS, VALUES))
        sizes += ((INDEX_HEADS, INDEX_WIDTH), (INDEX_WIDTH,), (INDEX_HEADS,))  # type: ignore[assignment]
        q, k, v, out, *index = (torch.randn(tokens, *each, device=DEVICE, generator=generator) for each in sizes)
        inputs = [x.to(DTYPE).requires_grad_() for x in (q, k, v)]
        index = [x.to(DTYPE).float() for x in index]  # as the indexers of transformers multiply them
        return cls(inputs, out.to(DTYPE), index, PackedMetadata.from_lengths([tokens], device=DEVICE))

    @property
    def long(self) -> LongDocuments:
        long = LongDocuments.of(self.packed, BUDGET)
        assert long is not None
        return long

    def selected(self) -> Tensor:
        q, k, weights = self.index
        return select(q, k, weights, self.long, top_k=BUDGET)

    def sparse(self, selected: Tensor) -> Tensor:
        q, k, v = self.inputs
        return selected_attention(q, k, v, selected, self.long, request_of(q, k, v, self.packed))

    def dense(self) -> Tensor:
        q, k, v = self.inputs
        return attention(q, k, v, self.packed, implementation="sdpa" if TOY else "triton")

    def both(self, forward: Callable[[], Tensor]) -> list[Tensor]:
        """The output and the gradients."""
        result = forward()
        return [result.detach(), *torch.autograd.grad(result, self.inputs, self.out)]


def error() -> float:
    """The largest error of the output and of a gradient over the selected keys of a shorter document."""
    case = Case.of(CHECKED)
    selected = case.selected()
    column = torch.where(selected < 0, CHECKED, selected).long()
    visible = torch.zeros(CHECKED, CHECKED + 1, dtype=torch.bool, device=DEVICE).scatter_(1, column, True)[:, :-1]
    results = case.both(partial(case.sparse, selected))
    leaves = [x.detach()[:, :4].float().requires_grad_() for x in case.inputs]  # of some heads, which are all alike
    q, k, v = leaves
    right = scores_attention(q, k, v, request=request_of(q, k, v, case.packed), visible=visible)
    exact = [right.detach(), *torch.autograd.grad(right, leaves, case.out[:, :4].float())]
    return max(relative_error(x[:, :4], y) for x, y in zip(results, exact, strict=True))


def run_attention() -> Iterator[Result]:
    for tokens in LONG:
        case = f"a document of {tokens:,}, {HEADS} heads of {WIDTH}, values of {VALUES}"
        for name, measure in {"selected keys": timed_sparse, "all keys, triton": timed_dense}.items():
            if not wanted(name):
                continue
            figures, note = gated(error if name == "selected keys" else lambda: 0.0, LIMIT, partial(measure, tokens))
            free()
            if not figures:
                yield Result("attention", case, name, None, "ms forward and backward", note)
            for unit, value in figures.items():
                yield Result("attention", case, name, value, unit, note)


def timed_sparse(tokens: int) -> dict[str, float]:
    case = Case.of(tokens)
    selected = case.selected()
    forward = partial(case.sparse, selected)
    figures = {"ms scores and choice": _milliseconds(case.selected), "GiB at most, of these": _gib(case.selected)}
    return figures | _both(case, forward)


def timed_dense(tokens: int) -> dict[str, float]:
    case = Case.of(tokens)
    return _both(case, case.dense)


def _both(case: Case, forward: Callable[[], Tensor]) -> dict[str, float]:
    with torch.no_grad():
        ahead = _milliseconds(forward)
    both = partial(case.both, forward)
    return {"ms forward": ahead, "ms forward and backward": _milliseconds(both), "GiB at most": _gib(both)}


def _gib(call: Callable[[], object]) -> float:
    return 0.0 if TOY else peak_gib(call)


def _milliseconds(call: Callable[[], object]) -> float:
    first = wall_ms(call, 1)
    return first if TOY else gpu_ms(call, max(1, min(10, int(300 / first))))


SECTIONS = {"step": run_step, "attention": run_attention}


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--limit", type=float, metavar="SECONDS", help="the most that a contender may take")
    chosen = parsed(options, arguments)
    if chosen.limit:
        set_limit(chosen.limit)
    with ending_within(chosen.budget):
        figures = (result for name in chosen.only for result in survived(name, SECTIONS[name]()))
        return collected(figures, chosen.output, "sparse")


if __name__ == "__main__":
    main()
