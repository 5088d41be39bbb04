"""audit(trainer): the verdict on stacks as people build them, and every planted leak is found."""

from __future__ import annotations

import copy
import json

import datasets
import numpy as np
import pytest
import torch
import transformers

import torch_backend
from packing_core import PackedDataset
from packing_core.errors import LayoutError, PackingError, UnsupportedError
from tests.torch_backend.models import tiny
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, documents, gpt_oss, llama, peft, sft
from torch_backend.trainers.enable_packing import enable_packing


def packing(model, tmp_path, **options):
    return sft(model, tmp_path, documents(), packing=True, max_length=CAPACITY, **{"bf16": False, **options})


def plain(model, tmp_path, kind=transformers.Trainer, data_collator=None, **options):
    settled = arguments(transformers.TrainingArguments, tmp_path, **options)
    return kind(model, settled, train_dataset=documents(), data_collator=data_collator)


def test_stock_trl_is_exact_on_a_dense_model(tmp_path) -> None:
    report = torch_backend.audit(packing(llama(), tmp_path))
    assert report.verdict == "exact", str(report)
    assert (report.trainer, report.model, report.dtype, report.rows) == ("SFTTrainer", "LlamaForCausalLM", "float32", 1)
    assert report.documents > 2 and report.counted == report.targets
    assert report.leak == report.noise == 0 and report.moved > 0.1


def test_stock_trl_is_contaminated_on_a_family_that_loses_positions_and_exact_after_enable_packing(tmp_path) -> None:
    trainer = packing(gpt_oss(), tmp_path)
    before = torch_backend.audit(trainer)
    assert before.verdict == "contaminated", str(before)
    assert before.cosine < 0.9 and before.leak > 0.1
    after = torch_backend.audit(enable_packing(trainer, verify=False))
    assert after.verdict == "exact", str(after)
    assert after.gradients < 1e-5


def test_the_model_that_train_will_make_is_judged(tmp_path) -> None:
    trainer = transformers.Trainer(
        model_init=gpt_oss,
        args=arguments(transformers.TrainingArguments, tmp_path),
        train_dataset=documents(),
        data_collator=transformers.DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True),
    )
    model = torch_backend.patch(trainer.model, verify=False)  # which train() replaces by another
    assert torch_backend.audit(trainer).verdict == "contaminated"
    assert trainer.model is model
    assert torch_backend.audit(enable_packing(trainer, verify=False)).verdict == "exact"


@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "bfloat16 weights"])
def test_below_float32_rounding_is_no_contamination(tmp_path, mixed) -> None:
    model = llama() if mixed else llama().bfloat16()
    report = torch_backend.audit(packing(model, tmp_path, bf16=mixed))
    assert (report.verdict, report.dtype) == ("exact", "bfloat16"), str(report)
    assert report.gradients > 1e-5
    assert torch_backend.audit(packing(gpt_oss(), tmp_path, bf16=True)).verdict == "contaminated"


def test_adapters_alone_are_compared(tmp_path) -> None:
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
    data = documents().remove_columns("comment")
    options = {"packing": True, "max_length": CAPACITY, "bf16": False}
    exact = torch_backend.audit(sft(llama(), tmp_path, data, adapter, **options))
    assert exact.verdict == "exact" and "lora" in exact.worst_parameter, str(exact)
    assert torch_backend.audit(sft(gpt_oss(), tmp_path, data, adapter, **options)).verdict == "contaminated"


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_hybrids_that_trl_refuses_without_causal_conv1d_train_exactly_with_lora(tmp_path, family) -> None:
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    data = documents().remove_columns("comment")
    trainer = sft(tiny(family), tmp_path, data, adapter, packing=True, max_length=CAPACITY, bf16=False)
    with pytest.raises(ValueError, match="can't keep packed sequences apart without `causal_conv1d`"):
        torch_backend.audit(trainer)
    report = torch_backend.audit(enable_packing(trainer, verify=False))
    assert report.verdict == "exact", str(report)
    trainer.train()


@pytest.mark.parametrize("rows", ["documents", "packed"])
def test_trainer_with_our_collator_is_exact(tmp_path, rows) -> None:
    trainer = plain(llama(), tmp_path)
    if rows == "packed":
        trainer.train_dataset = PackedDataset(documents().with_format("arrow")[:]["input_ids"], CAPACITY)
    enable_packing(trainer, capacity=None if rows == "packed" else CAPACITY, verify=False)
    report = torch_backend.audit(trainer)
    assert report.verdict == "exact", str(report)
    assert report.documents >= 2


