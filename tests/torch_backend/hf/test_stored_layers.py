"""Linear layers of libraries that make their values (8 bits of bitsandbytes, HQQ), inside compiled layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch_backend.compiled_steps import DEVICES, assert_train_alike, with_gradient
from tests.torch_backend.compiled_steps import compiling as compiling
from tests.torch_backend.hf.test_stored_weights import adapted
from tests.torch_backend.models import error, tiny
from torch_backend import patch
from torch_backend.hf.quantised import bytes_beside_weights, quantised_layers, traceable_weights, why_weights_stay


def library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        pytest.skip(f"unsupported here: {name.partition('.')[0]} is no dependency of any extra")


def in_8_bits(old: nn.Linear, dtype: torch.dtype) -> Any:
    new = library("bitsandbytes.nn").Linear8bitLt(
        old.in_features, old.out_features, old.bias is not None, has_fp16_weights=False, threshold=6.0
    )
    new.load_state_dict(old.state_dict())
    return new.to(old.weight.device)


def in_hqq(bits: int) -> Callable[[nn.Linear, torch.dtype], Any]:
    def quantise(old: nn.Linear, dtype: torch.dtype) -> Any:
        hqq = library("hqq.core.quantize")
        options = hqq.BaseQuantizeConfig(nbits=bits, group_size=32, axis=1)
        return hqq.HQQLinear(copy.deepcopy(old), options, compute_dtype=dtype, device=str(old.weight.device))

    return quantise


KINDS: dict[str, Callable[[nn.Linear, torch.dtype], Any]] = {
    "8 bits of bitsandbytes": in_8_bits,
    **{f"HQQ, {bits} bits": in_hqq(bits) for bits in (8, 4, 3)},
}


def values(layer: Any) -> Tensor:
    """As the library makes them: what it multiplies rows of the identity with."""
    if hasattr(layer, "dequantize"):
        return layer.dequantize()  # type: ignore[no-any-return]
    scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return layer.weight.detach().as_subclass(Tensor).float() * scales[:, None] / 127


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_traced_layer_has_the_numbers_of_its_own(kind: str, dtype: torch.dtype, bias: bool) -> None:
    """To the bit without a bias, which HQQ adds to a rounded product. Off CUDA all of them multiply with the values."""
    torch.manual_seed(0)
    layer = KINDS[kind](nn.Linear(128, 192, bias), dtype)
    given = torch.randn(1, 37, 128).to(dtype)

    right = with_gradient(layer, given)
    exact = nn.functional.linear(
        given.double(), values(layer).double(), None if layer.bias is None else layer.bias.double()
    )
    assert why_weights_stay(layer) is None and quantised_layers([layer]) == [layer]
    with traceable_weights([layer]):
        torch._dynamo.reset()
        found = with_gradient(torch.compile(layer, backend="aot_eager", fullgraph=True), given)
    tolerance = 0.0 if not bias else 1e-6 if dtype == torch.float32 else 1e-2
    assert all(x.dtype == y.dtype and error(x, y) <= tolerance for x, y in zip(found, right, strict=True))
    assert error(found[0].double(), exact) <= (1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(with_gradient(layer, given)[0], right[0])


@pytest.mark.parametrize("compiling", DEVICES, indirect=True)
@pytest.mark.parametrize("kind", [name for name in KINDS if not name.endswith("3 bits")])
def test_compiled_layers_train_adapters_as_on_the_values(kind: str, compiling: str) -> None:
    models = []
    for dense in (False, True):
        root = tiny("qwen3").to(compiling).requires_grad_(False)
        for parent in list(root.get_decoder().modules()):
            for name, old in parent.named_children():
                if type(old) is nn.Linear:
                    new = KINDS[kind](old, torch.float32)
                    if dense:
                        old.weight.data = values(new).to(old.weight)
                    else:
                        setattr(parent, name, new)
        models.append(patch(adapted(root), implementation="triton", verify=False))
    assert len(quantised_layers([models[0]])) == 14
    scales, one = bytes_beside_weights(models[0], torch.float32)
    assert scales > 0 and one == 4 * max(values(layer).numel() for layer in quantised_layers([models[0]]))
    assert_train_alike(((model, True) for model in models), compiling)


def test_layers_whose_scales_are_elsewhere_are_named() -> None:
    layer = in_hqq(4)(nn.Linear(128, 192), torch.float32)
    layer.meta["scale_q"] = layer.meta.pop("scale")
    reason = "its weights are quantised: HQQLinear of hqq, whose scales are quantised, or on the host"
    assert why_weights_stay(layer) == reason
