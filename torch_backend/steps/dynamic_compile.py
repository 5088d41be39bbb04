"""Compiled layers for models whose packed rows differ in length, as those of preference, reward and policy trainers do.

A packed call -> the first one runs as usual and asks the attention implementations -> the layers are compiled, with the
number of tokens as a variable -> later packed calls run through them, with gradients or without. All other calls,
generation among them, run the layers as they are. So a row stays as long as its documents, where fixed shapes would
need padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.foreign_kernels import replaced_modules, without_kernels
from torch_backend.hf.forward import PackedForward, forward_among
from torch_backend.hf.patch import Patched, state_of
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.eligibility import why_not_compiled
from torch_backend.steps.graph_limits import GRAPHS, whole_layers
from torch_backend.steps.tower_blocks import TowerBlock

log = logging.getLogger("crosspack")

COMPILED = "compiled, for rows of any length"


class CompiledCalls:
    """Compiles the layers of one patched model after its first packed call.

    Attributes:
        layers: what runs, or why nothing faster does.
    """

    def __init__(self, model: nn.Module, refused: str | None = None) -> None:
        self.model = model
        self.root = causal_lm(model)
        run_plain_layers(model)
        reason = refused or why_not_compiled(model) or _why_not_any_length(model)
        self.layers = "decided at the first packed call" if reason is None else f"not compiled: {reason}"
        self.failed = False
        if reason is None:
            self._hook = self.root.register_forward_hook(self._compile)

    @property
    def state(self) -> Patched | None:
        return state_of(self.root)

    def _compile(self, *_: Any) -> None:
        """A hook after each call, until the first packed one."""
        if self.state is None or not self.state.requests:
            return
        self._hook.remove()
        if (reason := why_not_compiled(self.model)) is not None:  # the level may have been set since
            self.layers = f"not compiled: {reason}"
            return
        compile_layers(self.model, dynamic=None)
        for module in self.root.modules():
            compiled = module._compiled_call_impl
            if compiled is not None and not isinstance(compiled, TowerBlock):  # which knows packed calls itself
                module._compiled_call_impl = _Call(self, module, compiled)
        self.layers = COMPILED

    def fail(self, error: TorchDynamoException) -> None:
        """Go on with the layers as they are."""
        self.failed = True
        self.layers = f"not compiled: it failed, {error}".splitlines()[0]
        if self.state is not None:
            self.state.compiled = set()
        log.warning("packed calls run with layers that are not compiled: %s", error)


class _Call:
    """Forward of a module with a compiled call, which it runs in packed calls; all others run the plain one."""

    def __init__(self, owner: CompiledCalls, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.owner, self.plain, self.compiled = owner, module._call_impl, compiled
        self.foreign = replaced_modules([module])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Checkpointing recomputes a layer outside of the model's call, so its own arguments decide first.
        forward = forward_among((*args, *kwargs.values())) or self._current()
        if self.owner.failed or forward is None or not forward.prepared:
            return self.plain(*args, **kwargs)
        try:
            limit = torch._dynamo.config.patch(recompile_limit=GRAPHS)
            with limit, whole_layers(), without_kernels(self.foreign):
                return self.compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self.owner.fail(error)
            return self.plain(*args, **kwargs)

    def _current(self) -> PackedForward | None:
        state = self.owner.state
        return None if state is None else state.current()


def run_plain_layers(model: nn.Module) -> None:
    """Let the layers of a model run as they are, whatever an earlier :class:`CompiledCalls` did to them."""
    root: Any = causal_lm(model)
    for hook in list(root._forward_hooks.values()):
        if isinstance(owner := getattr(hook, "__self__", None), CompiledCalls):
            owner._hook.remove()
    compiled = [module for module in root.modules() if isinstance(module._compiled_call_impl, _Call)]
    for module in compiled:
        module._compiled_call_impl = None
    if compiled and (state := state_of(root)) is not None:
        state.compiled = set()


def _why_not_any_length(model: nn.Module) -> str | None:
    """Explains why one graph of a layer cannot run rows of all lengths; None if it can."""
    state = state_of(causal_lm(model))
    if state is not None and state.anatomy.mixers:
        return "its recurrent layers are compiled for rows of one length alone"
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        return "FSDP gathers parameters in the calls of layers"
    return None
