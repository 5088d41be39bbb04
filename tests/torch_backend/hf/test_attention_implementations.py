"""The attention implementations around other people's kernels: what they refuse, how they are asked, what they compute.

Without a GPU the libraries are stood in for by `tests.torch_backend.flash_stand_ins`, which compute plain attention
from arguments in the libraries' own conventions. On a GPU (``-m gpu``) the real ones are held against the oracle.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from packing_core import reference
from packing_core.errors import UnsupportedError
from tests.torch_backend import flash_stand_ins
from torch_backend.ops.attention import IMPLEMENTATIONS, AttentionRequest, attention, request_of
from torch_backend.ops.attention.flash import FLASH2, FLASH3, FLASH4
from torch_backend.ops.attention.flash_family import assert_longest, backward_overflows
from torch_backend.ops.attention.flex import FLEX, block_mask
from torch_backend.ops.attention.order import CUDA
from torch_backend.ops.attention.probe import Probed
from torch_backend.ops.attention.reference import REFERENCE
from torch_backend.ops.attention.request import AttentionInputs
from torch_backend.ops.attention.varlen import VARLEN
from torch_backend.ops.attention.xformers import XFORMERS, _no_half_of_flash_attn
from torch_backend.segments import PackedMetadata

OURS = {"flash2": FLASH2, "flash3": FLASH3, "flash4": FLASH4, "varlen": VARLEN, "flex": FLEX, "xformers": XFORMERS}
REQUEST = AttentionRequest(
    tokens=1_000,
    heads=8,
    kv_heads=2,
    head_dim=64,
    value_dim=64,
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
    segments=4,
    max_seqlen=512,
    scale=0.125,
)
OPTIONS = {
    "plain": {},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "bidirectional": {"causal": False},
    "bidirectional window": {"causal": False, "window": 7},
    "scale": {"scale": 0.3},
}


# -- what each refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_every_implementation_is_in_the_table_and_serves_the_common_case(name):
    module, _, attribute = IMPLEMENTATIONS[name].partition(":")
    assert getattr(importlib.import_module(module), attribute) is OURS[name]
    assert name in CUDA
    assert OURS[name].refuses(REQUEST) is None


@pytest.mark.parametrize(
    ("names", "change", "reason"),
    [
        ("flash2 flash3 flash4 varlen xformers", {"device": torch.device("cpu")}, "runs on CUDA, not on cpu"),
        ("flash2 flash3 flash4 varlen xformers flex", {"dtype": torch.float32}, "not float32"),
        ("flash2 flash3 varlen xformers", {"head_dim": 60, "value_dim": 60}, "multiple of 8 up to 256, not 60"),
        ("flash2 flash3 flash4 varlen xformers", {"head_dim": 512, "value_dim": 512}, "not 512"),
        ("flash2 varlen xformers", {"value_dim": 32}, "values as wide as keys"),
        ("flash4", {"value_dim": 32}, "at widths 192 and 128 only"),
        ("flash4", {"head_dim": 192, "value_dim": 128}, "without grouped heads"),
        (
            "flash4",
            {"head_dim": 80, "value_dim": 80},
            "its backward takes heads whose width is a multiple of 32",
        ),
        ("flex", {"head_dim": 8, "value_dim": 8}, "16 to 256 channels"),
        ("flex", {"head_dim": 512, "value_dim": 512}, "16 to 256 channels"),
        ("varlen xformers", {"softcap": 30.0}, "no softcap"),
        ("flash2 flash3 varlen xformers", {"sinks": True}, "no sinks"),
        ("flash3 flash4 varlen xformers", {"alibi": True}, "no ALiBi"),
        ("flash3 flash4 varlen flex", {"dropout": 0.1}, "no dropout"),
        ("xformers", {"host_lengths": False}, "lengths on the host"),
        ("xformers", {"causal": False, "window": 7}, "windows are causal"),
        ("xformers flash3", {"compiling": True}, "torch.compile"),
        ("flex", {"device": torch.device("cpu")}, "no backward on the CPU"),
        ("flash2 varlen xformers", {"tokens": 2**27, "heads": 64}, "in 32 bits"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(names, change, reason):
    request = replace(REQUEST, **change)
    refusals = {name: implementation.refuses(request) or "" for name, implementation in OURS.items()}
    assert {name for name, text in refusals.items() if reason in text} == set(names.split())


def test_flash_attention_2s_backward_is_refused_from_the_first_element_that_overflows():
    # (T + 128 * segments) * heads * round_up(D, 32) elements; 2^31 of them overflow
    at_limit = replace(REQUEST, tokens=2**20 - 128 * 4, segments=4, heads=32, head_dim=64)
    assert "2,147,483,648 elements" in backward_overflows(at_limit)
    assert backward_overflows(replace(at_limit, tokens=at_limit.tokens - 1)) is None
    assert backward_overflows(replace(at_limit, head_dim=40)) is not None  # rounds up to 64
    assert backward_overflows(replace(at_limit, requires_grad=False)) is None


def test_a_segment_longer_than_max_seqlen_is_caught_where_only_the_device_knows_lengths():
    boundaries = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert_longest(PackedMetadata(boundaries, max_seqlen=5, tokens=8))
    with pytest.raises(RuntimeError, match="a segment is longer than max_seqlen=4"):
        assert_longest(PackedMetadata(boundaries, max_seqlen=4, tokens=8))


# -- how they are asked ------------------------------------------------------------------------------------------------


class Trial(Probed):
    """Plain attention under the probe, changed by ``spoil`` and counting its runs."""

    host_lengths = True

    def __init__(self, spoil=lambda out: out, forget=()):
        self.spoil, self.forget, self.runs = spoil, dict(forget), []

    def refuses(self, request):
        return None

    def __call__(self, inputs, request):
        self.runs.append(request)
        if "sinks" in self.forget:
            inputs = inputs._replace(sinks=None)
        request = replace(request, **{name: x for name, x in self.forget.items() if name != "sinks"})
        return self.spoil(REFERENCE(inputs, request))


CPU_REQUEST = replace(REQUEST, device=torch.device("cpu"), dtype=torch.float32)


def test_a_right_implementation_passes_its_trial_once_per_configuration():
    trial = Trial()
    assert trial.supports(CPU_REQUEST) is None
    assert trial.supports(replace(CPU_REQUEST, tokens=5, segments=1, scale=0.5)) is None
    assert len(trial.runs) == 1
    assert trial.supports(replace(CPU_REQUEST, window=9)) is None
    assert len(trial.runs) == 2
    assert trial.runs[0].heads // trial.runs[0].kv_heads == CPU_REQUEST.heads // CPU_REQUEST.kv_heads


@pytest.mark.parametrize(
    ("option", "forget"),
    [
        ({"window": 9}, {"window": None}),
        ({"softcap": 1.0}, {"softcap": None}),
        ({"causal": False}, {"causal": True}),
        ({"sinks": True}, {"sinks": True}),
    ],
)
def test_an_option_that_is_accepted_and_ignored_is_found_out(option, forget):
    request = replace(CPU_REQUEST, **option)
    assert Trial().supports(request) is None
    assert "its trial run" in Trial(forget=forget.items()).supports(request)


def test_a_wrong_gradient_is_found_out():
    class Negated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            return -dout

    assert "wrong by 2" in Trial(Negated.apply).supports(CPU_REQUEST)
    assert Trial(Negated.apply).supports(replace(CPU_REQUEST, requires_grad=False)) is None


def test_what_a_trial_raises_is_the_reason():
    def no_kernel(out):
        raise RuntimeError("no kernel image is available\nCUDA kernel errors might be ...")

    reason = Trial(no_kernel).supports(CPU_REQUEST)
    assert reason == "its trial run raised RuntimeError: no kernel image is available"
    assert "wrong by nan" in Trial(lambda out: out * float("nan")).supports(CPU_REQUEST)


def test_a_library_that_is_absent_is_a_reason_and_no_other_is_taken_silently(monkeypatch):
    for name in ("flash_attn", "flash_attn_interface", "xformers"):
        monkeypatch.setitem(sys.modules, name, None)
    for implementation in (FLASH2, FLASH3, FLASH4, XFORMERS):
        monkeypatch.setattr(type(implementation), "refuses", lambda self, request: None)  # or the CPU is the reason
        assert implementation.supports(CPU_REQUEST).startswith("cannot be imported: ")
    monkeypatch.undo()
    q = torch.zeros(4, 2, 16)
    with pytest.raises(UnsupportedError, match="flash4: runs on CUDA, not on cpu"):
        attention(q, q, q, PackedMetadata.from_lengths([4]), implementation="flash4")


def test_a_trial_leaves_random_numbers_grad_mode_and_fake_tensors_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    trial = Trial()
    before = torch.get_rng_state()
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert trial.supports(CPU_REQUEST) is None
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_inside_a_checkpointed_layer_is_no_part_of_the_layer():
    trial = Trial()

    def layer(x):
        assert trial.supports(CPU_REQUEST) is None  # runs in the forward, and not again when it is recomputed
        return x.exp()

    x = torch.zeros(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.ones(3)) and len(trial.runs) == 1


def test_torch_compile_imports_and_asks_while_tracing_and_keeps_one_graph(tmp_path, monkeypatch):
    (tmp_path / "trial_module.py").write_text(f"from {__name__} import Trial\nTRIAL = Trial()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(IMPLEMENTATIONS, "trial", "trial_module:TRIAL")
    packed = PackedMetadata.from_lengths([5, 3])
    q = torch.randn(8, 2, 16)
    compiled = torch.compile(
        lambda q: attention(q, q, q, packed, implementation="trial"), fullgraph=True, backend="eager"
    )
    assert "trial_module" not in sys.modules
    torch.testing.assert_close(compiled(q), attention(q, q, q, packed, implementation="reference"))
    assert len(sys.modules.pop("trial_module").TRIAL.runs) == 2  # its trial and the traced call


def test_xformers_does_not_take_flash_attention_4_for_flash_attention_2(tmp_path, monkeypatch):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    importlib.invalidate_caches()
    assert find_spec("flash_attn") is not None
    with _no_half_of_flash_attn():
        assert find_spec("flash_attn") is None
    assert find_spec("flash_attn") is not None
    (tmp_path / "flash_attn" / "flash_attn_interface.py").touch()
    importlib.invalidate_caches()
    with _no_half_of_flash_attn():
        assert find_spec("flash_attn") is not None


# -- what they hand to their library, on stand-ins ---------------------------------------------------------------------


def tensors(
    packed: PackedMetadata, *, heads=4, kv_heads=2, width=32, value_width=32, device="cpu", dtype=torch.float32
):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width)
    drawn = [torch.randn(packed.tokens, *shape, generator=generator).to(device, dtype) for shape in shapes]
    q, k, v = (x.requires_grad_() for x in drawn[:3])
    return q, k, v, drawn[3]


def requested(q, k, v, packed, options) -> AttentionRequest:
    tensors = {name: options.get(name) for name in ("sinks", "alibi_slopes")}
    numbers = {"causal": True, "window": None, "softcap": None, "scale": None, **options} | tensors
    return request_of(q, k, v, packed, dropout=0.0, **numbers)


def called(implementation, q, k, v, packed, options):
    """Call past ``supports``, which would refuse the CPU."""
    inputs = AttentionInputs(q, k, v, packed, options.get("sinks"), options.get("alibi_slopes"))
    return implementation(inputs, requested(q, k, v, packed, options))


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4", "varlen"])
@pytest.mark.parametrize("option", OPTIONS)
def test_arguments_mean_to_the_library_what_the_caller_meant(name, option, monkeypatch):
    flash_stand_ins.install(monkeypatch)
    options = OPTIONS[option]
    packed = PackedMetadata.from_lengths([9, 1, 20], entries=5, max_seqlen=32)
    q, k, v, dout = tensors(packed)
    request = replace(requested(q, k, v, packed, options), device=torch.device("cuda"), dtype=torch.bfloat16)
    if OURS[name].refuses(request) is not None:
        assert option in {"softcap", "sinks", "alibi"}
        return
    inputs = [q, k, v]
    if "sinks" in options:
        options = options | {"sinks": options["sinks"].clone().requires_grad_()}
        inputs.append(options["sinks"])
    found = called(OURS[name], q, k, v, packed, options)
    expected = attention(q, k, v, packed, implementation="reference", **options)
    torch.testing.assert_close(found, expected)
    for got, wanted in zip(torch.autograd.grad(found, inputs, dout), torch.autograd.grad(expected, inputs, dout)):
        torch.testing.assert_close(got, wanted)


def test_flash_attention_4_is_one_graph_under_torch_compile(monkeypatch):
    flash_stand_ins.install(monkeypatch)
    packed = PackedMetadata.from_lengths([9, 1, 20])
    q, k, v, dout = tensors(packed)
    eager = called(FLASH4, q, k, v, packed, {"window": 7})
    compiled = torch.compile(
        lambda *qkv: called(FLASH4, *qkv, packed, {"window": 7}), fullgraph=True, backend="aot_eager"
    )
    found = compiled(q, k, v)
    torch.testing.assert_close(found, eager)
    for got, wanted in zip(torch.autograd.grad(found, (q, k, v), dout), torch.autograd.grad(eager, (q, k, v), dout)):
        torch.testing.assert_close(got, wanted)


def test_flash_attention_4s_operators_keep_their_promises(monkeypatch):
    flash_stand_ins.install(monkeypatch)
    packed = PackedMetadata.from_lengths([9, 1, 20])
    q, k, v, dout = (x.detach() for x in tensors(packed, value_width=8))
    q = torch.randn(2, *q.shape).transpose(0, 1)[:, 1]  # a view into something larger, as after a split projection
    options = 20, 20, True, 6, 0, 0.0, 0.25
    sinks = torch.randn(4)
    for given in (None, sinks):
        out, lse = torch.ops.crosspack.flash4_forward(q, k, v, given, packed.cu_seqlens, None, *options)
        arguments = (q, k, v, given, packed.cu_seqlens, None, *options)
        torch.library.opcheck(torch.ops.crosspack.flash4_forward.default, arguments)
        arguments = (q, k, v, given, packed.cu_seqlens, None, out, lse, dout, *options)
        torch.library.opcheck(torch.ops.crosspack.flash4_backward.default, arguments)


# -- flex, which runs here ---------------------------------------------------------------------------------------------

LENGTHS = [5, 128, 1, 77, 130]  # 341 tokens in 3 blocks, the last cut off; 128 fills none of them whole


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("option", OPTIONS)
def test_flex_is_the_oracle_without_a_gradient_on_the_cpu(option):
    packed = PackedMetadata.from_lengths(LENGTHS, entries=9)
    q, k, v, _ = (x.detach() for x in tensors(packed, width=16, value_width=24))
    found = attention(q, k, v, packed, implementation="flex", **OPTIONS[option])
    cu_seqlens = np.cumsum([0, *LENGTHS])
    expected = reference.attention(q, k, v, cu_seqlens, **OPTIONS[option])
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(("causal", "window"), list(itertools.product([True, False], [None, 1, 127, 128, 255, 600])))
@pytest.mark.parametrize("lengths", [LENGTHS, [640], [128] * 5, [1] * 300, [500, 12], [3]], ids=str)
def test_the_block_mask_visits_the_blocks_that_hold_a_visible_pair(lengths, causal, window):
    packed = PackedMetadata.from_lengths(lengths)
    mask = block_mask(packed, causal=causal, window=window)
    token = torch.arange(packed.tokens)
    visible = mask.mask_mod(0, 0, token[:, None], token)
    segment = torch.repeat_interleave(torch.tensor(lengths))
    expected = segment[:, None] == segment
    if causal:
        expected &= token[:, None] >= token
    if window is not None:
        expected &= (token[:, None] - token).abs() < window
    assert torch.equal(visible, expected)
    by_torch = create_block_mask(mask.mask_mod, None, None, packed.tokens, packed.tokens, device="cpu")
    assert torch.equal(mask.to_dense(), by_torch.to_dense())
    for counts in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(mask, counts), getattr(by_torch, counts)), counts


def test_one_block_mask_serves_every_layer_of_a_kind():
    packed = PackedMetadata.from_lengths(LENGTHS)
    assert block_mask(packed, causal=True, window=None) is block_mask(packed, causal=True, window=None)
    assert block_mask(packed, causal=True, window=None) is not block_mask(packed, causal=True, window=40)
