"""Layers that carry state along the row: which run on whole rows, what convolves and scans there, what not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.kernels import interpret
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, tiny
from torch_backend.hf.anatomy.families import CONVOLUTION, SCANS
from torch_backend.hf.attention import KIND, causal_mask
from torch_backend.hf.edits import mixers, row_layers, stand_ins
from torch_backend.hf.edits.stand_ins import LayerSegments
from torch_backend.hf.override import as_function, original_class
from torch_backend.ops import conv, norm
from torch_backend.ops.scan import request
from torch_backend.ops.scan.selective import operators as selective
from torch_backend.segments import PackedMetadata

SHORT = (5, 11, 3)
# of the tiny model: layers that convolve
ON_THE_ROW = {
    "qwen3_next": 1,
    "qwen3_5_text": 1,
    "mamba2": 2,
    "lfm2": 1,
    "falcon_h1": 2,
    "nemotron_h": 1,
    "kimi_linear": 2,
    "recurrent_gemma": 2,
    "falcon_mamba": 1,
    "jamba": 1,
}
# Of these, passes of the norm kernel in each such layer: of q, of k, and behind the scan.
NORMS = {"qwen3_next": 3, "qwen3_5_text": 3, "kimi_linear": 3}
SMALL = {  # interpreted scans take long
    "falcon_mamba": {"state_size": 2, "num_hidden_layers": 1},
    "jamba": {"mamba_d_state": 2, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
}


@pytest.fixture
def convolved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Triton kernels run on the CPU; the tokens that the convolution's forward kernel was given are listed."""
    interpret(monkeypatch)
    monkeypatch.setattr(selective, "_L", 8)
    return counted(monkeypatch, conv)


