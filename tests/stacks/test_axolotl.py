"""The plugin for axolotl on a stand-in, whose signatures ``python -m tests.stacks axolotl`` compares with a release."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import transformers

import crosspack
from packing_core.errors import ContaminationError, PackingError, UnsupportedError
from tests.stacks.training import is_exact
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, documents, llama, tiny_tokenizer


class Config(dict):
    """As axolotl's: options that are not set are None."""

    __getattr__ = dict.get


def registered(plugin: ModuleType, **options):
    config, made = Config(sequence_len=CAPACITY, **options), plugin.CrosspackPlugin()
    made.register(config)
    return made, config


def built(made, config, tmp_path):
    """Builds the trainer as axolotl does: with the plugin's class and arguments."""
    data = documents().remove_columns("comment")
    pads = transformers.DataCollatorForSeq2Seq(tiny_tokenizer())
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 9}
    options |= made.get_training_args(config) | {"num_train_epochs": 1}
    trainer = made.get_trainer_cls(config)(
        model=llama(),
        args=arguments(transformers.TrainingArguments, tmp_path, **options),
        train_dataset=data,
        eval_dataset=data,
        data_collator=pads,
        eval_data_collator=pads,
    )
    made.post_trainer_create(config, trainer)
    return trainer


def test_an_update_is_that_of_each_document_alone(plugin, tmp_path) -> None:
    made, config = registered(plugin, sample_packing=True, include_tkps=True)
    trainer = built(made, config, tmp_path)
    assert type(trainer).__name__ == "PackedTrainer" and type(trainer.train_dataset).__name__ == "Dataset"
    assert is_exact(trainer) and trainer.state.max_steps == 1, "axolotl's number of steps counts documents"
    assert trainer.evaluate()["eval_loss"] > 0


def test_the_loss_is_computed_without_logits_where_axolotl_adds_nothing_to_it(plugin) -> None:
    made, config = registered(plugin)
    assert made.get_trainer_cls(config).compute_loss is transformers.Trainer.compute_loss
    for adds in ({"include_tkps": True}, {"orpo_alpha": 0.1}, {"model_config_type": "gemma4"}):
        assert made.get_trainer_cls(Config(adds)).compute_loss is not transformers.Trainer.compute_loss


def test_its_packing_is_taken_over(plugin) -> None:
    sampled = {"sample_packing": True, "eval_sample_packing": True, "sample_packing_sequentially": True}
    made, config = registered(plugin, **sampled, sample_packing_bin_size=7)
    assert config["sample_packing"] is False and config["eval_sample_packing"] is False
    assert made.options == {"max_segments": 7}
    assert made.get_training_args(config)["train_sampling_strategy"] == "sequential"
    made, _ = registered(plugin, sample_packing_bin_size=7, crosspack={"max_segments": 3})
    assert made.options == {"max_segments": 3}


def test_steps_follow_from_rows(plugin) -> None:
    made, config = registered(plugin)
    found = made.get_training_args(config)
    assert found == {"average_tokens_across_devices": True, "max_steps": -1, "warmup_steps": 0.03}
    made, config = registered(plugin, max_steps=5, warmup_ratio=0.0)
    assert made.get_training_args(config) == {"average_tokens_across_devices": True, "warmup_steps": 0.0}
    made, config = registered(plugin, warmup_steps=4)
    assert "warmup_steps" not in made.get_training_args(config)


def test_trainers_of_trl_stay_axolotls(plugin, monkeypatch) -> None:
    given = []
    monkeypatch.setattr(crosspack, "enable_packing", lambda trainer, **options: given.append(options), raising=False)
    for config in (Config(rl="dpo", sequence_len=8), Config(reward_model=True, sequence_len=8)):
        made = plugin.CrosspackPlugin()
        assert made.get_trainer_cls(config) is None and made.get_training_args(config) == {}
        made.post_trainer_create(config, None)
    assert given == [{}, {}], "their batches are pairs, and have no capacity"


@pytest.mark.parametrize(
    ("option", "value", "way_out"),
    [
        ("sample_packing_group_size", 1000, "rows are planned over the whole data set here: leave it out"),
        ("multipack_real_batches", True, "here they stay rows: leave it out"),
        ("batch_flattening", "auto", "the whole data set is packed here: leave it out"),
        ("streaming", True, "cuts documents into rows before the trainer sees them: leave it out"),
        ("use_pose", True, "gives documents positions with gaps, which packing would restart: leave it out"),
        ("sample_packing", False, "pads each document: leave out either that or the plugin"),
        ("context_parallel_size", 2, "cuts rows, and documents with them: leave it out"),
    ],
)
def test_an_option_that_packing_cannot_follow_is_refused_by_name(plugin, option, value, way_out) -> None:
    with pytest.raises(UnsupportedError, match=f"axolotl's {option}={value!r} .*?{way_out}"):
        registered(plugin, **{option: value})


def test_another_plugin_with_a_trainer_is_refused_whichever_comes_first(plugin, monkeypatch) -> None:
    class Diffusion(plugin.BasePlugin):
        def get_trainer_cls(self, cfg):
            return transformers.Trainer

    made, config = registered(plugin)
    monkeypatch.setitem(plugin.PluginManager.get_instance().plugins, "axolotl.integrations.diffusion", Diffusion())
    with pytest.raises(
        UnsupportedError, match="one trainer, and axolotl.integrations.diffusion is another than that of"
    ):
        made.get_trainer_cls(config)
    with pytest.raises(UnsupportedError, match="one trainer, and SimpleNamespace is another than that of packed"):
        made.post_trainer_create(config, SimpleNamespace())
    assert made.get_trainer_cls(Config(rl="dpo")) is None
    registered(plugin, rl="dpo", sample_packing=False)


def test_options_are_those_of_enable_packing(plugin) -> None:
    made, _ = registered(plugin, crosspack={"overflow": "drop", "audit": True})
    assert made.options == {"overflow": "drop", "audit": True}
    with pytest.raises(PackingError, match="crosspack has no option capcity: its options are capacity, overflow, "):
        registered(plugin, crosspack={"capcity": 8})
    with pytest.raises(PackingError, match="crosspack is 8: pass a mapping of options, which are capacity, "):
        registered(plugin, crosspack=8)
    module, _, name = plugin.CrosspackPlugin().get_input_args().rpartition(".")
    assert module == "crosspack.integrations.axolotl"
    assert getattr(plugin, name)(crosspack={"capacity": 8}).crosspack == {"capacity": 8}


def test_a_trainer_whose_audit_finds_a_leak_does_not_train(plugin, monkeypatch, capsys) -> None:
    report = SimpleNamespace(verdict="contaminated")
    monkeypatch.setattr(crosspack, "enable_packing", lambda trainer, **options: trainer, raising=False)
    monkeypatch.setattr(crosspack, "audit", lambda trainer: report, raising=False)
    made = plugin.CrosspackPlugin()
    made.options = {"audit": True}
    with pytest.raises(ContaminationError, match="documents that are packed together see each other"):
        made.post_trainer_create(Config(rl="dpo"), SimpleNamespace(is_world_process_zero=lambda: True))
    assert "contaminated" in capsys.readouterr().out
