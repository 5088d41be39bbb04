"""Wrappers of models on several ranks, and the whole weights and gradients of what is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch as mocked

import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from packing_core.budget import EPSILON, floor_of
from torch_backend import patch

Model = Any
Wrapper = Callable[[Model], Model]


def plain(model: Model) -> Model:
    return patch(model, verify=False)


def adapted(model: Model) -> Model:
    """LoRA on the output layer and elsewhere, with a base that is trained too."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        parameter.requires_grad_()
    return plain(model)


def ddp(**options: Any) -> Wrapper:
    return lambda model: DDP(plain(model), **options)


def with_idle_parameter(model: Model) -> Model:
    """A parameter that no forward uses: DDP waits for its gradient unless it looks for such parameters."""
    model.idle = nn.Parameter(torch.ones(3))
    return DDP(plain(model), find_unused_parameters=True)


def sharded(model: Model, *own: str) -> Model:
    """FSDP2 over each decoder layer, the modules named ``own`` and the root."""
    return shard(plain(model), *(model.get_submodule(name) for name in own))


def sharded_adapters(model: Model) -> Model:
    model = adapted(model)
    return shard(model, model.get_output_embeddings())


def shard(model: Model, *own: nn.Module) -> Model:
    """FSDP2 over each decoder layer, the modules ``own`` and the root, of a model as it is."""
    mesh, decoder = init_device_mesh("cpu", (dist.get_world_size(),)), model.get_decoder()
    for module in (*(getattr(decoder, "layers", None) or decoder.h), *own):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_by_fsdp_1(model: Model, **options: Any) -> Model:
    def wrap(module: nn.Module) -> FSDP1:
        return FSDP1(module, use_orig_params=True, device_id=torch.device("cpu"), **options)

    model = plain(model)
    model.lm_head = wrap(model.lm_head)
    model.model.layers = nn.ModuleList(wrap(layer) for layer in model.model.layers)
    return wrap(model)


def tensor_parallel(gathered: bool) -> Wrapper:
    """The output layer split over its rows; its logits come out whole, or as a DTensor."""

    def wrap(model: Model) -> Model:
        layout = ColwiseParallel(output_layouts=Replicate()) if gathered else ColwiseParallel(use_local_output=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return plain(parallelize_module(model, mesh, {"lm_head": layout}))

    return wrap


@contextmanager
def on_accelerators() -> Iterator[None]:
    """Accelerate shards and cuts on accelerators alone, so ranks that build trainers inside say that they have one."""
    stock = transformers.Trainer.create_accelerator_and_postprocess

    def create(trainer: Any) -> None:
        assert trainer.args.device.type == "cpu"
        # and not cpu:0, which FSDP1 takes for another device
        state = {"distributed_type": DistributedType.MULTI_XPU, "device": torch.device("cpu")}
        PartialState._shared_state.update(state)
        stock(trainer)

    with mocked.object(transformers.Trainer, "create_accelerator_and_postprocess", create):
        yield


def whole(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors gathered from all ranks, under the names of the model that no wrapper is around."""
    return {
        name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): (
            x.full_tensor() if isinstance(x, DTensor) else x
        ).clone()
        for name, x in found.items()
    }


def weights_of(model: Model) -> dict[str, Tensor]:
    with FSDP1.summon_full_params(model) if isinstance(model, FSDP1) else nullcontext():
        return whole({name: p.detach() for name, p in model.named_parameters()})


def gradients(model: Model) -> dict[str, Tensor]:
    with FSDP1.summon_full_params(model, with_grads=True) if isinstance(model, FSDP1) else nullcontext():
        return whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def assert_same_weights(many: dict[str, Tensor], one: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Every tensor of several ranks is that of one process."""
    assert many.keys() == one.keys()
    for name, weight in one.items():
        assert float((many[name] - weight).abs().max()) <= tolerance, name


def assert_same_loss(many: dict[str, Any], one: dict[str, Any]) -> None:
    """The loss of several ranks and their averaged gradients are those of one process, as the audit bounds rounding."""
    assert abs(many["loss"] - one["loss"]) <= 1e-6 * abs(one["loss"])
    sizes = [float(gradient.abs().max()) for gradient in one["gradients"].values()]
    assert max(sizes) > 1e-3
    assert many["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        error = float((many["gradients"][name] - gradient).abs().max())
        assert error <= floor_of(EPSILON["float32"]) * max(1.0, *sizes), f"{name}: {error:.1e}"
