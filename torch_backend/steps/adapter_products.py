"""Fewer products and passes for PEFT's LoRA in compiled layers, by rewriting the graph that Dynamo made of a layer.

A LoRA adapter of a projection adds ``scaling * (x @ A.T) @ B.T``. In the graph of a layer

- the adapters of projections that read the same x (queries, keys and values; gate and up) have one product of x, with
  their A one below the other: x [T, K] is read once, and so it is for the gradients of A, which are one product too.
  The gradient of x is one product that adds up what all of them give, where each would write [T, K] and a sum read it;
- ``scaling`` multiplies B [N, r] and not the adapter's output [T, N]. So the backward reads the gradient [T, N] of the
  projection as it is, and makes no scaled copy of it.

Parameters stay PEFT's own: A are put together in the graph, which copies r rows for each, where a product of x reads T.
What adds up is the same, and rounded less often. The sum of a projection and its adapter needs no pass of its own:
Inductor puts it into the kernel that reads the projection. Adapters that read something else than the others do, such
as x with dropout, keep a product of their own, and so do those of an x that the layer changes in place: between two of
them it would be another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend

_LINEAR = torch.nn.functional.linear
_A, _B = "_lora_A_", "_lora_B_"  # in the names that Dynamo makes of PEFT's parameters


@cache
def with_joined_adapters(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns a backend of ``torch.compile`` that rewrites its graphs; the same one for the same backend."""
    backend = lookup_backend(backend)

    def compile(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        join_adapters(module)
        return backend(module, inputs)

    return compile


def join_adapters(module: fx.GraphModule) -> None:
    """Rewrite the adapters in a graph of Dynamo, in place, before it is differentiated."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in [*module.graph.nodes]:
        if _is_product(node, _A) and not _is_written(node.args[0]):
            groups.setdefault((_value(node.args[0]), _example(node.args[1]).dtype), []).append(node)
        elif node.target is operator.mul and _is_product(node.args[0], _B) and isinstance(node.args[1], int | float):
            _scale_weight(node)
    for products in groups.values():
        if len(products) > 1:
            _join(products)
    module.recompile()


def _is_product(node: Any, name: str) -> bool:
    """Returns whether a node multiplies something with a parameter of such a name, and adds no bias."""
    if not isinstance(node, fx.Node) or node.target is not _LINEAR or len(node.args) < 2 or node.kwargs:
        return False
    weight, *bias = node.args[1:]
    return isinstance(weight, fx.Node) and name in str(weight.target) and not any(x is not None for x in bias)


def _value(node: Any) -> Hashable:
    """Names what a node holds: itself, or the cast of another, of which PEFT makes one for each adapter."""
    if _is_cast(node):
        return _value(node.args[0]), node.args[1:], tuple(node.kwargs.items())
    return node


def _is_written(node: Any) -> bool:
    """Returns whether the graph, which is not functional yet, changes what a node holds, or what it is cast from."""
    return _example(node)._version > 0 or (_is_cast(node) and _is_written(node.args[0]))


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "to"


def _scale_weight(scaled: fx.Node) -> None:
    """Put ``linear(h, B * scaling)`` in place of ``linear(h, B) * scaling``."""
    product, scaling = scaled.args
    hidden, weight, *_ = product.args  # type: ignore[union-attr]
    with scaled.graph.inserting_before(scaled):
        scaled_weight = _call(scaled.graph, operator.mul, (weight, scaling), _example(weight))
        _replace(scaled, _call(scaled.graph, _LINEAR, (hidden, scaled_weight), _example(product)))
    if not product.users:  # type: ignore[union-attr]
        scaled.graph.erase_node(product)  # type: ignore[arg-type]


def _join(products: list[fx.Node]) -> None:
    """Put slices of one product in place of several products of the same input."""
    graph, (x, _), weights = products[0].graph, products[0].args[:2], [product.args[1] for product in products]
    examples = [_example(product) for product in products]
    ranks = [example.shape[-1] for example in examples]
    with graph.inserting_before(products[0]):
        example = _example(weights[0])
        weight = _call(graph, torch.cat, (weights,), example.new_empty(sum(ranks), example.shape[1]))
        joined = _call(graph, _LINEAR, (x, weight), examples[0].new_empty(*examples[0].shape[:-1], sum(ranks)))
        begins = [0, *accumulate(ranks)]
        parts = [
            _call(graph, torch.narrow, (joined, -1, begin, rank), example)
            for begin, rank, example in zip(begins[:-1], ranks, examples, strict=True)
        ]
    for product, part in zip(products, parts, strict=True):
        _replace(product, part)


def _example(node: Any) -> Tensor:
    example: Tensor = node.meta["example_value"]
    return example


def _call(graph: fx.Graph, function: Callable[..., Any], args: tuple[Any, ...], example: Tensor) -> fx.Node:
    node = graph.call_function(function, args)
    node.meta["example_value"] = example
    return node


def _replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
