"""Helpers for tests of scans: documents around chunk ends, and the recurrence token by token with its states."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch

from tests.torch_backend.kernels import Where, numpy
from torch_backend.segments import PackedMetadata

# One token; two documents inside a chunk; one that reaches over two chunk ends; one that ends where a chunk does.
LENGTHS = (1, 30, 20, 130, 11, 50)
NAMES = ("q", "k", "v", "g", "beta")


def packed_on(where: Where, lengths=LENGTHS) -> PackedMetadata:
    return PackedMetadata.from_lengths(lengths, device=where.device, entries=len(lengths) + 1)


def assert_moved_alone(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], start, stop) -> None:
    """Results, [T, ...] each, changed at the tokens of one document and at no other, to the bit."""
    for name, x in before.items():
        own = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        own[start:stop] = True
        assert torch.equal(x[~own], after[name][~own]), name
        assert not torch.equal(x[own], after[name][own]), name


def working(where: Where) -> str:
    return str(where.dtype).removeprefix("torch.")


def continued(inputs, initial, douts, lengths, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The recurrence from the initial states, token by token; gradients of what comes out and of the last states."""
    names = [*NAMES[: len(inputs)], "initial"]
    given = [x.detach().cpu().to(dtype).requires_grad_() for x in (*inputs, initial)]
    q, k, v, g, *beta, states = given
    out, final = [], []
    for n, (start, stop) in enumerate(pairwise(np.cumsum([0, *lengths]))):
        state = states[n]
        for t in range(start, stop):
            state = state * g[t].exp().reshape(len(state), -1, 1)
            new = v[t]
            if beta:
                new = (new - (state * k[t][..., None]).sum(1)) * beta[0][t][:, None]
            state = state + k[t][..., None] * new[:, None]
            out.append((state * q[t][..., None]).sum(1) * q.shape[2] ** -0.5)
        final.append(state)
    results = torch.stack(out), torch.stack(final)
    gradients = torch.autograd.grad(results, given, [x.cpu().to(dtype) for x in douts])
    found = {"out": results[0], "final": results[1], **dict(zip(names, gradients, strict=True))}
    return {name: numpy(x) for name, x in found.items()}
