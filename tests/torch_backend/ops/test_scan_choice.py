"""Selection of scan implementations: the order by measured times, and the libraries whose kernels are operators.

No library is installed where these run: stand-ins with their functions' names and arguments take their place.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import torch_backend
from tests.torch_backend.kernels import interpret
from tests.torch_backend.models import alone, assert_same, collate, documents, in_float64, packed, tiny
from torch_backend.hf.anatomy.families import SCANS
from torch_backend.hf.edits.stand_ins import LayerSegments, scan
from torch_backend.hf.forward import RowChoice
from torch_backend.ops import operators
from torch_backend.ops import scan as scans
from torch_backend.ops.scan import order, request
from torch_backend.ops.scan.libraries import flash_qla
from torch_backend.segments import PackedMetadata

DELTA, SSD = "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
SHORT = (39, 25, 31)  # a row has to have a chunk of tokens at least


@pytest.fixture
def faster_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels run on the CPU, and libraries are recorded as faster."""
    interpret(monkeypatch)
    recorded(monkeypatch, flash_qla=1.0, mamba_ssm=1.0, triton=2.0)


def recorded(monkeypatch: pytest.MonkeyPatch, **times: float) -> None:
    """As if these were the milliseconds that were measured; nothing was chosen yet."""
    monkeypatch.setattr(order, "_recorded", lambda name, packed: (1_024, times))
    monkeypatch.setattr(scans, "_chosen", {})


# -- stand-ins ---------------------------------------------------------------------------------------------------------


def install(monkeypatch: pytest.MonkeyPatch, place: str, **functions: Any) -> None:
    """Modules down to ``place``, of which the last has the functions."""
    for end in range(1, len(parts := place.split(".")) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
    for name, function in functions.items():
        setattr(sys.modules[place], name, function)
    monkeypatch.setattr(request, "find_spec", lambda name: object() if name in sys.modules else None)


def by_document(run: Any, boundaries: list[int], inputs: list[Tensor], dout: Tensor | None) -> list[Tensor]:
    """The output of ``run`` on each document, or the gradients of the inputs, of which those [1, T, ...] are cut."""
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        parts = []
        for start, stop in pairwise(boundaries):
            parts.append(run(*(x[:, start:stop] if x.shape[:2] == inputs[0].shape[:2] else x for x in leaves)))
        out = torch.cat(parts, 1)
        return [out.detach()] if dout is None else list(torch.autograd.grad(out, leaves, dout.to(out.dtype)))


def plain_rule(*inputs: Tensor) -> Tensor:
    q, k, v, g, beta = inputs
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    out: Tensor = torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]
    return out


def right(out: Tensor, boundaries: list[int], g: Tensor) -> Tensor:
    return out