def without_marks(features):
    ids = [torch.tensor(feature["input_ids"]) for feature in features]
    labels = [torch.tensor(feature["labels"]) for feature in features]
    return {"input_ids": torch.cat(ids)[None], "labels": torch.cat(labels)[None]}


def test_a_collator_that_loses_the_boundaries_is_found(tmp_path) -> None:
    report = torch_backend.audit(plain(llama(), tmp_path, data_collator=without_marks))
    assert report.verdict == "contaminated" and report.leak > 0.1, str(report)


def test_a_boundary_that_is_trained_is_found(tmp_path) -> None:
    """DataCollatorWithFlattening excludes it; here the label of a first token stays."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def boundaries_trained(features):
        batch = collator([{k: f[k] for k in ("input_ids", "labels")} for f in features])
        return batch | {"labels": batch["input_ids"].clone()}

    data = documents().remove_columns("labels")
    data = data.add_column("labels", data["input_ids"])
    trainer = plain(llama(), tmp_path, data_collator=boundaries_trained)
    trainer.train_dataset = data
    trainer.model.config.use_cache = False
    report = torch_backend.audit(trainer)
    assert report.verdict == "contaminated" and report.counted > report.targets, str(report)


class MeanOfRows(transformers.Trainer):
    """A loss of its own: the mean over documents' means, by which short documents weigh too much."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, lengths = inputs.pop("labels"), list(inputs["packed_lengths"]) if "packed_lengths" in inputs else None
        logits = model(**inputs).logits[0]
        lengths = lengths or [len(logits)]
        losses = [
            torch.nn.functional.cross_entropy(x[:-1], y[1:])
            for x, y in zip(logits.split(lengths), labels[0].split(lengths), strict=True)
        ]
        return torch.stack([loss for loss in losses if loss.isfinite()]).mean()


def test_a_loss_that_weighs_documents_by_packing_is_found(tmp_path) -> None:
    trainer = enable_packing(plain(llama(), tmp_path, MeanOfRows), verify=False)
    report = torch_backend.audit(trainer)
    assert report.verdict == "contaminated" and report.leak == 0, str(report)
    assert "contaminated, in its loss and not by a leak; loss" in str(report)


class Penalised(transformers.Trainer):
    """Adds to the loss over the targets of a step what the count of targets does not divide."""

    size = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + self.size * model.lm_head.weight.square().mean()


class ZLoss(transformers.Trainer):
    """Adds the mean over the targets of squared normalisers."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        targets = (
            inputs["shift_labels"]
            if "shift_labels" in inputs
            else torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        )
        return loss + 0.1 * outputs.logits.logsumexp(-1)[targets != -100].square().mean()


@pytest.mark.parametrize(("kind", "size"), [(Penalised, 0.1), (Penalised, 100.0), (ZLoss, 1.0)])
def test_what_the_count_of_targets_does_not_divide_is_no_contamination(tmp_path, kind, size) -> None:
    trainer = enable_packing(plain(llama(), tmp_path, kind), verify=False)
    trainer.size = size
    report = torch_backend.audit(trainer)
    assert report.verdict == "exact" and report.leak == 0, str(report)
    leaking = plain(llama(), tmp_path, kind, data_collator=without_marks)
    leaking.size = size
    assert torch_backend.audit(leaking).leak > 1e-3


class OwnMean(transformers.Trainer):
    """A mean over the batch's targets, whatever number it is told."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def test_a_loss_that_is_a_mean_of_its_own_is_exact(tmp_path) -> None:
    trainer = enable_packing(plain(llama(), tmp_path, OwnMean), verify=False)
    report = torch_backend.audit(trainer)
    assert report.verdict == "exact", str(report)


def test_the_trainer_is_as_before_and_trains_the_same(tmp_path) -> None:
    def losses(audited: bool) -> list[float]:
        trainer = packing(llama(), tmp_path)
        if audited:
            state, rng = copy.deepcopy(trainer.model.state_dict()), torch.get_rng_state()
            attributes, metrics = dict(trainer.__dict__), copy.deepcopy(trainer._metrics)
            torch_backend.audit(trainer)
            assert trainer.__dict__ == attributes | {"_metrics": metrics}
            assert torch.equal(torch.get_rng_state(), rng) and not trainer.accelerator._dataloaders
            assert all(torch.equal(a, state[name]) for name, a in trainer.model.state_dict().items())
            assert all(p.grad is None for p in trainer.model.parameters())
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(True) == losses(False)


