"""Compiled layers for models whose packed rows differ in length, as those of preference, reward and policy trainers do.

A packed call -> the first one runs without gradients and asks the attention implementations -> the layers are compiled,
with the number of tokens as a variable -> it and later packed calls run through them, with gradients or without, and as
CUDA graphs where these serve them (:mod:`torch_backend.steps.recorded_rows`). Layers recompute inside their own
backward. All other calls, generation among them, run the layers as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from torch_backend.hf.anatomy.structure import causal_lm, sharding_inside
from torch_backend.hf.entry import current_forward
from torch_backend.hf.foreign_kernels import replaced_modules, without_kernels
from torch_backend.hf.forward import PackedForward, forward_among
from torch_backend.hf.patch import state_of
from torch_backend.hf.patched import Patched
from torch_backend.hf.quantised import quantised_layers, traceable_weights
from torch_backend.steps.compiling import GRAPHS, start_compilers, whole_layers
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.eligibility import level_inside, why_not_compiled
from torch_backend.steps.memory import Level, level_layers, recomputing_inside
from torch_backend.steps.recorded_rows import RecordedRows
from torch_backend.steps.static_row import Run
from torch_backend.steps.tower_blocks import TowerBlock

log = logging.getLogger("crosspack")

COMPILED = "compiled, for rows of any length"
RECORDED = "CUDA graphs of the layers, one for each length of rows"
UNNEEDED = "no CUDA graph: the GPU does not wait for the host in rows of this size"


class CompiledCalls:
    """Compiles the layers of one patched model after its first packed call, and records packed calls.

    Attributes:
        layers, graph: what runs, or why nothing faster does.
    """

    def __init__(self, model: nn.Module, refused: str | None = None) -> None:
        self.model = model
        self.root = causal_lm(model)
        run_plain_layers(model)
        reason = refused or why_not_compiled(model) or _why_not_any_length(model)
        self.layers = "decided at the first packed call" if reason is None else f"not compiled: {reason}"
        self.was_called = False
        self.level: Level = "none"  # of the packed call that runs
        self.calls: dict[Level, dict[nn.Module, Callable[..., Any]]] = {}
        self.recorded: RecordedRows | None = None
        if reason is None and self.state is not None:
            self.state.runner = self

    @property
    def state(self) -> Patched | None:
        return state_of(self.root)

    @property
    def graph(self) -> str:
        if self.recorded is None:
            return self.layers
        if self.recorded.refused is not None:
            return f"no CUDA graph: {self.recorded.refused}"
        return UNNEEDED if self.recorded.is_unneeded else RECORDED

    def __call__(self, run: Run, forward: PackedForward, kwargs: dict[str, Any]) -> Any:
        """The output of ``run(forward, kwargs)``, the layers of a packed call."""
        if not self.calls:
            asks_only, self.was_called = torch.is_grad_enabled() and not self.was_called, True
            if why_not_compiled(self.model) is None:
                start_compilers()
            with torch.no_grad() if asks_only else nullcontext():  # plain layers keep more than compiled ones
                output = run(forward, dict(kwargs))
            self._compile("none")
            if not asks_only:
                return output
        if not self.calls or forward.long is not None:
            return run(forward, kwargs)
        level = level_inside(self.model) if torch.is_grad_enabled() else "none"
        if level not in self.calls:
            self._compile(level)
        assert self.recorded is not None
        self.level = level
        try:
            with recomputing_inside([] if level == "none" else level_layers(self.root)):
                return self.recorded(run, forward, kwargs)
        except TorchDynamoException as error:
            self._run_plain(f"it failed, {error}".splitlines()[0])
            log.warning("packed calls run with layers that are not compiled: %s", error)
            return run(forward, kwargs)
        finally:
            self.level = "none"

    def _compile(self, level: Level) -> None:
        if self.state is None or not self.state.requests:
            return
        if not self.calls and (reason := why_not_compiled(self.model)) is not None:  # what it tells may be set since
            self._run_plain(reason)
            return
        compile_layers(self.model, memory=level, dynamic=None)
        calls = self.calls[level] = {}
        for module in self.root.modules():
            compiled = module._compiled_call_impl
            if compiled is not None and not isinstance(compiled, TowerBlock):  # which knows packed calls itself
                calls[module] = compiled
                module._compiled_call_impl = _Call(self, module)
        self.layers = COMPILED
        self.recorded = self.recorded or RecordedRows(self.model, self.state)

    def _run_plain(self, reason: str) -> None:
        """Falls back to layers that are not compiled."""
        run_plain_layers(self.model)
        self.layers, self.recorded = f"not compiled: {reason}", None


class _Call:
    """Forward of a module with a compiled call, which it runs in packed calls; all others run the plain one."""

    def __init__(self, owner: CompiledCalls, module: nn.Module) -> None:
        self.owner, self.module = owner, module
        self.foreign, self.quantised = replaced_modules([module]), quantised_layers([module])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Checkpointing recomputes a layer outside of the model's call, so its own arguments decide first.
        forward = forward_among((*args, *kwargs.values())) or current_forward()
        if forward is None or not forward.prepared or forward.long is not None:
            return self.module._call_impl(*args, **kwargs)
        limit = torch._dynamo.config.patch(recompile_limit=GRAPHS)
        with limit, whole_layers(), without_kernels(self.foreign), traceable_weights(self.quantised):
            return self.owner.calls[self.owner.level][self.module](*args, **kwargs)


def run_plain_layers(model: nn.Module) -> None:
    """Let the layers of a model run as they are, whatever an earlier :class:`CompiledCalls` did to them."""
    root: Any = causal_lm(model)
    state = state_of(root)
    if state is not None:
        state.runner = None
    compiled = [module for module in root.modules() if isinstance(module._compiled_call_impl, _Call)]
    for module in compiled:
        module._compiled_call_impl = None
    if compiled and state is not None:
        state.compiled = set()


def _why_not_any_length(model: nn.Module) -> str | None:
    """Explains why one graph of a layer cannot run rows of all lengths; None if it can."""
    state = state_of(causal_lm(model))
    if state is not None and state.anatomy.mixers:
        return "its recurrent layers are compiled for rows of one length alone"
    if sharding_inside(model) == "FSDP":
        return "FSDP gathers parameters in the calls of layers"
    return None
