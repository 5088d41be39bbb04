"""float8 in trainers and on ranks: what enable_packing, crosspack train, DDP and FSDP2 make of ``precision``."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from packing_core.errors import UnsupportedError, UnsupportedModelError
from tests.torch_backend.job.test_train import job as job  # a fixture
from tests.torch_backend.job.test_train import losses, with_options
from tests.torch_backend.job.test_train_options import HALF
from tests.torch_backend.models import collate, error, tiny
from tests.torch_backend.models import documents as tiny_documents
from tests.torch_backend.ranks import Raised, on_ranks
from tests.torch_backend.scored_trainers import dpo
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, documents, llama
from tests.torch_backend.wrappers import sharded_by_fsdp_1
from torch_backend import audit, disable_packing, enable_packing, explain, make_train_step, patch
from torch_backend.hf import float8
from torch_backend.hf.float8 import check_float8
from torch_backend.job.train import train


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "EMULATED", True)


def count(model: nn.Module) -> int:
    return sum(isinstance(module, Float8Linear) for module in model.modules())


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("by_init", [False, True])
def test_a_trainer_trains_in_float8_until_packing_is_disabled(by_init: bool, tmp_path: Any) -> None:
    options = arguments(transformers.TrainingArguments, tmp_path, max_steps=2)
    source = {"model_init": llama} if by_init else {"model": llama()}
    trainer = transformers.Trainer(**source, args=options, train_dataset=documents())
    enable_packing(trainer, CAPACITY, precision="float8")
    layers = count(trainer.model)
    assert layers == 7 * trainer.model.config.num_hidden_layers
    trainer.train()
    assert count(trainer.model) == layers  # model_init made another one
    assert any("multiply in float8 (rowwise_with_gw_hp)" in note for note in explain(trainer).notes)
    enable_packing(trainer, CAPACITY)
    assert count(trainer.model) == 0
    enable_packing(trainer, CAPACITY, precision="float8:rowwise")
    disable_packing(trainer)
    assert count(trainer.model) == 0 and type(trainer.model.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_trainer_whose_device_has_no_float8_is_left_as_it_was(tmp_path: Any) -> None:
    options = arguments(transformers.TrainingArguments, tmp_path)
    trainer = transformers.Trainer(llama(), options, train_dataset=documents())
    before = dict(vars(trainer))
    with pytest.raises(
        UnsupportedError, match=r"precision='float8' is not possible, because the model computes on cpu"
    ):
        enable_packing(trainer, CAPACITY, precision="float8")
    assert vars(trainer).keys() - before.keys() <= {"_crosspack_changes"} and not hasattr(trainer.model, "_crosspack")


@pytest.mark.usefixtures("emulated")
def test_the_reference_of_preferences_multiplies_as_the_policy(tmp_path: Any) -> None:
    trainer = dpo(tmp_path)
    trainer.ref_model.load_state_dict(trainer.model.state_dict())
    enable_packing(trainer, precision="float8")
    assert count(trainer.model) == count(trainer.ref_model) > 0
    trainer.train()
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert logged == pytest.approx(np.log(2), abs=1e-4)  # at the start both are one model


@pytest.mark.usefixtures("emulated")
def test_crosspack_train_trains_in_float8_and_compares_with_padded_float8(job: Any, tmp_path: Any) -> None:
    plain = losses(train(with_options(job, **HALF)))
    in_float8 = with_options(job, **HALF | {"precision": "float8"})
    result = train(dataclasses.replace(in_float8, runs=("padded", "packed"), output=tmp_path))
    assert result.audit is not None and result.audit.exact and losses(result) != plain
    np.testing.assert_allclose(losses(result), plain, rtol=3e-2)
    np.testing.assert_allclose(losses(result), losses(result, "padded"), rtol=1e-2)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.usefixtures("emulated")
def test_the_audit_of_a_trainer_says_what_shares_scales(tmp_path: Any) -> None:
    reports = {}
    for recipe in ("rowwise_with_gw_hp", "rowwise", "tensorwise"):
        options = arguments(transformers.TrainingArguments, tmp_path)
        trainer = transformers.Trainer(llama(), options, train_dataset=documents())
        reports[recipe] = audit(enable_packing(trainer, CAPACITY, precision=f"float8:{recipe}"))
    assert [report.verdict for report in reports.values()] == ["exact", "exact", "contaminated"]
    assert reports["rowwise_with_gw_hp"].leak == 0
    assert "(tensorwise, so documents of a row see each other's largest value)" in str(reports["tensorwise"])


def gradients_of_rank(kind: str, precision: str) -> tuple[float, dict[str, Any]]:
    """One step of the first rank's rows and of the second's, or of rows that are cut over both."""
    float8.EMULATED = True
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,)) if kind == "cut" else None
    model = patch(tiny("llama"), verify=False, mesh=mesh)
    if kind == "FSDP2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    wrapped: Any = model if kind == "FSDP2" else DistributedDataParallel(model)
    step = make_train_step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.0), precision=precision)
    parts = [collate(part) for part in (tiny_documents()[:4], tiny_documents()[4:])]
    loss = float(step(parts if mesh else parts[rank])["loss"])
    gradients = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    assert count(model) == 14 and list(model.state_dict()) == list(tiny("llama").state_dict())
    float8.EMULATED = False
    return loss, whole


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("kind", "precision"), [*product(("DDP", "FSDP2"), ("float8", "float8:tensorwise")), ("cut", "float8")]
)
def test_ranks_have_the_gradients_of_one_process(kind: str, precision: str) -> None:
    model = patch(tiny("llama"), verify=False)
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), precision=precision)
    documents = tiny_documents()
    right = float(step([collate(documents[:4]), collate(documents[4:])])["loss"])  # as the ranks have them
    loss, gradients = on_ranks(gradients_of_rank, kind, precision)
    assert loss == pytest.approx(right, rel=1e-5)
    assert all(error(gradients[name], p.grad) < 1e-4 for name, p in model.named_parameters() if p.grad is not None)


def trained_as_torchao_converts(gathers_float8: bool) -> tuple[list[float], str]:
    model = tiny("llama").to(torch.bfloat16)
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_float8)
    convert_to_float8_training(model.model.layers, config=config)
    patch(model, verify=False)
    for layer in (*model.model.layers, model):
        fully_shard(layer)
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    documents = tiny_documents()
    batch = collate(documents[:4] if torch.distributed.get_rank() == 0 else documents[4:])
    return [float(step(batch)["loss"]) for _ in range(3)], str(explain(step))


@pytest.mark.slow
def test_a_model_that_torchao_converted_gathers_float8_under_fsdp2() -> None:
    losses, explained = on_ranks(trained_as_torchao_converts, True)
    assert "14 linear layers multiply in float8 (as torchao converted them)" in explained
    assert losses[2] < losses[0] - 0.5
    assert losses == pytest.approx(on_ranks(trained_as_torchao_converts, False)[0], rel=1e-6)


def refused(kind: str) -> None:
    float8.EMULATED = True
    model = tiny("llama")
    try:
        if kind == "FSDP1":
            check_float8(sharded_by_fsdp_1(model), "float8")
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"model.layers.0.mlp.up_proj": ColwiseParallel()})
        check_float8(model, "float8")
    finally:
        float8.EMULATED = False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("FSDP1", "because FSDP1 has its weights as parts of one vector: use FSDP2"),
        ("tensor parallelism", "because tensor parallelism cuts the weight of layers.0.mlp.up_proj: use FSDP2 or DDP"),
    ],
)
def test_weights_that_are_cut_otherwise_are_refused(kind: str, says: str) -> None:
    with pytest.raises(Raised) as raised:
        on_ranks(refused, kind)
    assert all(says in error for error in raised.value.errors)


@pytest.mark.usefixtures("emulated")
def test_deepspeed_is_refused(tmp_path: Any) -> None:
    trainer = transformers.Trainer(
        llama(), arguments(transformers.TrainingArguments, tmp_path), train_dataset=documents()
    )
    trainer.is_deepspeed_enabled = True
    with pytest.raises(UnsupportedError, match="precision='float8' is not served under DeepSpeed: use FSDP2"):
        enable_packing(trainer, CAPACITY, precision="float8")
    trainer.model.model.layers[1].mlp.up_proj.weight.ds_id = 1
    with pytest.raises(UnsupportedModelError, match="DeepSpeed ZeRO-3 partitions its weights"):
        check_float8(trainer.model, "float8")