def install_flash_qla(monkeypatch: pytest.MonkeyPatch, *, listed: bool = True, changed: Any = right) -> list[int]:
    """FlashQLA for heads of any width in float32; the tokens of each forward are listed."""
    calls: list[int] = []

    def checked(boundaries: Tensor) -> list[int]:
        size, starts, n, chunks = boundaries._flash_qla_prepared_varlen  # type: ignore[attr-defined]
        assert size == 64 and n == len(chunks) and len(starts) == len(boundaries)
        lengths = boundaries.diff().tolist()
        used = [[i, chunk] for i, length in enumerate(lengths) for chunk in range(-(-length // 64))]
        assert chunks.tolist()[: len(used)] == used and starts.tolist()[-1] == len(used)
        assert all(rest == [len(lengths) - 1, 0] for rest in chunks.tolist()[len(used) :]) and lengths[-1] == 0
        return boundaries.unique().tolist()

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Any, ...]:
        assert options.pop("auto_cp") is False and options.pop("output_final_state") is False
        calls.append(q.shape[1])
        boundaries = checked(options.pop("cu_seqlens"))
        (out,) = by_document(plain_rule, boundaries, [q, k, v, g, beta], None)
        return g.clone(), q.new_zeros(1, *v.shape[1:3], 64), changed(out, boundaries, g), None, None, None

    def backward(
        q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor, A: Tensor, do: Tensor, **options: Any
    ) -> tuple[Any, ...]:
        assert options.pop("auto_cp") is False
        dq, dk, dv, dg, db = by_document(plain_rule, checked(options.pop("cu_seqlens")), [q, k, v, sums, beta], do)
        return dq, dk, dv, db, dg, None

    def prepare_varlen_metadata(boundaries: Tensor, on_host: Tensor) -> Tensor:
        counts = (on_host.diff() + 63) // 64
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        chunks = [[i, chunk] for i, count in enumerate(counts.tolist()) for chunk in range(count)]
        if listed:
            boundaries._flash_qla_prepared_varlen = 64, starts, int(starts[-1]), torch.tensor(chunks)
        return boundaries

    install(monkeypatch, "flash_qla", chunk_gated_delta_rule_fwd=forward, chunk_gated_delta_rule_bwd=backward)
    install(monkeypatch, "flash_qla.utils.index", prepare_varlen_metadata=prepare_varlen_metadata)
    monkeypatch.setattr(flash_qla, "WIDTH", 16)
    monkeypatch.setattr(flash_qla, "DTYPES", (torch.float32,))
    flash_qla._takes_lists.cache_clear()
    request.refused.cache_clear()
    return calls


def install_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def plain(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        out: Tensor = mamba2_chunk_scan(x, dt, A, B, C, chunk_size=8, D=D)
        return out

    def boundaries(segments: Tensor) -> list[int]:
        assert segments.dtype == torch.int32 and len(segments) == 1
        return [0, *(1 + segments[0].diff().nonzero().flatten()).tolist(), segments.shape[1]]

    def forward(*inputs: Any, D: Tensor, seq_idx: Tensor) -> tuple[Any, ...]:
        *tensors, _ = inputs
        calls.append(tensors[0].shape[1])
        return (*by_document(plain, boundaries(seq_idx), [*tensors, D], None), None)

    def backward(dout: Tensor, *inputs: Any, D: Tensor, seq_idx: Tensor) -> tuple[Any, ...]:
        *tensors, _, _ = inputs
        dx, ddt, dA, dB, dC, dD = by_document(plain, boundaries(seq_idx), [*tensors, D], dout)
        return dx, ddt, dA, dB, dC, dD, None, None, None

    functions = {"_mamba_chunk_scan_combined_fwd": forward, "_mamba_chunk_scan_combined_bwd": backward}
    install(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", **functions)
    request.refused.cache_clear()
    return calls


# -- what they give ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("faster_libraries")
@pytest.mark.parametrize(("family", "library", "layers"), [("qwen3_next", "flash_qla", 1), ("mamba2", "mamba_ssm", 2)])
def test_a_library_that_is_faster_and_passes_its_trial_scans_the_row(
    family: str, library: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, docs = tiny(family), documents(SHORT)
    truth = alone(in_float64(copy.deepcopy(model)), docs)
    calls = install_flash_qla(monkeypatch) if library == "flash_qla" else install_mamba_ssm(monkeypatch)
    torch_backend.patch(model, implementation="sdpa", verify=False)
    assert_same(packed(model, docs, collate(docs, capacity=64, strategy="sequential")), truth, 2e-5)
    assert calls == [699, *[128] * layers]  # a trial, then each layer once
    assert f"scan by {library} (measured on documents of 1,024 tokens: " in str(torch_backend.explain(model))


@pytest.mark.usefixtures("faster_libraries")
def test_ours_runs_where_a_faster_library_does_not_and_explain_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_flash_qla(monkeypatch, listed=False)
    recorded(monkeypatch, flash_qla=1.0, triton=2.0)
    model, docs = tiny("qwen3_next"), documents(SHORT)
    torch_backend.patch(model, implementation="sdpa", verify=False)
    packed(model, docs, collate(docs, capacity=64, strategy="sequential"))
    reason = "its trial run raised UnsupportedError: this version of flash_qla would read the boundaries back"
    found = str(torch_backend.explain(model))
    assert "scan by Triton (measured on documents of 1,024 tokens: flash_qla 1.00 ms, triton 2.00 ms)" in found
    assert f"\n    not flash_qla: {reason}" in found
    assert f"flash_qla is installed and does not scan the row here, which costs speed: {reason}" in caplog.text


def zero_from_document_257_on(out: Tensor, boundaries: list[int], g: Tensor) -> Tensor:
    first = boundaries[256] if len(boundaries) > 256 else out.shape[1]
    return torch.cat((out[:, :first], 0 * out[:, first:]), dim=1)


def divided_by_decays_in_half_precision(out: Tensor, boundaries: list[int], g: Tensor) -> Tensor:
    decays = g.exp().half()
    return out * (decays / decays).to(out)[..., None]


@pytest.mark.usefixtures("faster_libraries")
@pytest.mark.parametrize("changed", [zero_from_document_257_on, divided_by_decays_in_half_precision])
def test_a_library_that_is_wrong_for_many_documents_or_fast_decays_does_not_scan_the_row(
    changed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_flash_qla(monkeypatch, changed=changed)
    model, docs = tiny("qwen3_next"), documents(SHORT)
    torch_backend.patch(model, implementation="sdpa", verify=False)
    packed(model, docs, collate(docs, capacity=64, strategy="sequential"))
    assert "flash_qla is installed and does not scan the row here, which costs speed: its trial run" in caplog.text


def test_flash_qla_is_not_tried_on_what_it_cannot_take() -> None:
    row, heads = PackedMetadata.from_lengths((64,)), torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16)
    assert flash_qla.unsupported(row, heads, heads) is None
    narrow = heads[..., :64]
    assert flash_qla.unsupported(row, narrow, heads) == "it takes heads of 128 channels, not of 64 and 128"
    assert flash_qla.unsupported(row, heads, heads.float()) == "it takes bfloat16 and float16, not float32"
    short = PackedMetadata.from_lengths((63,))
    assert flash_qla.unsupported(short, heads, heads) == "it takes rows of 64 tokens or more, not of 63"


# -- the order ---------------------------------------------------------------------------------------------------------


def test_the_nearest_measured_length_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {64: {"fast": 3.0, "triton": 1.0}, 4_096: {"fast": 1.0, "triton": 2.0}}
    monkeypatch.setattr(order, "RECORDED", {(9, 0): {DELTA: times}})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(PackedMetadata, "device", torch.device("cuda"))

    def tried(name: str, lengths: list[int], entries: int | None = None, known: bool = True) -> tuple[str, ...]:
        packed = PackedMetadata.from_lengths(lengths, entries=entries)
        packed.lengths = packed.lengths if known else None
        return order.by_time(name, ("triton", "fast", "other"), packed)

    assert tried(DELTA, [100, 20]) == ("triton", "fast", "other")
    assert tried(DELTA, [1_000]) == ("fast", "triton", "other")
    assert tried(DELTA, [1_000], entries=20) == ("fast", "triton", "other")  # empty segments are no documents
    assert tried(DELTA, [1_000], entries=20, known=False) == ("triton", "fast", "other")  # which the host cannot tell
    assert tried(SSD, [1_000]) == ("triton", "fast", "other")  # of which nothing was measured


@pytest.mark.usefixtures("faster_libraries")
def test_where_only_the_device_knows_the_documents_the_first_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_qla(monkeypatch)
    inputs = drawn_delta()

    def chosen(packed: PackedMetadata) -> str:
        q, k, v, g, beta = inputs
        call = DELTA, torch_chunk_gated_delta_rule, SCANS[DELTA], packed, (q, k, v), {"g": g, "beta": beta}
        return scans.choose(*call).implementation

    known, unknown = PackedMetadata.from_lengths(SHORT, entries=64), on_device_alone(SHORT, "cpu", 64)
    times = {True: {"flash_qla": 1.0, "triton": 2.0}, False: {"flash_qla": 2.0, "triton": 1.0}}
    monkeypatch.setattr(order, "_recorded", lambda name, packed: (1, times[packed.lengths is not None]))
    assert [chosen(unknown), chosen(known)] == ["triton", "flash_qla"]
    monkeypatch.setattr(scans, "_chosen", {})
    assert [chosen(known), chosen(unknown), chosen(known)] == ["flash_qla"] * 3


def test_what_a_model_on_another_device_chose_is_not_asked_in_a_compiled_layer(
    monkeypatch: pytest.MonkeyPatch, faster_libraries: None
) -> None:
    """A model that was audited on the CPU scanned document by document in compiled layers on a GPU."""
    q, k, v, g, beta = drawn_delta()
    call = DELTA, torch_chunk_gated_delta_rule, SCANS[DELTA], PackedMetadata.from_lengths(SHORT), (q, k, v)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(operators, "INTERPRETED", False)
        assert scans.choose(*call, {"g": g, "beta": beta}).implementation == "documents"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert scans.choose(*call, {"g": g, "beta": beta}).implementation == "triton"


# -- compiled layers and graphs ----------------------------------------------------------------------------------------


def drawn_delta(device: str = "cpu", heads: int = 2, width: int = 16, tokens: int = sum(SHORT)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, width, generator=generator) for _ in range(3))
    g, beta = (torch.rand(1, tokens, heads, generator=generator) for _ in range(2))
    g = -0.3 * g
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [x.to(device, torch.float32 if x is g else dtype).requires_grad_() for x in (q, k, v, g, beta)]


def drawn_ssd(device: str = "cpu", heads: int = 2, width: int = 16, tokens: int = sum(SHORT)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, b, c = (torch.randn(1, tokens, n, width, generator=generator).to(device, dtype) for n in (heads, 1, 1))
    dt = torch.rand(1, tokens, heads, generator=generator).to(device)
    rates, d = -torch.rand(heads, generator=generator).to(device), torch.rand(heads, generator=generator).to(device)
    return [y.requires_grad_() for y in (x, dt, rates, b, c, d)]


def scanned(name: str, packed: PackedMetadata, inputs: list[Tensor]) -> Tensor:
    segments = LayerSegments(packed)
    if name == DELTA:
        options = {"use_qk_l2norm_in_kernel": True, "seq_idx": segments}
        out: Tensor = scan(name, torch_chunk_gated_delta_rule, SCANS[name], *inputs, **options)[0]
    else:
        *five, d = inputs
        options = {"chunk_size": 8, "dt_softplus": True, "seq_idx": segments}
        out = scan(name, mamba2_chunk_scan, SCANS[name], *five, D=d, **options)
    return out


def on_device_alone(lengths: tuple[int, ...], device: str, entries: int) -> PackedMetadata:
    """Segments whose lengths the host does not know, with empty ones."""
    packed = PackedMetadata.from_lengths(lengths, device=device, entries=entries)
    packed.lengths = None
    return packed


@pytest.mark.usefixtures("faster_libraries")
@pytest.mark.parametrize(("name", "library"), [(DELTA, "flash_qla"), (SSD, "mamba_ssm")])
def test_a_compiled_layer_holds_the_library_in_one_graph(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install_flash_qla(monkeypatch) if name == DELTA else install_mamba_ssm(monkeypatch)
    inputs = drawn_delta() if name == DELTA else drawn_ssd()
    # The first uncompiled call has fewer tokens than the compiled ones.
    few = [x[:, :70].detach() if x.ndim > 1 and x.shape[1] == sum(SHORT) else x for x in inputs]
    scanned(name, PackedMetadata.from_lengths((70,)), few)
    right = scanned(name, PackedMetadata.from_lengths(SHORT, entries=5), inputs)
    assert len(scans._chosen) == 1
    dout = torch.randn_like(right)
    gradients = torch.autograd.grad(right, inputs, dout)
    segments = on_device_alone(SHORT, "cpu", 5)
    segments.seq_idx, segments.position_ids  # noqa: B018  as the decoder of a patched model does
    scans.prepare(segments)
    before = len(calls)
    torch._dynamo.reset()
    compiled = torch.compile(scanned, fullgraph=True, backend="aot_eager", dynamic=False)
    found = compiled(name, segments, inputs)
    torch.testing.assert_close(found, right)
    for a, b in zip(torch.autograd.grad(found, inputs, dout), gradients, strict=True):
        torch.testing.assert_close(a, b)
    assert len(calls) == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "library"), [(DELTA, "flash_qla"), (SSD, "mamba_ssm")])
def test_the_installed_library_is_recorded_in_a_graph_and_does_not_wait(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    drawn = drawn_delta if name == DELTA else drawn_ssd
    inputs = drawn("cuda", 32, 128, 1_024)
    lengths, others = (70, 300, 1, 64, 589), (589, 64, 1, 300, 70)
    dout = torch.randn_like(inputs[2 if name == DELTA else 0])

    def both(packed: PackedMetadata) -> list[Tensor]:
        out = scanned(name, packed, inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]

    recorded(monkeypatch, triton=1.0)
    right = {each: both(on_device_alone(each, "cuda", 8)) for each in (lengths, others)}
    recorded(monkeypatch, triton=2.0, **{library: 1.0})
    segments = on_device_alone(lengths, "cuda", 8)
    both(segments)  # compiles and tunes
    assert set(scans._chosen.values()) == {library}
    segments.forget()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both(segments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    segments.forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(segments)
    for each, truth in right.items():
        segments.cu_seqlens.copy_(on_device_alone(each, "cpu", 8).cu_seqlens)
        graph.replay()
        for a, b in zip(found, truth, strict=True):
            assert (a.float() - b.float()).norm() < 2e-2 * b.float().norm()


CONVOLUTION, SCAN = (True, False, None), (None, scans.ScanChoice("triton"), scans.ScanChoice("flash_qla"))
FIXED = {RowChoice(triton, scan) for triton in (True, None) for scan in SCAN}


def test_a_layer_has_fixed_shapes_where_its_convolution_and_its_scan_have() -> None:
    choices = [RowChoice(triton, scan) for triton in CONVOLUTION for scan in (*SCAN, scans.ScanChoice("naive"))]
    assert {choice for choice in choices if choice.fixed} == FIXED
