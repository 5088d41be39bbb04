"""Writes the package of the Kernels Hub: our functions and layers with every module that they import, and nothing else.

    python -m tools.hub OUT

The modules are this project's own, copied with two changes: imports become relative, because a hub kernel is loaded
under a name of its own, and operators are registered under that name, so that it can be loaded beside an installed
crosspack. A package ``__init__`` is copied where something imports from it, and left empty elsewhere.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packing_core.errors import PackingError

NAME = "crosspack_kernels"
REPOSITORY = "crosspack/crosspack-kernels"
ROOT = Path(__file__).parents[2]
COPIED = ("packing_core", "torch_backend", "tools")
ENTRIES = ("tools.hub.functions", "tools.hub.layers")
OPERATORS, NAMESPACE = "torch_backend.ops.operators", 'NAMESPACE = "crosspack"'
BACKENDS = ("cuda",)

INIT = '''"""Packed attention, gated delta rule, short convolution and RoPE in Triton, exact for each document."""

from .tools.hub import layers
from .tools.hub.functions import (
    apply_rope,
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    flash_attn_func,
    flash_attn_varlen_func,
)

__all__ = [
    "apply_rope",
    "causal_conv1d_fn",
    "chunk_gated_delta_rule",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "layers",
]
'''

README = """\
---
library_name: kernels
license: apache-2.0
tags: [kernel]
---

# crosspack kernels {version}

Packed attention, the gated delta rule, the short convolution and RoPE in Triton, forward and backward, for rows that
hold several documents. They need torch, Triton and NumPy. The source is https://github.com/crosspack/crosspack, where
`python -m tools.hub` writes this repository.

Attention of any transformers model, by its FlashAttention path:

```python
model.set_attn_implementation("{repository}:flash_attn_varlen_func")
```

The layers of Qwen3-Next, Qwen3.5 and other hybrids, which then train packed rows without flash-linear-attention and
causal-conv1d:

```python
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping

names = ("chunk_gated_delta_rule", "causal_conv1d_fn")
layers = {{name: LayerRepository("{repository}", layer_name=name, version=1) for name in names}}
with use_kernel_mapping({{name: {{"cuda": layer}} for name, layer in layers.items()}}):
    model = kernelize(model, device="cuda", mode=Mode.TRAINING)
```

A batch states its boundaries by `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` and `seq_idx`, as
TRL's collators and `DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)` do.

`python benchmarks/benchmark.py` measures the functions beside flash-linear-attention and flash-attn, where these are
installed.
"""


def write(out: Path, backends: Sequence[str] = BACKENDS) -> Path:
    """Writes the repository into a new or empty folder.

    Args:
        out: gets ``build.toml``, ``README.md``, ``benchmarks``, ``torch-ext`` and, ready to be loaded, ``build``.
        backends: of Triton, ``cuda``, ``rocm`` or ``xpu``; ``cpu`` runs interpreted kernels alone.

    Returns:
        ``out``.

    Raises:
        PackingError: the folder holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise PackingError(f"{out} is not empty: give a new folder, or empty it")
    sources = {path: text for module in modules(ENTRIES) for path, text in [_copied(module)]}
    for path in list(sources):
        for parent in list(path.parents)[:-1]:
            sources.setdefault(parent / "__init__.py", "")
    sources[Path("__init__.py")] = INIT
    contents = "".join(f"{path}\n{sources[path]}" for path in sorted(sources))
    identity = f"_{NAME}_{hashlib.sha256(contents.encode()).hexdigest()[:10]}"
    operators = Path(*OPERATORS.split(".")).with_suffix(".py")
    if sources[operators].count(NAMESPACE) != 1:
        raise PackingError(
            f"{OPERATORS} has no line {NAMESPACE}: its operators would clash with an installed crosspack"
        )
    sources[operators] = sources[operators].replace(NAMESPACE, f'NAMESPACE = "{identity}"')

    _write_all(out / "torch-ext" / NAME, sources)
    for backend in backends:
        variant = out / "build" / f"torch-{backend}"
        _write_all(variant, sources)
        (variant / "metadata.json").write_text(json.dumps(_metadata(identity, backend), indent=2) + "\n")
    (out / "build.toml").write_text(_build_toml(backends))
    (out / "README.md").write_text(README.format(version=_version(), repository=REPOSITORY))
    (out / "benchmarks").mkdir()
    shutil.copyfile(ROOT / "tools/hub/benchmark.py", out / "benchmarks" / "benchmark.py")
    return out


def modules(entries: Sequence[str]) -> list[str]:
    """Returns the modules of this project that the entries import, directly or not, inside functions too."""
    found: list[str] = []
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.append(module)
            waiting += _imports(ast.parse(_file(module).read_text()))
    return sorted(found)


def _imports(tree: ast.AST) -> list[str]:
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            absolute = [name.name for name in node.names if name.name.partition(".")[0] in COPIED]
            if absolute:
                raise PackingError(
                    f"import {absolute[0]}: write from PACKAGE import MODULE, which can be made relative"
                )
        elif isinstance(node, ast.ImportFrom) and _ours(node):
            inside = [f"{node.module}.{name.name}" for name in node.names]
            found += [name if _exists(name) else str(node.module) for name in inside]
    return found


def _copied(module: str) -> tuple[Path, str]:
    """Returns where a module stands in the package, and its text with relative imports."""
    file = _file(module)
    path = file.relative_to(ROOT)
    lines = file.read_text().splitlines(keepends=True)
    dots = "." * len(path.parts)  # from a module's own package up to the root of the copy
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ImportFrom) and _ours(node):
            lines[node.lineno - 1] = re.sub(r"from (?=\w)", f"from {dots}", lines[node.lineno - 1], count=1)
    return path, "".join(lines)


def _ours(node: ast.ImportFrom) -> bool:
    return not node.level and str(node.module).partition(".")[0] in COPIED


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _exists(module: str) -> bool:
    return _file(module).is_file()


def _write_all(folder: Path, sources: dict[Path, str]) -> None:
    for path, text in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _metadata(identity: str, backend: str) -> dict[str, object]:
    return {
        "id": identity,
        "name": NAME.replace("_", "-"),
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def _build_toml(backends: Sequence[str]) -> str:
    names = ", ".join(f'"{backend}"' for backend in backends)
    return (
        f'[general]\nname = "{NAME.replace("_", "-")}"\nversion = 1\nedition = 5\nlicense = "Apache-2.0"\n'
        f'backends = [{names}]\n\n[general.hub]\nrepo-id = "{REPOSITORY}"\n\n[torch-noarch]\n'
    )


def _version() -> str:
    try:
        return version("crosspack")
    except PackageNotFoundError:
        return "from source"
