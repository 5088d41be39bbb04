"""Reads from the source of a forward which part of a layer reads what.

The forward of a decoder layer -> which of its norms is read by one other part alone, and which part's result is only
added to what it returns. The forward of an attention layer -> whether it reads its input by its projections alone.
Names of parts would say the same of most families and the wrong thing of some: ``post_attention_layernorm`` stands in
front of the MLP in Llama and behind attention in Gemma 2.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from textwrap import dedent
from typing import Any


@cache
def only_readers(forward: Callable[..., Any]) -> dict[str, str]:
    """Maps a part of a layer to the part whose result it alone reads.

    Found are statements ``x = self.norm(y)`` after which the next one that mentions ``x`` hands it to one other part,
    ``... = self.mlp(x)``, and none reads it later.
    """
    code = _source_of(forward)
    statements = [] if code is None else code.body
    found: dict[str, str] = {}
    for number, statement in enumerate(statements):
        made = _call_of_part(statement)
        if made is None or not isinstance(statement, ast.Assign):
            continue
        (target, *more), (name, call) = statement.targets, made
        if more or not isinstance(target, ast.Name) or len(call.args) != 1 or call.keywords:
            continue
        x = target.id
        mentions = [later for later in statements[number + 1 :] if _loads(later, x) or _stores(later, x)]
        reader = _call_of_part(mentions[0]) if mentions else None
        if reader is None or _loads(mentions[0], x) != 1 or not _is_input(reader[1], x):
            continue
        if len(mentions) == 1 or _stores(mentions[0], x):
            found[reader[0]] = name
    return found


@cache
def last_part(forward: Callable[..., Any]) -> str | None:
    """Names the part of a layer whose result is only added to what the layer returns; None if it is not seen.

    Seen are forwards that end in ``x = self.mlp(x)``, ``x = residual + x`` and ``return x``.
    """
    code = _source_of(forward)
    if code is None or len(code.body) < 3:
        return None
    made, added, returned = code.body[-3:]
    found = _call_of_part(made)
    if found is None or not isinstance(made, ast.Assign) or len(made.targets) > 1:
        return None
    x = ast.unparse(made.targets[0])
    match added, returned:
        case (
            ast.Assign(targets=[ast.Name(id=total)], value=ast.BinOp(ast.Name(id=left), ast.Add(), ast.Name(id=right))),
            ast.Return(value=ast.Name(id=result)),
        ) if total == result == x and (left == x) != (right == x):
            return found[0]
    return None


@cache
def reads_by(forward: Callable[..., Any], parts: Sequence[str]) -> bool:
    """Returns whether a forward reads its first argument by these parts, each once, and its shape alone."""
    code = _source_of(forward)
    if code is None or len(code.args.args) < 2:
        return False
    name, calls, shapes, mentions = code.args.args[1].arg, [], 0, 0
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and _is_input(node, name) and (part := _part(node.func)) is not None:
            calls += [part] if len(node.args) == 1 and not node.keywords else [""]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
            shapes += node.attr == "shape"
        elif _part(node) in parts:
            mentions += 1
    simple = sorted(calls) == sorted(parts) and mentions == len(parts) and not _stores(code, name)
    return simple and _loads(code, name) == len(calls) + shapes


def _source_of(forward: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        (found,) = ast.parse(dedent(inspect.getsource(inspect.unwrap(forward)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return found if isinstance(found, ast.FunctionDef) else None


def _part(node: ast.AST) -> str | None:
    """The name of ``self.name``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def _call_of_part(statement: ast.stmt) -> tuple[str, ast.Call] | None:
    """The part that an assignment calls, and the call, where it is all of its right side."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    name = _part(call.func) if isinstance(call, ast.Call) else None
    return None if name is None or not isinstance(call, ast.Call) else (name, call)


def _is_input(call: ast.Call, name: str) -> bool:
    """Returns whether a variable is the first argument of a call, or the one that is called hidden_states."""
    first = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "hidden_states"), None)
    return isinstance(first, ast.Name) and first.id == name


def _loads(tree: ast.AST, name: str) -> int:
    return sum(isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Load) for x in ast.walk(tree))


def _stores(tree: ast.AST, name: str) -> int:
    return sum(isinstance(x, ast.Name) and x.id == name and not isinstance(x.ctx, ast.Load) for x in ast.walk(tree))