def test_the_report_reads_as_text_and_json(tmp_path) -> None:
    report = torch_backend.audit(packing(llama(), tmp_path))
    assert str(report).startswith("SFTTrainer on LlamaForCausalLM (float32 on cpu, ")
    assert json.loads(report.to_json())["verdict"] == "exact"


def rows_of(lengths, tmp_path, rows=1, capacity=16, untrained=(), leaks=False):
    """A trainer of so many packed rows at a time, or of as many documents as one row that does not know them.

    Documents are in their order, and labels of some are all -100.
    """
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 64, length).tolist() for length in lengths]
    labels = [[-100] * len(x) if number in untrained else x for number, x in enumerate(ids)]
    options = {"per_device_train_batch_size": rows, "train_sampling_strategy": "sequential"}
    trainer = plain(llama(), tmp_path, data_collator=without_marks if leaks else None, **options)
    if leaks:
        trainer.train_dataset = datasets.Dataset.from_dict({"input_ids": ids, "labels": labels})
        return trainer
    trainer.train_dataset = PackedDataset(ids, capacity, labels=labels, strategy="sequential", seed=None)
    return enable_packing(trainer, verify=False)


def test_batches_are_taken_until_a_row_has_two_trained_documents(tmp_path) -> None:
    report = torch_backend.audit(rows_of([16, 16, 16, 9, 7, 16], tmp_path, untrained={1}))
    assert (report.verdict, report.documents, report.batches) == ("exact", 2, 4), str(report)
    assert not report.isolated and str(report).endswith("tolerance 1e-04")
    report = torch_backend.audit(rows_of([9, 7, 8, 5], tmp_path, 2, untrained={1}, leaks=True))
    assert report.leak > 0.1 and report.batches == 2, str(report)


@pytest.mark.parametrize("rows", [1, 2])
def test_where_no_document_shares_its_row_the_report_says_so(tmp_path, rows) -> None:
    report = torch_backend.audit(rows_of([16] * 4, tmp_path, rows))
    assert (report.verdict, report.documents, report.leak) == ("exact", rows, 0), str(report)
    assert f"; the batch, the best of {4 // rows}, has no trained document behind another one, which" in str(report)
    assert "; the batch has no trained document behind another one" in str(torch_backend.audit(rows_of([16], tmp_path)))


def test_a_leak_from_documents_without_targets_is_a_leak(tmp_path) -> None:
    report = torch_backend.audit(rows_of([6, 5] * 3, tmp_path, 2, untrained={0, 2, 4}, leaks=True))
    assert report.leak > 0.1 and report.batches == 1 and not report.isolated, str(report)
    assert torch_backend.audit(rows_of([6, 5] * 3, tmp_path, untrained={0, 2, 4}, capacity=11)).verdict == "exact"


@pytest.mark.parametrize("lengths", [[6, 5, 5], [1, 6, 9]])
def test_a_first_document_without_targets_is_no_contamination(tmp_path, lengths) -> None:
    report = torch_backend.audit(rows_of(lengths, tmp_path, untrained={0}))
    assert report.verdict == "exact" and report.documents == 3 and report.moved > 0.1, str(report)
    report = torch_backend.audit(rows_of(lengths, tmp_path, 3, untrained={0}, leaks=True))
    assert report.leak > 0.1 and report.batches == 1, str(report)


def test_what_cannot_be_judged_says_why(tmp_path) -> None:
    def shortened(features):
        return without_marks([{k: v[:3] for k, v in f.items() if k != "comment"} for f in features])

    with pytest.raises(LayoutError, match=r"document \d of the batch, \d+ tokens, is not in the collator's rows as it"):
        torch_backend.audit(plain(llama(), tmp_path, data_collator=shortened))
    trainer = plain(llama(), tmp_path)
    trainer.get_train_dataloader = lambda: [{}]
    with pytest.raises(PackingError, match="dataloader of Trainer does not call its data_collator, so nothing says"):
        torch_backend.audit(trainer)
    trainer = plain(llama(), tmp_path)
    trainer.train_dataset = documents(4)
    enable_packing(trainer, verify=False)
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: {**collator(rows), "labels": torch.full_like(collator(rows)["labels"], -100)}
    with pytest.raises(PackingError, match="all labels are -100: audit it with documents that have labels"):
        torch_backend.audit(trainer)
    trainer.args._n_gpu = 2
    with pytest.raises(
        UnsupportedError, match="Trainer spreads its model or its batches over devices: audit it in one"
    ):
        torch_backend.audit(trainer)
