"""Predicts steps of context parallelism on more ranks than are at hand, by the cost model and the numbers sent.

    python -m benchmarks.context_prediction                    # 2, 4 and 8 ranks, the shapes of benchmarks.gpu_context
    python -m benchmarks.context_prediction --products 700     # other rates of the device

Rows are those of ``benchmarks.gpu_context``. A rank takes the time of its tokens and of its attention pairs at the
rates given, a step with 3 times the products of a forward and 3.5 times its attention. Where a document is cut, ranks
wait for each other before attention and after it. Then, with nothing beside it, it exchanges keys and values or heads,
what is less, and the operands of scans by heads, once forward and once back. Left out: reducing the gradients of
weights, the optimizer, launches. So the share of linear is what planning and exchange leave of it, not that of a step.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks._report import table
from benchmarks.gpu_context import lengths_of
from benchmarks.gpu_workload import llama3, qwen35
from packing_core import ContextPlan, Cost, context_plan
from torch_backend.context_parallel.share import RankShare

ROWS = (
    (65_536, 4_096),
    (65_536, 65_536),
    (262_144, 262_144),
    (1_048_576, 4_096),
    (1_048_576, 65_536),
    (1_048_576,) * 2,
)
RANKS = (2, 4, 8)
SHAPES = {"llama": llama3(False), "hybrid": qwen35(False, toy=False)}
BYTES = 2  # of a number in bfloat16


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--products", type=float, default=600, help="TFLOP/s of products; measured for a whole step")
    options.add_argument("--attention", type=float, default=400, help="TFLOP/s of attention")
    options.add_argument("--link", type=float, default=300, help="GB/s that a rank sends")
    chosen = options.parse_args()
    header = (
        "shape, row, documents of mean",
        "ranks",
        "cost, max / mean",
        "straddling",
        "GB sent a layer",
        "of linear",
    )
    lines = [_line(chosen, shape, row, mean, ranks) for shape, (row, mean), ranks in product(SHAPES, ROWS, RANKS)]
    print(table(header, lines))


def _line(rates: argparse.Namespace, shape: str, row: int, mean: int, ranks: int) -> list[str]:
    config = SHAPES[shape]
    lengths, cost = lengths_of(row, mean), Cost.operations(config)
    plan = context_plan(lengths, ranks, cost=Cost.from_config(config))
    ends = plan.start + plan.length
    tokens = np.bincount(plan.rank, plan.length, ranks)
    pairs = np.bincount(plan.rank, ends.astype(float) ** 2 - plan.start.astype(float) ** 2, ranks)
    products = 3e-12 * cost.tokens * tokens / rates.products
    attention = 3.5e-12 * cost.squares * pairs / rates.attention
    # ranks of a document that is cut wait for each other before attention and after it
    slowest = products.max() + attention.max() if plan.straddling.any() else (products + attention).max()
    sent = numbers_sent(config, plan) * BYTES
    step = slowest + 2 * sent / ranks / (rates.link * 1e9)
    return [
        f"{shape}, {row:,}, {mean:,}",
        f"{ranks}",
        f"{plan.imbalance:.4f}",
        f"{plan.lengths[plan.straddling].sum() / row:.0%}",
        f"{sent / config.num_hidden_layers / 1e9:.3f}",
        f"{(products + attention).mean() / step:.3f}",
    ]


def numbers_sent(config: Any, plan: ContextPlan) -> int:
    """The numbers that leave their rank in a forward of all layers, as docs/context-parallel.md has it."""
    if not plan.straddling.any():
        return 0
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    straddling, others = int(plan.lengths[plan.straddling].sum()), (plan.ranks - 1) / plan.ranks
    by_keys = RankShare(plan, 0, None, torch.device("cpu")).tokens_sent(None) * kv_heads * 2 * width
    divides = heads % plan.ranks == 0 and kv_heads % plan.ranks == 0
    by_heads = straddling * (heads + kv_heads) * 2 * width * others if divides else float("inf")
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attention = kinds.count("full_attention")
    scans = len(kinds) - attention
    total = attention * min(by_keys, by_heads)
    if scans:
        k_heads, v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        operands = 2 * k_heads * config.linear_key_head_dim + 2 * v_heads * (config.linear_value_head_dim + 1)
        total += scans * straddling * operands * others
    return int(total)


if __name__ == "__main__":
    main()
