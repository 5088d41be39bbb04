"""Helpers for tests of scans: documents around chunk ends, and the recurrence token by token with its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from packing_core import reference
from tests.torch_backend.kernels import Where, assert_within_budget, numpy
from torch_backend.segments import PackedMetadata

# One token; two documents inside a chunk; one that reaches over two chunk ends; one that ends where a chunk does.
LENGTHS = (1, 30, 20, 130, 11, 50)
Scan = Callable[[list[torch.Tensor], torch.Tensor], Mapping[str, torch.Tensor]]  # of operands and dout
NAMES = ("q", "k", "v", "g", "beta")


def packed_on(where: Where, lengths=LENGTHS) -> PackedMetadata:
    return PackedMetadata.from_lengths(lengths, device=where.device, entries=len(lengths) + 1)


def assert_moved_alone(run: Scan, inputs: Sequence[torch.Tensor], dout: torch.Tensor, number: int, lengths) -> None:
    """Assert that results per token change at those of the ``number``-th document, and at no other to the bit."""
    start, stop = np.cumsum([0, *lengths])[[number, number + 1]]
    changed = [x.detach().clone() for x in (*inputs, dout)]
    for x in changed:
        if len(x) == len(dout):
            x[start:stop] *= 0.5
    before, after = (
        run([x.detach().requires_grad_() for x in each[:-1]], each[-1]) for each in ((*inputs, dout), changed)
    )
    for name, x in before.items():
        if len(x) == len(dout):
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


def assert_continues(where: Where, results, inputs, initial, lengths) -> None:
    """Outputs and last states of a scan from initial states, and their gradients, are those of the recurrence."""
    douts = where.draw(*results[0].shape, seed=8), where.draw(*results[1].shape, seed=9).float()
    found = torch.autograd.grad(results, (*inputs, initial), douts)
    names = ["out", "final", *NAMES[: len(inputs)], "initial"]
    exact, rounded = (continued(inputs, initial, douts, lengths, x) for x in (torch.float64, where.dtype))
    assert_within_budget(dict(zip(names, (*results, *found), strict=True)), exact, rounded, where.dtype)


def oracle(inputs, dout, dtype: str, lengths=LENGTHS) -> dict[str, np.ndarray]:
    """The gated delta rule by the reference: heads of q and k repeated, their gradients summed."""
    q, k, v, g, beta = (numpy(x) for x in inputs)
    shared = v.shape[1] // q.shape[1]
    arguments = q.repeat(shared, 1), k.repeat(shared, 1), v, g, beta, np.cumsum([0, *lengths])
    found = reference.gated_delta_rule_vjp(*arguments, numpy(dout), dtype=dtype)
    for name in ("q", "k"):
        found[name] = found[name].reshape(len(q), -1, shared, q.shape[2]).sum(2)
    return {"out": reference.gated_delta_rule(*arguments, dtype=dtype), **found}


def names_of(inputs) -> list[str]:
    """Names the operands that are there."""
    return [name for name, x in zip((*NAMES, "skip"), inputs) if x is not None]


def quadratic(inputs, dout, dtype: torch.dtype, lengths=LENGTHS) -> dict[str, np.ndarray]:
    """o_i = s sum_j exp(c_i - c_j) (q_i . k_j) b_j v_j + d v_i, by a score matrix per document."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    *rows, skip = leaves
    parts = []
    for document in zip(*(len(lengths) * [None] if x is None else x.split(lengths) for x in rows), strict=True):
        q, k, v, g, strength = document
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        c = g.cumsum(0)
        later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        decay = (c[:, None] - c[None]).masked_fill(later[..., None], -torch.inf)
        scores = torch.einsum("ihk,jhk->ijh", q, k) * decay.exp() * q.shape[2] ** -0.5
        out = torch.einsum("ijh,jhv->ihv", scores, v if strength is None else v * strength[..., None])
        parts.append(out if skip is None else out + skip[:, None] * v)
    out = torch.cat(parts)
    found = torch.autograd.grad(out, [x for x in leaves if x is not None], dout.to(dtype))
    return {"out": numpy(out), **{name: numpy(x) for name, x in zip(names_of(inputs), found)}}
