"""The command that trains in each stack, or the script that its users write."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.stacks import titan
from tests.stacks.runs import CAPACITY, ROWS, STEP, Documents, Run, weights_of


def axolotl(data: Path, work: Path) -> None:
    """As ``axolotl train train.yaml``."""
    from axolotl.cli.train import do_cli

    config = {
        "base_model": str(data / "model"),
        "plugins": ["crosspack.integrations.axolotl.CrosspackPlugin"],
        "crosspack": {"audit": True},
        "datasets": [{"path": str(data / "tokens.jsonl"), "ds_type": "json", "type": None}],
        "dataset_prepared_path": str(work / "prepared"),
        "output_dir": str(work / "out"),
        "sequence_len": CAPACITY,
        "sample_packing": True,
        "micro_batch_size": ROWS,
        "gradient_accumulation_steps": STEP,
        "num_epochs": 1,
        "optimizer": "sgd",
        "lr_scheduler": "constant",
        "learning_rate": 0.1,
        "val_set_size": 0,
        "bf16": False,
        "attn_implementation": "eager",
    }
    work.mkdir(parents=True, exist_ok=True)
    (work / "train.yaml").write_text(json.dumps(config))  # JSON is YAML
    do_cli(str(work / "train.yaml"))


def llamafactory(data: Path, work: Path) -> None:
    """As ``python -m crosspack.integrations.llamafactory train train.yaml``."""
    from crosspack.integrations.llamafactory import main

    config = {
        "model_name_or_path": str(data / "model"),
        "crosspack": {"audit": True},
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "chats",
        "dataset_dir": str(work),
        "template": "empty",
        "cutoff_len": CAPACITY,
        "neat_packing": True,
        "output_dir": str(work / "out"),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": STEP,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
    }
    work.mkdir(parents=True, exist_ok=True)
    (work / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": str(data / "chats.jsonl")}}))
    (work / "train.yaml").write_text(json.dumps(config))
    main(["train", str(work / "train.yaml")])


def llamafactory_v1(data: Path, work: Path) -> list[Run]:
    """As ``USE_V1=1 python -m crosspack.integrations.llamafactory sft train.yaml``, by either of v1's strategies."""
    import torch
    from llamafactory.v1.core.base_trainer import BaseTrainer

    from crosspack.integrations.llamafactory import main

    work.mkdir(parents=True, exist_ok=True)
    info = {"path": str(data / "chats.jsonl"), "source": "local", "converter": "alpaca"}
    (work / "data.yaml").write_text(json.dumps({"chats": info}))
    found: list[dict[str, Any]] = []
    fit, clip = BaseTrainer.fit, torch.nn.utils.clip_grad_norm_

    def recorded(self: Any) -> None:
        rendered = self.renderer.process_samples([self.train_dataset[i] for i in range(len(self.train_dataset))])
        documents = [(list(each["input_ids"]), list(each["labels"])) for each in rendered]
        found.append({"before": weights_of(self.model), "config": self.model.config, "documents": documents})
        found[-1]["name"] = f"v1's {type(self).__name__}, {self.args.batching_strategy}"
        torch.nn.utils.clip_grad_norm_ = lambda parameters, *rest: keep(self.model, parameters, *rest)
        fit(self)
        found[-1]["steps"] = self.global_step

    def keep(model: Any, *given: Any) -> Any:
        found[-1]["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        return clip(*given)

    BaseTrainer.fit = recorded
    config = {
        "model": str(data / "model"),
        "template": "chatml",
        "train_dataset": str(work / "data.yaml"),
        "output_dir": str(work / "out"),
        "batching_strategy": "padding_free",
        "cutoff_len": CAPACITY,
        "micro_batch_size": 12,  # documents
        "global_batch_size": 24,
        "num_train_epochs": 1,
        "batching_workers": 0,
        "bf16": False,
    }
    (work / "train.yaml").write_text(json.dumps(config))
    os.environ["USE_V1"] = "1"
    main(["sft", str(work / "train.yaml")])
    return [Run(**each) for each in found]


def swift(data: Path, work: Path) -> None:
    """As ``swift sft --external_plugins packed.py --packing true``."""
    work.mkdir(parents=True, exist_ok=True)
    plugin = work / "packed.py"
    plugin.write_text("from crosspack.integrations import swift\n\nswift.configure(audit=True)\n")
    from swift.pipelines import sft_main

    options = {
        "external_plugins": plugin,
        "packing": "true",
        "model": data / "model",
        "model_type": "llama",
        "template": "dummy",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "attn_impl": "sdpa",
        "dataset": data / "chats.jsonl",
        "split_dataset_ratio": 0,
        "max_length": CAPACITY,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": STEP,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "use_cpu": "true",
        "report_to": "none",
        "save_strategy": "no",
        "output_dir": work / "out",
    }
    sft_main([text for name, value in options.items() for text in (f"--{name}", str(value))])


_COMPILED = ["--compile.enable", "--compile.backend", "aot_eager"]
_SCAN = ["crosspack.integrations.torchtitan_hybrids.packed_delta_net"]
TITANS: tuple[tuple[str, str, list[str], list[str]], ...] = (  # configuration, name, options, further overrides
    ("tiny", "Llama", [], []),
    ("tiny", "Llama, compiled", _COMPILED, []),
    ("hybrid", "Qwen3.5", [], _SCAN),
    ("hybrid", "Qwen3.5, compiled", _COMPILED, _SCAN),
)


def torchtitan(data: Path, work: Path) -> list[Run]:
    """As ``torchrun -m torchtitan.train --module tests.stacks.titan --config tiny --override.imports ...``.

    Then with compiled layers, and both for a hybrid.
    """
    from torchtitan.train import main
    from torchtitan.trainer import Trainer

    found: dict[str, Any] = {}
    train_step = Trainer.train_step

    def recorded(self: Any, batches: Any) -> None:
        [model] = self.model_parts
        adapter = self.config.model_spec.state_dict_adapter(self.model_config, None)

        def in_transformers(named: dict[str, Any]) -> dict[str, Any]:
            named = {re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.", "", name): x for name, x in named.items()}
            return {name.replace(".language_model.", "."): x for name, x in adapter.to_hf(named).items()}

        text = {name: p for name, p in model.named_parameters() if not name.startswith("vision_encoder.")}
        before = in_transformers({name: p.full_tensor().detach().clone() for name, p in text.items()})
        train_step(self, batches)
        gradients = in_transformers({name: p.grad.full_tensor() for name, p in text.items()})
        found.update(before=before, gradients=gradients)

    Trainer.train_step = recorded
    source = data / "tokens.jsonl"
    rows = "crosspack.integrations.torchtitan.packed_rows=" + json.dumps({"documents": str(source), "seed": 0})
    imports = [rows, "crosspack.integrations.torchtitan.packed_attention"]
    documents = [json.loads(line) for line in source.read_text().splitlines()]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29537")
    runs = []
    for config, name, more, replaced in TITANS:
        options = {
            "module": "tests.stacks.titan",
            "config": config,
            "hf_assets_path": data / "model",
            "dump_folder": work / name.replace(", ", "-"),
            "training.local_batch_size": ROWS,
            "training.global_batch_size": ROWS * STEP,
            "training.seq_len": CAPACITY,
            "debug.seed": 0,
        }
        words = [text for option, value in options.items() for text in (f"--{option}", str(value))]
        sys.argv[1:] = [*words, *more, "--override.imports", *imports, *replaced]
        main()
        described = titan.transformers_hybrid_config() if replaced else titan.transformers_config(titan.VOCABULARY)
        trained = [(each["input_ids"], each["labels"]) for each in documents]
        runs.append(Run(name=name, config=described, documents=trained, steps=1, **found))
    return runs


def unsloth(data: Path, work: Path) -> None:
    """As a script that imports ``train_on_responses_only``, called before ``enable_packing`` and after it."""
    import unsloth  # noqa: F401 # it asks to be imported before the others
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from unsloth.chat_templates import train_on_responses_only

    import crosspack

    chats = [json.loads(line) for line in (data / "chats.jsonl").read_text().splitlines()]
    texts = [f"<s> w0 w0 w0 {chat['instruction']} w1 w1 w1 {chat['output']} </s>" for chat in chats]
    options: dict[str, Any] = {
        "max_length": 2 * CAPACITY,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": STEP,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
    }

    def built() -> Any:
        model = AutoModelForCausalLM.from_pretrained(data / "model")
        tokenizer = AutoTokenizer.from_pretrained(data / "model")
        texts_of = Dataset.from_dict({"text": texts})
        return SFTTrainer(model, SFTConfig(str(work), **options), train_dataset=texts_of, processing_class=tokenizer)

    parts = {"instruction_part": "w0 w0 w0", "response_part": "w1 w1 w1"}
    for late in (False, True):
        trainer = crosspack.enable_packing(built()) if late else built()
        train_on_responses_only(trainer, **parts)
        crosspack.enable_packing(trainer).train()


def packed_loader(data: Path, model: Any) -> tuple[Any, Documents]:
    """Returns a dataloader of one batch that holds all documents in packed rows, and the documents."""
    from torch.utils.data import DataLoader

    from crosspack import PackedCollator, PackedDataset

    rows = [json.loads(line) for line in (data / "tokens.jsonl").read_text().splitlines()]
    documents = [(row["input_ids"], row["labels"]) for row in rows]
    packed = PackedDataset([ids for ids, _ in documents], CAPACITY, labels=[labels for _, labels in documents])
    return DataLoader(packed, batch_size=len(packed), collate_fn=PackedCollator(model)), documents


def lightning(data: Path, work: Path) -> list[Run]:
    """As a script with a LightningModule around a transformers model."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from transformers import AutoModelForCausalLM

    from crosspack.integrations.lightning import LightningPacking

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(data / "model")
            self.gradients: dict[str, Any] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    loader, documents = packed_loader(data, module.model)
    before = weights_of(module.model)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[LightningPacking()], **options)
    trainer.fit(module, loader)
    return [Run("Trainer", module.model.config, before, module.gradients, documents, trainer.global_step)]


def composer(data: Path, work: Path) -> list[Run]:
    """As a script that trains Composer's wrapper of a transformers model."""
    import torch
    from composer import Callback, Trainer
    from composer.models import HuggingFaceModel
    from transformers import AutoModelForCausalLM

    from crosspack.integrations.composer import ComposerPacking, packed_spec

    class Gradients(Callback):
        found: Any = None

        def after_train_batch(self, state: Any, logger: Any) -> None:
            self.found = {name: p.grad.clone() for name, p in state.model.model.named_parameters()}

    model = AutoModelForCausalLM.from_pretrained(data / "model")
    loader, documents = packed_loader(data, model)
    before, kept = weights_of(model), Gradients()
    trainer = Trainer(
        model=HuggingFaceModel(model),
        train_dataloader=packed_spec(loader),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        callbacks=[ComposerPacking(), kept],
        device="cpu",
        accumulate_train_batch_on_tokens=True,
        progress_bar=False,
    )
    trainer.fit()
    return [Run("Trainer", model.config, before, kept.found, documents, trainer.state.timestamp.batch.value)]


def nemo(data: Path, work: Path) -> list[Run]:
    """As a loop over NeMo AutoModel's data and loss; its model classes and recipes need CUDA."""
    from datasets import Dataset
    from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
    from nemo_automodel.components.datasets.utils import neat_packed_collater
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from transformers import AutoModelForCausalLM

    from crosspack import patch, with_boundaries

    examples = [json.loads(line) for line in (data / "tokens.jsonl").read_text().splitlines()]
    documents = [(each["input_ids"], each["labels"]) for each in examples]
    shifted = [{"input_ids": ids, "labels": [*labels[1:], -100]} for ids, labels in documents]  # as its data sets do
    rows = list(neat_pack_dataset({"train": Dataset.from_list(shifted)}, "train", CAPACITY))

    contract = SimpleNamespace(packed_mask_type="document_ids", requires_packed_sequence_metadata=False)

    def collate(rows: list[Any]) -> dict[str, Any]:
        batch = neat_packed_collater(rows, packing=contract)
        del batch["_packed_seq_ids"]  # the same numbers, for its own models
        batch["shift_labels"] = batch.pop("labels")
        return batch

    model = AutoModelForCausalLM.from_pretrained(data / "model")
    before = weights_of(model)
    batch = with_boundaries(collate, patch(model))(rows)
    labels = batch.pop("shift_labels")
    loss = MaskedCrossEntropy()(model(**batch).logits, labels, num_label_tokens=int((labels != -100).sum()))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return [Run("a loop", model.config, before, gradients, documents, 1)]
