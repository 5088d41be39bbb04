"""Levels of memory: what a layer keeps between its forward and its backward, the same for compiled and plain layers.

    level -> what a layer keeps -> marks on the graph of a compiled layer, which its partitioner obeys
                                -> torch's checkpoint around a plain one

A level is set on the model, as ``gradient_checkpointing_enable`` sets it, and read from there. Compiled layers
recompute inside their own backward graph. A checkpoint around them would do the same, but it reads the random state,
which no CUDA graph may, and it hides the single operations, among which ``"selective"`` and ``"attention"`` choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import getitem
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from packing_core.errors import PackingError, UnsupportedError
from torch_backend.hf.anatomy.random_draws import find_draw
from torch_backend.hf.anatomy.structure import causal_lm, with_values
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.patch import context_of
from torch_backend.ops.recomputing import KeptResults, keeping, recomputing

Level = Literal["none", "selective", "attention", "full", "offload"]
LEVELS: tuple[Level, ...] = get_args(Level)
Memory = Level | Literal["auto"]  # the fastest level that fits (:mod:`.memory_fit`)

AUTO_OVER_RANKS = (
    'memory="auto" chooses by the tokens that a rank holds, and ranks over which documents are cut exchange again '
    'where they recompute, so all of them need one level: name it, memory="full" for example'
)

# Operators that pass over memory once; recomputing them costs less than what they would keep.
_CHEAP = ("rope", "norm")
# The last is how torch.compile names a function that it takes whole, as torchao's product of float8 is.
_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "linear_4bit", "trampoline_autograd_apply")
_ENABLE = "gradient_checkpointing_enable"
_WIDE = 2.0  # times as many columns out of a product as into it
_ATTENTION = ("attention", "attn", "flash4", "xformers")  # in names of operators, or of the libraries that they are of
_SCAN = "linear_attention"  # which has no keys to look at
# An operation, and the shapes of its tensors -> whether what it returns is kept.
Rule = Callable[[Any, Sequence[torch.Size]], bool]


def set_level(model: nn.Module, level: Level) -> None:
    """Let every decoder layer of a model keep what ``level`` says.

    Args:
        model: a transformers model, or a wrapper of one.
        level: ``"none"`` keeps all that the backward reads. ``"selective"`` keeps the results of attention, of scans
            and of products that are at most twice as wide as what they multiply, and recomputes the rest: norms,
            rotations, activations and the wide half of an MLP. ``"attention"`` keeps the input of each layer and the
            result of its attention, ``"full"`` the input alone. ``"offload"`` moves that to the host and back.

    Raises:
        PackingError, UnsupportedError: as :func:`check_level`.
    """
    root = causal_lm(model)
    check_level(root, level)
    if level == "none" and not level_layers(root):
        return
    # transformers 5.23 renamed them, and warns under the old names
    name = "disable" if level == "none" else "enable"
    # somebody else's, set on the model, would put another choice in place of this one, as TRL's does
    others = root.__dict__.pop(_ENABLE, None)
    try:
        change = getattr(root, f"activation_checkpointing_{name}", None)
        change = change or getattr(root, f"gradient_checkpointing_{name}")
        if level == "none":
            change()
        else:
            contexts = {"context_fn": _CONTEXTS[level]} if level in _CONTEXTS else {}
            change({"use_reentrant": False, **contexts})
    finally:
        if others is not None:
            root.__dict__[_ENABLE] = others


def hold_level(model: nn.Module, level: Level) -> None:
    """Set a level, and let whoever switches checkpointing off and on again get it back.

    TRL's trainers do so around generation and reference models, and would switch on that of their arguments.
    """
    set_level(model, level)
    root = causal_lm(model)
    root.__dict__.pop(_ENABLE, None)
    if level != "none":
        root.__dict__[_ENABLE] = partial(_enable_held, root, level)


def release_level(model: nn.Module) -> None:
    """Take back what :func:`hold_level` did; without effect where it was not called."""
    root = causal_lm(model)
    if _ENABLE in root.__dict__:
        hold_level(root, "none")
        root.disable_input_require_grads()  # which transformers enables with checkpointing


def _enable_held(root: nn.Module, level: Level, *_: Any, **__: Any) -> None:
    """In place of ``gradient_checkpointing_enable``."""
    set_level(root, level)


def check_level(model: nn.Module, level: str) -> None:
    """Check that a model can have a level of memory.

    Raises:
        PackingError: there is no such level.
        UnsupportedError: the layers of the family cannot recompute, something else recomputes them, or ranks would
            choose levels of their own.
    """
    if level not in (*LEVELS, "auto"):
        raise PackingError(f"memory={level!r} is no level: pass one of {', '.join(map(repr, (*LEVELS, 'auto')))}")
    root = causal_lm(model)
    if level == "auto" and context_of(root) is not None:
        raise UnsupportedError(AUTO_OVER_RANKS)
    if in_checkpoint_wrappers(root):
        raise UnsupportedError(
            f"checkpoint wrappers stand around modules of {type(root).__name__} and recompute them whatever "
            f'memory="{level}" says: leave out apply_activation_checkpointing, or memory',
            option="memory",
        )
    if level != "none" and not getattr(root, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"layers of {type(root).__name__} cannot recompute what they do not keep (gradient checkpointing), so "
            f'memory="{level}" is not possible: leave memory out',
            option="memory",
        )


def in_checkpoint_wrappers(model: nn.Module) -> bool:
    """Returns whether torch's checkpoint wrappers stand around modules, as FSDP's activation checkpointing has them."""
    return any(isinstance(module, CheckpointWrapper) for module in model.modules())


def level_layers(model: nn.Module) -> list[DecoderLayer]:
    """Returns the layers of a model whose activations are recomputed."""
    return list(_layers_that_recompute(model))


def _layers_that_recompute(model: nn.Module) -> Iterator[DecoderLayer]:
    for module in model.modules():
        if isinstance(module, DecoderLayer) and getattr(module, "gradient_checkpointing", False):
            yield module


def level_of(model: nn.Module) -> Level:
    """Returns the level of a model, however it was set.

    A choice among operations that somebody else made is ``"selective"``, and transformers' own offloading
    ``"offload"``.
    """
    layer = next(_layers_that_recompute(model), None)
    if layer is None:
        return "none"
    call = getattr(layer, "_gradient_checkpointing_func", None)
    made = getattr(call, "keywords", {}).get("context_fn", noop_context_fn)
    for level, contexts in _CONTEXTS.items():
        if made is contexts:
            return level
    if made is not noop_context_fn:
        return "selective"
    return "offload" if _moves_inputs(call) else "full"


def plain_layers_move_inputs(model: nn.Module) -> bool:
    """Returns whether layers that are not compiled move their inputs to the host, which transformers alone does."""
    layer = next(_layers_that_recompute(model), None)
    return layer is not None and _moves_inputs(getattr(layer, "_gradient_checkpointing_func", None))


def _moves_inputs(call: Any) -> bool:
    """Returns whether ``call`` is what transformers puts around torch's checkpoint for ``offload=True``."""
    return getattr(getattr(call, "func", None), "__module__", "").startswith("transformers.")


