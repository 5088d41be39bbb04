"""Sets how torch.compile treats the layers of a model, and prints lines about what a first step waits for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

# Graphs of one layer class where rows differ in length: for each kind of layer with gradients and without, with an
# adapter on and off, with shared prefixes and without. All classes of layers count together.
GRAPHS = 64


def whole_layers() -> AbstractContextManager[None]:
    """Inside, layers of a DDP model are compiled as they are without DDP.

    Otherwise torch splits their graphs wherever a bucket of gradients is full, and any large weight fills one. Nothing
    is fused across such a cut, and what lies on it is kept for the backward. Gradients are reduced beside the backward
    all the same, because each layer has a graph of its own.
    """
    found: AbstractContextManager[None] = torch._dynamo.config.patch(optimize_ddp=False)
    return found


def enough_graphs() -> AbstractContextManager[None]:
    """Inside, all kinds of layers of a class get graphs, up to :data:`GRAPHS`, and one more raises.

    Torch would run it uncompiled, and keep all that its backward reads: its checkpointing is off.
    """
    found: AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True
    )
    return found


def start_compilers() -> None:
    """Start the processes in which Inductor compiles kernels, so that they are up when the first graph needs them.

    They take seconds to start, during which a first batch runs through plain layers; without them Inductor compiles one
    kernel after the other, in this process.
    """
    if torch.cuda.is_available():
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.use_process_pool()


def announce(text: str) -> None:
    """Print a line at once, on the first rank of each host alone."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"crosspack: {text}", file=sys.stderr, flush=True)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Announce a piece of work when it begins and, with its seconds, when it ends."""
    announce(f"{what} ...")
    began = time.perf_counter()
    yield
    announce(f"{what}: {time.perf_counter() - began:.1f} s")
