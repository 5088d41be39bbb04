"""The callback for Lightning on a stand-in; ``python -m tests.stacks lightning`` trains in a release."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import crosspack
from packing_core.errors import ContaminationError, PackingError, UnsupportedError
from tests.torch_backend.trainers.test_trainer import documents, llama

Module = torch.nn.Module


def module(model) -> Module:
    return torch.nn.ModuleDict({"model": model})  # as a LightningModule holds it


def packed(model, count=6):
    found = documents(count)
    rows = crosspack.PackedDataset(list(found["input_ids"]), 40, labels=list(found["labels"]))
    return crosspack.PackedCollator(model)([rows[i] for i in range(len(rows))])


def trainer(strategy="SingleDeviceStrategy"):
    return SimpleNamespace(strategy=type(strategy, (), {})(), is_global_zero=True)


def test_the_first_batch_of_a_patched_module_is_audited_once(plugin, capsys) -> None:
    callback, made = plugin.LightningPacking(), module(llama())
    callback.setup(trainer(), made, "fit")
    made.train()
    made["model"].model.layers[0].eval()  # frozen
    modes = [module.training for module in made.modules()]
    batch = packed(made["model"])
    callback.on_train_batch_start(trainer(), made, batch, 0)
    report = capsys.readouterr().out
    assert "LlamaForCausalLM, first batch: 6 documents in" in report and "leak 0.0e+00, tolerance 1e-04" in report
    assert [module.training for module in made.modules()] == modes and all(p.grad is None for p in made.parameters())
    callback.on_train_batch_start(trainer(), made, batch, 1)
    assert not capsys.readouterr().out


def test_fewer_bits_are_judged_by_what_other_documents_move(plugin, capsys) -> None:
    callback, made = plugin.LightningPacking(verify=False), module(llama().bfloat16())
    callback.setup(trainer(), made, "fit")
    callback.on_train_batch_start(trainer(), made, packed(made["model"]), 0)
    assert "leak 0.0e+00, tolerance 2e-02" in capsys.readouterr().out


def test_documents_that_see_each_other_stop_the_run(plugin, monkeypatch) -> None:
    callback, made = plugin.LightningPacking(), module(llama())
    batch = packed(made["model"])
    stock = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    made["model"].forward = _whole_rows(made["model"].forward)  # of a model that nothing patched
    with pytest.raises(ContaminationError, match="documents that are packed together see each other: LlamaForCausalLM"):
        callback.on_train_batch_start(trainer(), made, {**stock, "packed_lengths": batch["packed_lengths"]}, 0)


def _whole_rows(forward):
    """Attends over whole rows, as a model does that neither knows segments nor looks for positions that restart."""

    def run(input_ids, position_ids=None, packed_lengths=None, **rest):
        return forward(input_ids=input_ids.as_subclass(torch.Tensor), attention_mask=torch.ones_like(input_ids), **rest)

    return run


def test_batches_that_cannot_be_judged_are_refused_by_name(plugin) -> None:
    made = module(llama())
    batch = packed(made["model"])
    with pytest.raises(PackingError, match="the first batch of train_dataloader carries no segments: let it take rows"):
        plugin.LightningPacking().on_train_batch_start(trainer(), made, {"input_ids": batch["input_ids"]}, 0)
    with pytest.raises(UnsupportedError, match="this one has pixel_values: pass audit=False"):
        plugin.LightningPacking().on_train_batch_start(trainer(), made, {**batch, "pixel_values": None}, 0)
    untrained = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(PackingError, match="no token of the first batch is trained"):
        plugin.LightningPacking().on_train_batch_start(trainer(), made, untrained, 0)
    with pytest.raises(UnsupportedError, match=r"FSDPStrategy shards the model.*pass LightningPacking\(audit=False\)"):
        plugin.LightningPacking().setup(trainer("FSDPStrategy"), made, "fit")
    plugin.LightningPacking(audit=False, verify=False).setup(trainer("FSDPStrategy"), made, "fit")


@pytest.mark.parametrize("audit", [True, False])
def test_a_training_step_that_drops_the_segments_stops_the_run(plugin, audit) -> None:
    callback, made = plugin.LightningPacking(audit=audit), module(llama())
    callback.setup(trainer(), made, "fit")
    batch = packed(made["model"])
    callback.on_train_batch_start(trainer(), made, batch, 0)
    made["model"](torch.zeros_like(batch["input_ids"]))  # other tokens, such as a teacher's
    for _ in range(2):
        with pytest.raises(PackingError, match=r"its boundaries were left out, .* model\(\*\*batch\)"):
            made["model"](batch["input_ids"], labels=batch["labels"])
    assert made["model"](**batch).loss > 0