def draws_random_numbers(model: nn.Module) -> bool:
    """Returns whether dropout or noise is in force, whose random numbers a layer that recomputes must draw again."""
    return find_draw(causal_lm(model), ever=True, inside=True) is not None


def recomputing_inside(layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Inside, the compiled calls of layers recompute, and transformers' checkpointing of them is off."""
    return with_values((layer, "gradient_checkpointing", False) for layer in layers)


def recomputed_as_whole(call: Callable[..., Any], level: Level = "full") -> Callable[..., Any]:
    """Returns ``call`` of a layer under torch's checkpoint, as at ``"full"``: for one compiled as several graphs.

    At ``"attention"`` the second forward finds the results of our kernels and of flash-attention 4, which run between
    the graphs. Transformers puts its own checkpoint inside of what is compiled or around it, depending on its version.
    """
    contexts = _forward_and_again_with_attention if level == "attention" else _forward_and_again

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(call, **kwargs), *args, use_reentrant=False, context_fn=contexts)

    return run


def _forward_and_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), recomputing()


def _forward_and_again_with_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    results: list[KeptResults] = []
    return keeping(results), recomputing(results)


@cache
def marked(backend: Callable[..., Any], level: Level) -> Callable[..., Any]:
    """Returns a backend of ``torch.compile`` whose graphs keep what ``level`` says; the same for the same arguments."""

    def compile(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        mark(graph, level)
        return backend(graph, inputs)

    return backend if level == "none" else compile


def mark(graph: torch.fx.GraphModule, level: Level) -> None:
    """Mark the operations of a graph that Dynamo made, before it is differentiated.

    The marks are those of ``torch.utils.checkpoint`` inside of a compiled function; they pass through tracing, and the
    partitioner of forward and backward obeys them.
    """
    rule = _KEPT.get(level)
    for part in _forward_parts(graph):
        for node in part.nodes:
            if node.op in ("call_function", "call_method", "call_module"):
                kept = rule is not None and _is_kept(node, rule)
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = 1


def _forward_parts(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Graph]:
    """The graph and the forwards of the autograd functions in it."""
    yield graph.graph
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") == "autograd_function_apply":
            yield getattr(graph, node.args[0].target).graph


def _is_kept(node: torch.fx.Node, rule: Rule) -> bool:
    if node.target is getitem:  # one of several results
        return _is_kept(node.args[0], rule)  # type: ignore[arg-type]
    shapes = [x.meta.get("example_value") for x in (*node.all_input_nodes, node)]
    return rule(node.target, [x.shape for x in shapes if isinstance(x, Tensor)])


def keeps(operation: Any, shapes: Sequence[torch.Size]) -> bool:
    """Returns whether the selective level keeps what an operation returns.

    Args:
        operation: an operator, or a function of torch.
        shapes: of its tensors, first and last those that it multiplies and returns.
    """
    name = getattr(operation, "__name__", str(operation)).partition(".")[0].rpartition("::")[2]
    namespace = getattr(operation, "namespace", "")
    if namespace == "c10d":  # exchanges between ranks return nothing and write into an argument
        return False
    if name in _PRODUCTS:
        factor = shapes[1 if name == "addmm" else 0]
        return shapes[-1][-1] <= _WIDE * factor[-1]
    if namespace in ("", "aten", "prims"):
        return "attention" in name
    return not any(word in name for word in _CHEAP)


def is_attention(operation: Any, shapes: Sequence[torch.Size] = ()) -> bool:
    """Returns whether an operation is attention over keys, which takes time by the square of a document's length.

    Args:
        operation: an operator, or a function of torch, of this package or of a library of attention.
        shapes: as of :func:`keeps`; they do not matter.
    """
    if isinstance(operation, str):  # a method of a tensor, or a module
        return False
    name = getattr(operation, "__name__", str(operation))
    known = f"{getattr(operation, 'namespace', '')}::{name.rpartition('::')[2]}"
    return any(word in known for word in _ATTENTION) and _SCAN not in known


def _selective() -> Any:
    return _contexts_of(keeps)


def _attention() -> Any:
    return _contexts_of(is_attention)


def _contexts_of(rule: Rule) -> Any:
    kept, again = create_selective_checkpoint_contexts(partial(_policy, rule))
    kept.__class__ = _KeptBeforeChanges
    return kept, again


def _offload() -> Any:
    """Recomputes everything: outside compiled layers, inputs stay on the device.

    Contexts that do nothing would say the same, but torch.compile takes no others than dispatch modes.
    """
    return create_selective_checkpoint_contexts(_recompute_all)


def _recompute_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _policy(rule: Rule, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decides by a rule what plain layers keep, as ``torch.utils.checkpoint`` asks for it."""
    shapes = [x.shape for x in args if isinstance(x, Tensor)]
    if getattr(operation, "__name__", "").partition(".")[0] in _PRODUCTS:
        *_, first, second = shapes
        shapes = [*shapes, torch.Size((*first[:-1], second[-1]))]
    kept = bool(shapes) and rule(operation, shapes)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _KeptBeforeChanges(_CachingTorchDispatchMode):
    """Keeps a result as it was before a layer changes it in place, as those of Gemma 3n do.

    Recomputing changes it again. Torch means to raise there, but compares versions of tensors that do not share them
    (torch 2.13), so gradients would be wrong.
    """

    supports_higher_order_operators = True  # which torch dispatches to its own class alone otherwise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = {_address(x) for x in _written(func, args)}
        for kept in tree_leaves(dict(self.storage)) if written else ():
            if type(getattr(kept, "val", None)) is Tensor and _address(kept.val) in written:
                kept.__init__(kept.val.clone())
        return super().__torch_dispatch__(func, types, args, kwargs)


def _written(operation: Any, args: Sequence[Any]) -> list[Tensor]:
    """Returns the arguments that an operation changes in place; none while torch.compile traces, which rewrites it."""
    if not getattr(operation, "_schema", None) or not operation._schema.is_mutable:
        return []
    given = zip(operation._schema.arguments, args, strict=False)
    return [x for each, x in given if each.alias_info and each.alias_info.is_write and type(x) is Tensor]


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


# What is kept of a layer beside its input.
_KEPT: dict[Level, Rule] = {"selective": keeps, "attention": is_attention}
# By which torch's checkpoint is told the level, and by which it is read back. None for "full": torch.compile traces no
# checkpoint that is given contexts which do nothing.
_CONTEXTS: dict[Level, Any] = {"selective": _selective, "attention": _attention, "offload": _offload}
