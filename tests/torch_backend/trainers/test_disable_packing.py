"""Trainers through calls in any order: each is at any time what one is that had the last of them alone."""

from __future__ import annotations

import ast
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.torch import load_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packing_core.errors import PackingError
from tests.imports import ROOT
from tests.processes import limited
from tests.torch_backend.preference import tokenizer
from tests.torch_backend.scored_trainers import datasets, dpo, trl
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, documents, llama
from tests.torch_backend.trainers.test_tree_rows import TREE_ATTENTION, packing, tiny, trainer_of
from torch_backend import PackedCollator
from torch_backend.hf.patch import state_of
from torch_backend.trainers.enable_packing import disable_packing, enable_packing


def even() -> Any:
    """Documents of one length, which need no padding."""
    ids = torch.arange(8 * 16).view(16, 8) % 60 + 3
    return datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


class Counted(transformers.Trainer):
    """Has a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


def plain(path: Any) -> Any:
    options = {"neftune_noise_alpha": 1.0, "gradient_checkpointing": True}
    args = arguments(transformers.TrainingArguments, path, max_steps=2, **options)
    return Counted(llama(), args, train_dataset=even())


def made_by_model_init(path: Any) -> Any:
    args = arguments(transformers.TrainingArguments, path, max_steps=2)
    return transformers.Trainer(model_init=llama, args=args, train_dataset=even())


def sft(path: Any) -> Any:
    args = arguments(trl.SFTConfig, path, packing=True, max_length=CAPACITY, max_steps=2)
    return trl.SFTTrainer(llama(), args, train_dataset=documents(), processing_class=tokenizer())


def preference(path: Any) -> Any:
    return dpo(path, max_steps=1)


SET = {"gradient_checkpointing", "_require_grads_hooks"}
OF_CHECKPOINTING = SET | {"_gradient_checkpointing_func"}  # what transformers leaves on a model, switched off
BUILT = {"Trainer": plain, "model_init": made_by_model_init, "SFTTrainer": sft, "DPOTrainer": preference}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"fast": False}, {"memory": "attention"})


def state_of_trainer(trainer: Any) -> Any:
    """Returns all that packing may change of a trainer."""
    parts = (trainer, trainer.args, trainer.accelerator, trainer.accelerator.dataloader_config)
    return [dict(vars(part)) for part in parts], list(trainer.callback_handler.callbacks)


def modules_of(trainer: Any) -> list[dict[str, Any]]:
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    return [dict(vars(module)) for model in models for module in model.modules()]


class Lives(RuleBasedStateMachine):
    """A trainer that packing is enabled in and disabled in, that trains, evaluates and is built anew from its files."""

    @initialize(kind=st.sampled_from(sorted(BUILT)))
    def build(self, kind: str) -> None:
        self.work = TemporaryDirectory()
        self.kind, self.options = kind, None
        self.start_with(BUILT[kind](self.work.name))

    def teardown(self) -> None:
        self.work.cleanup()

    def start_with(self, trainer: Any) -> None:
        trainer._set_signature_columns_if_needed()
        self.trainer, self.state, self.modules = trainer, state_of_trainer(trainer), modules_of(trainer)
        self.columns = list(trainer._signature_columns)

    def twin(self) -> Any:
        """A new trainer with the weights that this one writes, and the options of its last call."""
        twin = BUILT[self.kind](self.work.name)
        self.trainer.save_model(self.work.name)
        twin.model.load_state_dict(load_file(Path(self.work.name, "model.safetensors")))
        return twin

    @rule(options=st.sampled_from(OPTIONS))
    def enable(self, options: dict[str, Any]) -> None:
        assert enable_packing(self.trainer, verify=False, **options) is self.trainer
        self.options = options
        assert state_of(self.trainer.model) is not None

    @rule()
    def enable_what_is_refused(self) -> None:
        before, options = state_of_trainer(self.trainer), {"capacity": 4}  # shorter than the documents
        if self.kind in ("SFTTrainer", "DPOTrainer"):  # whose rows have no such option
            options = {"share_prefix": "yes"}
        with pytest.raises(PackingError):
            enable_packing(self.trainer, verify=False, **options)
        assert state_of_trainer(self.trainer) == before

    @rule()
    def disable(self) -> None:
        assert disable_packing(self.trainer) is self.trainer
        self.options = None
        after = modules_of(self.trainer)
        assert all(module["_compiled_call_impl"] is None for module in after if "_compiled_call_impl" in module)
        if self.state is None:  # training leaves more
            return
        left = set().union(*(each.keys() ^ old.keys() for each, old in zip(after, self.modules, strict=True)))
        assert left <= OF_CHECKPOINTING and not any(each.get(name) for each in after for name in SET)
        assert all(a["_forward_hooks"] == b["_forward_hooks"] for a, b in zip(after, self.modules, strict=True))

    @invariant()
    def without_packing_it_is_what_it_was(self) -> None:
        if hasattr(self, "trainer") and self.options is None and self.state is not None:
            assert state_of_trainer(self.trainer) == self.state and self.trainer._signature_columns == self.columns

    @rule(goes_on_anew=st.booleans())
    def train(self, goes_on_anew: bool) -> None:
        twin = self.twin()
        if self.options is not None:
            enable_packing(twin, verify=False, **self.options)
        found = []
        for trainer in (self.trainer, twin):
            trainer.optimizer = trainer.lr_scheduler = None
            torch.manual_seed(0)
            trainer.train()
            logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            found.append((logged[-trainer.state.global_step :], trainer.evaluate(trainer.train_dataset)["eval_loss"]))
        assert found[0] == found[1]
        pairs = zip(self.trainer.model.parameters(), twin.model.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        self.state = None  # of the training, too
        if goes_on_anew:
            disable_packing(twin)
            self.options = None
            self.start_with(twin)
            self.state = None


OFTEN = settings(max_examples=8, stateful_step_count=5, derandomize=True, deadline=None, database=None)
Lives.TestCase.settings = OFTEN
TestLives = pytest.mark.slow(Lives.TestCase)


@pytest.mark.parametrize("kind", BUILT)
def test_a_trainer_whose_packing_is_disabled_is_what_it_was_and_trains_so(kind: str) -> None:
    lives = Lives()
    lives.build(kind)
    lives.enable(OPTIONS[2])
    lives.enable_what_is_refused()
    lives.disable()
    lives.without_packing_it_is_what_it_was()
    lives.enable(OPTIONS[0])
    lives.train(goes_on_anew=False)
    lives.disable()
    lives.train(goes_on_anew=False)
    lives.enable(OPTIONS[1])  # over what accelerate wrapped around the forward that was patched before
    lives.train(goes_on_anew=False)
    lives.teardown()


def test_tree_rows_run_the_attention_that_was_registered_before() -> None:
    packing.register_tree_attention()
    trainer = trainer_of(tiny("qwen3"))
    before = ALL_ATTENTION_FUNCTIONS[TREE_ATTENTION]
    for _ in range(2):
        enable_packing(trainer)
    assert ALL_ATTENTION_FUNCTIONS[TREE_ATTENTION] is not before
    disable_packing(trainer)
    assert ALL_ATTENTION_FUNCTIONS[TREE_ATTENTION] is before and not hasattr(trainer, "packed_step")


# Figures of training, which stay as they are trained, and what is set for the time of one call of the trainer.
NOT_TAKEN_BACK = {"_total_train_tokens", "num_input_tokens_seen"}
FOR_ONE_CALL = {"gather_function", "logging_nan_inf_filter"}


def assigned(source: str) -> set[str]:
    """Returns the attributes of a trainer, and of its parts, that a module sets by itself."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            holder = ast.unparse(target.value) if isinstance(target, ast.Attribute) else ""
            if holder.removeprefix("self.").removeprefix("changes.").split(".")[0] == "trainer":
                names.add(target.attr)
    return names


