"""The memory of ``sdpa`` grows with the length of a document, never with its square, whatever the request has."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_backend.ops.attention import attention, sdpa
from torch_backend.segments import PackedMetadata

HEADS = 4
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 32},
    "window of a quarter": {"window": 64},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.zeros(HEADS)},
    "alibi": {"alibi_slopes": torch.full((HEADS,), 0.1)},
    "window and sinks": {"window": 32, "sinks": torch.zeros(HEADS)},
    "dropout": {"dropout": 0.1},
    "bidirectional": {"causal": False},
    "bidirectional window": {"causal": False, "window": 32},
}


class Memory(TorchDispatchMode):
    """The bytes of all live storages that operations made, and the most there were at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return out

    def _freed(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.live -= size


def peak(lengths: list[int], *, value_width: int = 8, **options: Any) -> int:
    """Bytes of forward and backward together, beyond the inputs."""
    tokens = sum(lengths)
    shapes = (tokens, HEADS, 8), (tokens, 2, 8), (tokens, 2, value_width)
    q, k, v = (torch.randn(shape).requires_grad_() for shape in shapes)
    with Memory() as memory:
        attention(q, k, v, PackedMetadata.from_lengths(lengths), implementation="sdpa", **options).sum().backward()
    return memory.peak


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 2^12 scores: one of these documents has up to 2^20."""
    monkeypatch.setattr(sdpa, "_SCORES_ON_CPU", 2**12)
    monkeypatch.setattr(sdpa, "_MASK", 2**12)


@pytest.mark.parametrize(
    ("name", "value_width"), [*((name, 8) for name in REQUESTS), ("plain", 4), ("window and sinks", 4)]
)
def test_twice_the_length_takes_twice_the_memory(name: str, value_width: int) -> None:
    short, long = (peak([length], value_width=value_width, **REQUESTS[name]) for length in (256, 512))
    assert long < 2.6 * short


@pytest.mark.parametrize("name", ["softcap", "window and sinks"])
def test_twice_the_documents_take_twice_the_memory(name: str) -> None:
    few, many = (peak([32] * count, **REQUESTS[name]) for count in (32, 64))
    assert many < 2.2 * few


# -- on a GPU, where torch chooses among more kernels ------------------------------------------------------------------


def peak_on_gpu(length: int, dtype: torch.dtype, implementation: str, shape: tuple[int, ...], **options: Any) -> int:
    """Bytes of forward and backward together, beyond the inputs; ``shape`` is heads, heads of keys and two widths."""
    heads, kv_heads, width, value_width = shape
    shapes = (length, heads, width), (length, kv_heads, width), (length, kv_heads, value_width)
    q, k, v = (torch.randn(each, device="cuda").to(dtype).requires_grad_() for each in shapes)
    given = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
    packed = PackedMetadata.from_lengths([length], device="cuda")
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, packed, implementation=implementation, **given).sum().backward()
    return torch.cuda.max_memory_allocated() - held


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value_width", [64, 32], ids=["values as wide as keys", "narrow values"])
@pytest.mark.parametrize("name", REQUESTS)
def test_twice_the_length_takes_twice_the_memory_on_a_gpu(
    name: str, value_width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_SCORES", 2**18)
    shape = HEADS, 2, 64, value_width
    short, long = (peak_on_gpu(length, dtype, "sdpa", shape, **REQUESTS[name]) for length in (4_096, 8_192))
    assert long < 2.6 * short


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["auto", "sdpa"])
@pytest.mark.parametrize(
    "options", [{"sinks": torch.zeros(64)}, {"softcap": 50.0, "window": 4_096}], ids=["sinks", "softcap"]
)
def test_a_long_document_of_many_heads_takes_a_few_gib(options: dict[str, Any], implementation: str) -> None:
    """Its score matrices would take 64 GiB each."""
    assert peak_on_gpu(16_384, torch.bfloat16, implementation, (64, 8, 64, 64), **options) < 6 * 2**30
