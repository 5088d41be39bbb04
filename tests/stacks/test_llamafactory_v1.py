"""LLaMA-Factory's v1 on a stand-in, whose signatures ``python -m tests.stacks llamafactory`` compares."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packing_core.errors import PackingError, UnsupportedError
from tests.stacks.training import alone, documents_of, worst_error
from tests.torch_backend.trainers.test_trainer import documents, llama


def arguments(**given: Any) -> SimpleNamespace:
    sizes = {"micro_batch_size": 7, "global_batch_size": 24, "cutoff_len": 64, "batching_workers": 0, "seed": 0}
    return SimpleNamespace(**{"batching_strategy": "padding_free", "dist_config": None, **sizes, **given})


def test_an_update_is_that_of_each_document_alone(plugin, monkeypatch) -> None:
    monkeypatch.setattr(plugin.PackedSFTTrainer, "options", {"verify": False})
    model = llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = documents_of(documents())[:24]
    plugin.PackedSFTTrainer(arguments(), model, None, trained).fit()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    first_untrained = [(ids, [-100, *labels[1:]]) for ids, labels in trained]
    assert worst_error(gradients, alone(model.config, before, first_untrained))[0] < 1e-5


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"batching_strategy": "normal"}, "batching_strategy='normal' pads each document: set it to padding_free"),
        ({"batching_strategy": "dynamic_batching"}, "batching_strategy='dynamic_batching' pads each document"),
        ({"dist_config": {"name": "deepspeed"}}, "dist_config asks for DeepSpeed or for context parallelism"),
        ({"dist_config": {"name": "fsdp2", "cp_size": 2}}, "use fsdp2, or leave dist_config out"),
    ],
)
def test_what_packing_cannot_follow_is_refused_by_name(plugin, given, reason) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        plugin.PackedSFTTrainer(arguments(**given), None, None, [])


def test_the_launcher_gives_v1_its_trainer(plugin, tmp_path, monkeypatch) -> None:
    from crosspack.integrations import llamafactory

    file = tmp_path / "train.yaml"
    file.write_text(json.dumps({"model": "m", "crosspack": {"verify": False}}))
    monkeypatch.setattr(sys, "argv", ["llamafactory"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("USE_V1", "1")
    llamafactory.main(["sft", str(file), "cutoff_len=9"])
    kind, config = sys.modules["llamafactory.v1.trainers.sft_trainer"].ran[-1]
    assert kind is plugin.PackedSFTTrainer and "crosspack" not in config and kind.options == {"verify": False}
    with pytest.raises(PackingError, match="v1 trains by `sft FILE.yaml"):
        llamafactory.main(["dpo", str(file)])
    file.write_text(json.dumps({"crosspack": {"capacity": 9}}))
    with pytest.raises(PackingError, match="crosspack under v1 has no option capacity: its options are implementation"):
        llamafactory.main(["sft", str(file)])
    file.write_text(json.dumps({"crosspack": "audit"}))
    with pytest.raises(PackingError, match="crosspack under v1 is 'audit': pass a mapping of options"):
        llamafactory.main(["sft", str(file)])
