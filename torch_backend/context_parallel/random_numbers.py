"""Random numbers of ranks that share a batch, which dropout and a router's noise draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_backend.context_parallel.share import RankShare


@contextmanager
def draws_of_rank(share: RankShare) -> Iterator[None]:
    """Inside, the rank draws other random numbers than the other ranks, though all may have been seeded alike.

    By themselves such ranks would drop the same channels of the first token that each holds, of the second and so on,
    and these may be tokens of one document. Afterwards the generator of the CPU has advanced by one draw on every rank,
    and that of the device by none, so samplers that draw from them still agree.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) + share.rank
    with torch.random.fork_rng([share.device] if share.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