def test_what_packing_sets_on_a_trainer_is_owned_by_its_changes() -> None:
    assert assigned("self.trainer.args.seed = 0\ntrainer.log += 1\nself.trainer = trainer") == {"seed", "log"}
    files = (ROOT / "torch_backend" / "trainers").glob("*.py")
    assert set().union(*(assigned(file.read_text()) for file in files)) == NOT_TAKEN_BACK | FOR_ONE_CALL


def test_a_collator_of_the_users_own_is_given_back_too(tmp_path: Path) -> None:
    args = arguments(trl.SFTConfig, tmp_path, max_length=CAPACITY, max_steps=2)
    options: dict[str, Any] = {"train_dataset": documents(), "processing_class": tokenizer()}
    model = llama()
    trainer = trl.SFTTrainer(model, args, data_collator=PackedCollator(model, capacity=CAPACITY), **options)
    before = dict(vars(trainer.data_collator))
    for _ in range(2):
        enable_packing(trainer, verify=False)
        assert trainer.packed_step.metrics.counts_by_mask
    disable_packing(trainer)
    assert vars(trainer.data_collator) == before


@pytest.mark.slow  # starts workers
def test_an_evaluation_has_the_batches_of_the_last_call_though_its_workers_persist(tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "per_device_eval_batch_size": 4}
    args = arguments(transformers.TrainingArguments, tmp_path, **options)
    trainer = transformers.Trainer(llama(), args, train_dataset=even(), eval_dataset=even())
    with limited():
        stock = trainer.evaluate()["eval_loss"]
        enable_packing(trainer, capacity=CAPACITY, verify=False)
        assert "packed_lengths" in next(iter(trainer.get_eval_dataloader()))
        assert trainer.evaluate()["eval_loss"] == pytest.approx(stock, rel=1e-6)
        disable_packing(trainer)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(stock, rel=1e-6)
