"""A layer of routed experts as a model would store it, the call of ``experts``, and what the oracle takes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from packing_core import reference
from packing_core.reference import ExpertActivation
from tests.torch_backend.kernels import Where, numpy
from torch_backend.ops.experts import Adapter, experts

SILU = ExpertActivation()
CLAMPED = ExpertActivation(alpha=1.702, limit=0.9, offset=1.0)
UNGATED = ExpertActivation("relu2", gated=False)
SMALL = {"tokens": 12, "inner": 16, "count": 3}  # for comparisons of the kernels with themselves


class Layer:
    """A layer as it would be stored, what a call of ``experts`` takes, and what the oracle takes of it.

    Args:
        transposed: weights are stored [E, in, out]. interleaved: gates and values alternate.
        rank: of adapters on both products, 0 for none.
    """

    def __init__(
        self, where: Where, *, tokens=21, width=24, inner=20, count=5, top_k=2, activation=SILU, biased=False,
        transposed=False, interleaved=False, rank=0,
    ):  # fmt: skip
        self.where, self.activation, self.interleaved, self.transposed = where, activation, interleaved, transposed
        outer = 2 * inner if activation.gated else inner
        self.count = count
        self.leaves = {
            "x": where.draw(tokens, width),
            "weights": where.draw(tokens, top_k, seed=1).abs() + 0.1,
            "up": where.draw(count, outer, width, seed=2) / width**0.5,
            "down": where.draw(count, width, inner, seed=3) / inner**0.5,
        }
        if biased:
            self.leaves |= {"up_bias": where.draw(count, outer, seed=4), "down_bias": where.draw(count, width, seed=5)}
        if rank:
            self.leaves |= {
                "up_a": where.draw(count, rank, width, seed=6) / width**0.5,
                "up_b": where.draw(count, outer, rank, seed=7) / rank**0.5,
                "down_a": where.draw(count, rank, inner, seed=8) / inner**0.5,
                "down_b": where.draw(count, width, rank, seed=9) / rank**0.5,
            }
        if transposed:
            self.leaves |= {name: self.leaves[name].mT.contiguous() for name in ("up", "down")}
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.dy = where.draw(tokens, width, seed=10)
        scores = torch.rand(tokens, count, generator=torch.Generator().manual_seed(0))
        self.indices = scores.topk(top_k).indices.to(where.device)

    def run(self, implementation: Any = "auto", tile: int | None = None) -> torch.Tensor:
        given = dict(self.leaves)
        if self.transposed:
            given |= {name: given[name].mT for name in ("up", "down")}
        for name in ("up", "down"):
            if f"{name}_a" in given:
                given[f"{name}_adapter"] = Adapter(given.pop(f"{name}_a"), given.pop(f"{name}_b"), 0.5)
        x, weights, up, down = (given.pop(name) for name in ("x", "weights", "up", "down"))
        return experts(
            x, self.indices, weights, up, down, activation=self.activation, interleaved=self.interleaved,
            implementation=implementation, tile=tile, **given,
        )  # fmt: skip

    def found(self, implementation: Any = "auto", tile: int | None = None) -> dict[str, torch.Tensor]:
        y = self.run(implementation, tile)
        gradients = torch.autograd.grad(y, list(self.leaves.values()), self.dy)
        return {"y": y, **dict(zip(self.leaves, gradients, strict=True))}

    def oracle(self, dtype: str) -> dict[str, np.ndarray]:
        """The oracle with gates first, weights [E, out, in] and adapters added up, its gradients taken back."""
        given = {name: numpy(leaf) for name, leaf in self.leaves.items()}
        low = {name: given.pop(name) for name in ("up_a", "up_b", "down_a", "down_b") if name in given}
        if self.transposed:
            given |= {name: given[name].swapaxes(1, 2) for name in ("up", "down")}
        for name in ("up", "down"):
            if low:
                given[name] = given[name] + 0.5 * low[f"{name}_b"] @ low[f"{name}_a"]
        first = [slice(0, None, 2), slice(1, None, 2)] if self.interleaved else []
        halves = [n for n in ("up", "up_bias") if n in given] if first else []
        for name in halves:
            given[name] = np.concatenate([given[name][:, part] for part in first], axis=1)
        arguments = [given.pop(name) for name in ("x", "weights", "up", "down")]
        arguments.insert(1, self.indices.cpu().numpy())
        options: Any = {"activation": self.activation, "dtype": dtype, **given}
        results = {"y": reference.experts(*arguments, **options)}
        results |= reference.experts_vjp(*arguments, numpy(self.dy), **options)
        for name in halves:
            stored = np.empty_like(results[name])
            half = stored.shape[1] // 2
            stored[:, first[0]], stored[:, first[1]] = results[name][:, :half], results[name][:, half:]
            results[name] = stored
        for name in ("up", "down"):
            if low:
                results[f"{name}_a"] = 0.5 * low[f"{name}_b"].swapaxes(1, 2) @ results[name]
                results[f"{name}_b"] = 0.5 * results[name] @ low[f"{name}_a"].swapaxes(1, 2)
            if self.transposed:
                results[name] = results[name].swapaxes(1, 2)
        return results


LAYERS = [
    pytest.param({}, id="silu"),
    pytest.param({"activation": CLAMPED, "biased": True, "interleaved": True, "transposed": True}, id="gpt-oss"),
    pytest.param({"activation": CLAMPED, "biased": True}, id="clamped, halves"),
    pytest.param({"activation": UNGATED, "top_k": 1}, id="no gate"),
    pytest.param({"activation": ExpertActivation("gelu_tanh"), "top_k": 5, "transposed": True}, id="gelu, all"),
    pytest.param({"width": 16, "inner": 24, "count": 70, "tokens": 12, "top_k": 3}, id="many experts"),
    pytest.param({"rank": 8}, id="adapters"),
    pytest.param({"rank": 3, "activation": CLAMPED, "biased": True, "interleaved": True}, id="adapters, gpt-oss"),
]