def counted(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> list[int]:
    """The lengths of the first axis that a forward kernel is given from now on."""
    calls: list[int] = []
    run = kernels._apply

    def counting(x: Tensor, *rest: Any) -> Any:
        calls.append(len(x))
        return run(x, *rest)

    monkeypatch.setattr(kernels, "_apply", counting)
    return calls


@pytest.mark.parametrize("family", ON_THE_ROW)
def test_a_layer_of_known_functions_runs_once_on_the_row(
    family: str, convolved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    normed = counted(monkeypatch, norm)
    model, docs = tiny(family, **SMALL.get(family, {})), documents(SHORT)
    truth = alone(model, docs)
    exact = truth
    if family == "kimi_linear":  # whose float32 recurrence is further from float64 than the kernels are
        double = tiny(family).double()
        double.set_experts_implementation("eager")
        exact = alone(double, docs)
    torch_backend.patch(model, implementation="sdpa", verify=False)
    batch = collate(docs, capacity=16, strategy="sequential")
    assert batch["input_ids"].shape == (2, 16)
    assert_same(packed(model, docs, batch), exact, 2e-5)
    assert convolved == [32] * ON_THE_ROW[family]
    assert len(normed) == NORMS.get(family, 0) * ON_THE_ROW[family]
    assert torch.equal(model(input_ids=docs[0][None]).logits[0], truth.logits[0])
    assert len(convolved) == ON_THE_ROW[family]  # unpacked batches take the path that they took before
    assert "row -> its own forward on the row  convolution by Triton" in str(torch_backend.explain(model))


@pytest.mark.usefixtures("convolved")
def test_lightning_attention_is_a_scan_on_the_row() -> None:
    model, docs = tiny("minimax"), documents(SHORT)
    truth = alone(model, docs)
    torch_backend.patch(model, implementation="sdpa", verify=False)
    assert_same(packed(model, docs, collate(docs, capacity=16, strategy="sequential")), truth, 2e-5)
    assert "row -> its own forward on the row  scan by Triton" in str(torch_backend.explain(model))


@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma", "minimax"])
def test_any_other_layer_is_divided(family: str) -> None:
    model = torch_backend.patch(tiny(family), verify=False)
    assert "per document -> its own forward on batches of documents" in str(torch_backend.explain(model))


def unknown_scan(x: Tensor) -> Tensor:
    return x.cumsum(1)


def causal_conv1d_fn(x: Tensor) -> Tensor:
    return x


class Known(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return causal_conv1d_fn(x)


class UnknownFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return max((unknown_scan(y) for y in (causal_conv1d_fn(x),)), key=len)


class UnknownMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(causal_conv1d_fn(x))

    def mix(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class NoConvolution(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def test_what_a_forward_names_decides() -> None:
    assert callable(mixers.row_forward(Known))
    for layer in (UnknownFunction, UnknownMethod, NoConvolution):
        assert isinstance(mixers.row_forward(layer), str)


# -- libraries, played by plain torch ----------------------------------------------------------------------------------


def with_library(monkeypatch: pytest.MonkeyPatch, family: str, kernel: Callable[..., Any]) -> None:
    """As if the library of the family's scan were installed and transformers had bound ``kernel(plain)`` of it."""
    module = import_module(type(tiny(family)).__module__)
    (name,) = SCANS.keys() & vars(module).keys()
    plain = inspect.unwrap(as_function(getattr(module, name)))
    monkeypatch.setattr(module, name, wraps(plain)(kernel(plain)))
    monkeypatch.setattr(request, "find_spec", lambda name: object())


def told(calls: list[tuple[int, ...]]) -> Callable[[Any], Any]:
    """A kernel that scans each document by itself, from fla's ``cu_seqlens``."""

    def kernel(plain: Any) -> Any:
        def run(x: Tensor, *args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
            if cu_seqlens is None:
                return plain(x, *args, **kwargs)
            calls.append(tuple(x.shape[:2]))
            assert len(x) == 1 and cu_seqlens.dtype == torch.int32
            outputs = []
            for start, end in pairwise(cu_seqlens.unique().tolist()):
                cut = [
                    value[:, start:end] if isinstance(value, Tensor) and value.shape[:2] == x.shape[:2] else value
                    for value in (x, *args, *kwargs.values())
                ]
                outputs.append(plain(*cut[: 1 + len(args)], **dict(zip(kwargs, cut[1 + len(args) :], strict=True))))
            return torch.cat([out for out, _ in outputs], 1), None

        return run

    return kernel


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_fla_scans_the_row_if_it_passes_its_trial(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    with_library(monkeypatch, family, told(calls))
    model, docs = tiny(family), documents(SHORT)
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    batch = collate(docs, capacity=16, strategy="sequential")
    assert_same(packed(model, docs, batch), truth, 2e-5)
    assert calls[0] == (1, 699) and calls[1:] == [(1, 32)] * ON_THE_ROW[family]  # a trial, then each layer once
    assert "scan by fla, not by Triton: " in str(torch_backend.explain(model))


def fails_on_the_row(plain: Any) -> Any:
    def run(*args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
        if cu_seqlens is not None:
            raise RuntimeError("no kernel image")
        return plain(*args, **kwargs)

    return run


def leaks(plain: Any) -> Any:
    return lambda *args, **kwargs: plain(*args, **kwargs)


def fails(plain: Any) -> Any:
    """Like fla's backward on some GPUs with some versions of Triton."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out, state = plain(*args, **kwargs)
        out.register_hook(no_gradient)
        return out, state

    return run


def no_gradient(grad: Tensor) -> None:
    raise RuntimeError("incorrect results on this GPU")


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (fails_on_the_row, "fla on batches of documents (not on the row: its trial run raised RuntimeError: no kernel"),
        (leaks, "fla on batches of documents (not on the row: its trial run was wrong by "),
        (fails, "plain torch on batches of documents (not fla: its trial run raised RuntimeError: incorrect results"),
    ],
)
def test_a_library_that_fails_its_trial_is_passed_over_with_a_warning(
    kernel: Any, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, docs = tiny("qwen3_next"), documents(SHORT)
    truth = alone(model, docs)
    with_library(monkeypatch, "qwen3_next", kernel)
    torch_backend.patch(model, verify=False)
    assert_same(packed(model, docs, collate(docs, capacity=None)), truth, 2e-5)
    assert f"scan by {what}" in str(torch_backend.explain(model))
    assert ", not by Triton: " in str(torch_backend.explain(model))
    assert "fla is installed and does not scan the row here, which costs speed: its trial run " in caplog.text


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_states_and_missing_segments_are_refused() -> None:
    segments, x = LayerSegments(PackedMetadata.from_lengths((4,))), torch.zeros(1, 3, 4)
    with pytest.raises(UnsupportedModelError, match=f"a layer called {CONVOLUTION} without its segments"):
        stand_ins.convolve(causal_conv1d_fn, x, torch.zeros(3, 2))
    with pytest.raises(UnsupportedModelError, match=f"a layer called {CONVOLUTION} with a state"):
        stand_ins.convolve(causal_conv1d_fn, x, torch.zeros(3, 2), seq_idx=segments, initial_states=x)
    with pytest.raises(UnsupportedModelError, match="a layer called a scan without its segments"):
        stand_ins.scan("unknown_scan", unknown_scan, ("fla",), x)
    for state in ({"initial_state": x}, {"output_final_state": True}):
        with pytest.raises(UnsupportedModelError, match="a layer called a scan with a state"):
            stand_ins.scan("unknown_scan", unknown_scan, ("fla",), x, packed=segments, **state)


def test_what_the_kernel_does_not_know_is_left_to_the_model(convolved: list[int]) -> None:
    def gelu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        assert activation == "gelu" and x.shape == (2, 3, 8)
        return x + 1

    packed, x, weight = LayerSegments(PackedMetadata.from_lengths((4, 3))), torch.zeros(1, 3, 7), torch.zeros(3, 2)
    assert stand_ins.convolve(gelu, x, weight, activation="gelu", packed=packed).eq(1).all() and not convolved
    assert stand_ins.convolve(gelu, x, weight, activation="silu", packed=packed).eq(0).all() and convolved == [7]


def test_the_recurrent_block_of_griffin_on_a_row_is_that_of_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop stands in for the scan, whose kernel the tests of whole models interpret for long."""

    def loop(u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, packed: PackedMetadata) -> Tensor:
        out = []
        for inputs, gates in zip(*(x.split(packed.cu_seqlens.diff().tolist()) for x in (u, g)), strict=True):
            state = torch.zeros_like(u[0])
            for x, gate in zip(inputs, gates, strict=True):
                state = (gate * A[:, 0]).exp() * state + x * B[0]
                out.append(state)
        return torch.stack(out)

    monkeypatch.setattr(selective, "diagonal_scan", loop)
    model = tiny("recurrent_gemma").eval()
    block: Any = next(m for m in model.modules() if type(m).__name__ == "RecurrentGemmaRecurrentBlock")
    torch.manual_seed(0)
    row = torch.randn(1, 16, model.config.hidden_size)
    lengths = (5, 8, 3)
    with torch.no_grad():
        segments = LayerSegments(PackedMetadata.from_lengths(lengths))
        found, _ = row_layers.recurrent_gemma(block, segments, row)
        truth = [block(x, torch.arange(x.shape[1])[None], None, use_cache=False)[0] for x in row.split(lengths, 1)]
    torch.testing.assert_close(found, torch.cat(truth, 1), rtol=1e-5, atol=1e-6)


def test_a_gated_norm_with_hooks_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_layers, "runs_triton", lambda weight: True)
    norms = [m for m in tiny("qwen3_next").modules() if original_class(m).__name__ in row_layers.GATED_NORMS]
    found = norms[0]
    assert row_layers._is_fast(found)
    for register in (found.register_forward_hook, found.register_forward_pre_hook, found.register_full_backward_hook):
        handle = register(lambda *_: None)
        assert not row_layers._is_fast(found)
        handle.remove()
    assert row_layers._is_fast(found)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_layer_that_counts_tokens_may_see_chunks_too(attention: str) -> None:
    """Llama 4's layers without positions count the tokens of a document, by which their attention grows sharper."""
    options: dict[str, Any] = {"no_rope_layers": [0, 1], "layer_types": ["chunked_attention"] * 2, "floor_scale": 2}
    options |= {"num_hidden_layers": 2}
    model = tiny("llama4_text", attention_chunk_size=4, attn_scale=1.0, **options)
    model.set_attn_implementation(attention)
    docs = documents(SHORT)
    want = alone(model, docs)
    assert_same(packed(torch_backend.patch(model), docs), want)


def test_chunks_that_an_attention_cannot_see_are_refused() -> None:
    layer = tiny("llama4_text", attention_chunk_size=4).model.layers[0].self_attn
    setattr(layer, KIND, "chunked_attention")
    layer.config._attn_implementation = "flash_attention_2"
    assert causal_mask(layer, torch.zeros(2, 4, 8)) is None
    with pytest.raises(UnsupportedModelError, match="sees chunks of 4 tokens and counts those of a document of 5"):
        causal_mask(layer, torch.zeros(2, 5, 8))
