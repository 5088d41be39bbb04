"""YAML that somebody else wrote: loaded without code, without aliases that multiply, and of a bounded size."""

from __future__ import annotations

from collections import Counter
from typing import Any

from packing_core.errors import PackingError, first_line
from packing_core.extras import require

MAX_TEXT = 1 << 20  # characters
_MAX_NODES = 100_000  # scalars, lists and mappings once every alias is written out


def load_yaml(text: str) -> Any:
    """Loads a document of plain values.

    A few lines of aliases of aliases stand for more values than any machine can hold, so they are counted first.

    Raises:
        PackingError: it is not YAML, holds anything but plain values, a mapping has a key twice, or it is too large.
    """
    yaml = require("yaml", extra="hf", distribution="PyYAML")
    if len(text) > MAX_TEXT:
        raise PackingError(f"it has more than {MAX_TEXT:,} characters")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if _nodes(yaml, root, {}) > _MAX_NODES:
            raise PackingError(
                f"its aliases stand for more than {_MAX_NODES:,} values: write out those that are needed"
            )
        _check_keys(yaml, root, set())
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PackingError(first_line(error)) from error


def _nodes(yaml: Any, node: Any, known: dict[int, int]) -> int:
    """Returns how many values a node stands for, aliases counted as often as they are used."""
    if id(node) not in known:
        known[id(node)] = _MAX_NODES + 1  # of a node inside itself
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in children for part in pair] if pairs else children
        known[id(node)] = 1 + sum(_nodes(yaml, part, known) for part in parts)
    return known[id(node)]


def _check_keys(yaml: Any, node: Any, seen: set[int]) -> None:
    """Raises PackingError where a mapping has a key twice, of which YAML's loader keeps the last value."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    pairs = isinstance(node, yaml.MappingNode)
    keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)) if pairs else {}
    if twice := [key for key, count in keys.items() if count > 1]:
        raise PackingError(f"line {node.start_mark.line + 1}: {twice[0]} is there twice: keep one of them")
    for part in node.value:
        for child in part if pairs else [part]:
            _check_keys(yaml, child, seen)
