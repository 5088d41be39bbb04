"""Compiled blocks of a vision tower or an audio encoder, whose number of patches or frames differs between batches.

A packed call -> the tower makes its segments and positions (:mod:`torch_backend.hf.edits.towers`) -> each block runs
through one graph for any number of patches, with the segments as an argument and what attention derives of them made
before. Calls that are not packed run the blocks as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from torch_backend.hf.anatomy.structure import sharding_inside
from torch_backend.hf.attention import PACKED, TOWER_SEGMENTS, DecoderLayer
from torch_backend.hf.edits.clips import encoder_blocks
from torch_backend.hf.edits.towers import BOUNDARIES, CALL, TowerCall, compiles, tower_layers, tower_of
from torch_backend.ops.attention import AttentionRequest, needs_host_lengths, prepare, select
from torch_backend.segments import PackedMetadata
from torch_backend.steps.compiling import GRAPHS, whole_layers

log = logging.getLogger("crosspack")

LONGEST = "max_seqlen"  # the keyword of the longest window, which blocks read from their segments
IMAGE = 1024  # patches of an image, where the fastest attention is looked for before there are images


class CompiledTower:
    """The blocks of one tower that are compiled.

    Attributes:
        requests: what their attention layers asked for in calls that were not compiled; none before the first one.
        longest: the longest image or window so far, rounded up, by the place of its boundaries among those of a call,
            so that graphs see few numbers.
        failed: whether a block did not compile, so that all of them run as they are.
        reads: whether attention reads lengths back, so that they do, too; None before it was asked.
    """

    def __init__(self, requests: set[AttentionRequest]) -> None:
        self.requests = requests
        self.longest: dict[int, int] = {}
        self.failed = False
        self.reads: bool | None = None

    @property
    def ready(self) -> bool:
        """Returns whether the blocks have run as they are, and can be compiled."""
        if self.requests and self.reads is None:  # the lengths of images on the host, which differ from batch to batch
            usual: dict[str, Any] = {"tokens": IMAGE, "segments": 1, "max_seqlen": IMAGE, "host_lengths": True}
            asked = (replace(x, requires_grad=True, compiling=True, **usual) for x in self.requests)
            self.reads = any(needs_host_lengths(select(x)) for x in asked)
        return bool(self.requests) and not self.failed and not self.reads

    def segments_of(self, call: TowerCall, boundaries: Tensor, hidden: Tensor) -> PackedMetadata:
        """The segments of a block, with what its graph reads of them."""
        segments = call.segments_between(boundaries, hidden.shape[-2], hidden.device)
        if id(boundaries) not in call.prepared:
            place = len(call.prepared)
            call.prepared.add(id(boundaries))
            segments.hide_values()
            segments.round_longest(1 << 62)
            longest = self.longest[place] = max(segments.max_seqlen, self.longest.get(place, 0))
            segments.max_seqlen = longest
            segments.forget()
            for request in self.requests:
                prepare(segments, replace(request, requires_grad=True))
            segments.mark_any_length()
        return segments


class TowerBlock:
    """Call of one block of a tower, in place of ``_compiled_call_impl``."""

    def __init__(self, tower: CompiledTower, block: nn.Module, compiled: Callable[..., Any]) -> None:
        self.tower, self.plain, self.compiled = tower, block._call_impl, compiled

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        carried = len(args) == 1 and hasattr(args[0], CALL)
        boundaries = args[0] if carried else kwargs.get(BOUNDARIES)
        call = kwargs.get(PACKED) or getattr(boundaries, CALL, None)
        others = len(args) > carried
        if not isinstance(call, TowerCall) or not isinstance(boundaries, Tensor) or others or not self.tower.ready:
            return self.plain(hidden, *args, **kwargs)
        segments = self.tower.segments_of(call, boundaries, hidden)
        given = {name: x for name, x in kwargs.items() if name != PACKED}
        given |= {BOUNDARIES: None, TOWER_SEGMENTS: segments} | dict.fromkeys({LONGEST} & {*given})
        if hidden._is_view():
            hidden = hidden.clone()  # as some families make the first block's input, which would get graphs of its own
        for x in (hidden, *(kwargs.get("position_embeddings") or ())):
            torch._dynamo.maybe_mark_dynamic(x, x.ndim - 2)
        try:
            with torch._dynamo.config.patch(recompile_limit=GRAPHS), whole_layers():
                return self.compiled(hidden, **given)
        except TorchDynamoException as error:
            self.tower.failed = True
            log.warning("the tower runs with blocks that are not compiled: %s", error)
            return self.plain(hidden, *args, **kwargs)


def compile_towers(
    root: Any, requests: Mapping[str, set[AttentionRequest]], *, backend: str | Callable[..., Any]
) -> None:
    """Compile the blocks of a model's towers in place, where their attention reads nothing back.

    Args:
        requests: of each kind of tower, filled by its first call, which runs as it is.
    """
    for kind, blocks in tower_blocks(root).items():
        owner = CompiledTower(requests[kind])
        for block in blocks:
            block.compile(backend=backend, dynamic=None)
            compiled: Any = block._compiled_call_impl
            block._compiled_call_impl = TowerBlock(owner, block, compiled)


def tower_blocks(root: Any) -> dict[str, list[nn.Module]]:
    """Returns the blocks of a model's towers that can be compiled; none under FSDP, which gathers weights in them."""
    if sharding_inside(root) == "FSDP":
        return {}
    vision: list[nn.Module] = []
    if (tower := tower_of(root)) is not None:
        attention = [*tower_layers(tower)]
        if attention and all(map(compiles, attention)):
            vision = [module for module in tower.modules() if isinstance(module, DecoderLayer)]
    return {"vision": vision, "audio": encoder_blocks(root)}
