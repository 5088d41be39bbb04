"""The released stacks: what is installed of each, and the command that trains in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROWS, CAPACITY, STEP = 4, 64, 2  # rows of a micro-batch, tokens of a row, micro-batches of the one step


Documents = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Run:
    """One step of a stack.

    Attributes:
        name: of its trainer.
        config: of its model.
        before: the weights that it began with, by name.
        gradients: of the step, by name.
        documents: tokens and labels of all that it trained.
        steps: how many there were.
    """

    name: str
    config: Any
    before: dict[str, Any]
    gradients: dict[str, Any]
    documents: Documents
    steps: int


def weights_of(model: Any) -> dict[str, Any]:
    """Returns copies of a model's parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@dataclass(frozen=True)
class Stack:
    """A stack as it is released.

    Attributes:
        packages: what pip installs into its folder, without dependencies; torch is that of the environment.
        shown: packages whose versions are printed.
        train: runs its command in this process, on a folder of data and into another one; what it trained, if not by a
            trainer of transformers.
        stand_in: the folder in ``stand_ins`` whose signatures have to be those of the release; None if it has none.
        environment: variables of its process.
        absent: modules that it imports at its start and does not need here, which empty ones stand for, each with the
            classes that are imported from it: ``module:Class``.
        first: modules to import before that, which work without the absent ones.
    """

    packages: tuple[str, ...]
    shown: tuple[str, ...]
    train: Callable[[Path, Path], list[Run] | None]
    stand_in: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


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


STACKS = {
    "axolotl": Stack(
        packages=(
            *("axolotl", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "transformers==5.16.1"),
            *("trl==1.9.0", "accelerate==1.13.0", "peft==0.20.0", "datasets==4.8.4", "huggingface_hub==1.17.0"),
            *("kernels<0.17", "bitsandbytes==0.50.2", "wandb==0.22.2", "protobuf<7", "posthog==6.7.11", "numba"),
            *("llvmlite", "evaluate==0.4.1", "schedulefree", "addict", "fire", "fastcore", "python-dotenv", "colorama"),
            *("termcolor", "backoff", "requests", "six", "distro", "gitpython", "gitdb", "smmap", "platformdirs"),
            *("sentry-sdk", "httpx", "httpcore", "anyio", "certifi", "idna", "h11", "sniffio"),
        ),
        shown=("axolotl", "transformers", "trl", "accelerate", "peft"),
        train=axolotl,
        stand_in="axolotl",
        environment={"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"},
    ),
    "llamafactory": Stack(
        packages=(
            *("llamafactory", "transformers==5.6.0", "trl==0.24.0", "peft==0.18.1", "accelerate==1.11.0"),
            *("datasets==4.0.0", "huggingface_hub==1.17.0", "tokenizers==0.22.2", "httpx", "httpcore", "anyio"),
            *("certifi", "idna", "h11", "sniffio", "omegaconf", "antlr4-python3-runtime==4.9.3", "fire", "termcolor"),
            *("tyro<0.9", "fsspec", "dill", "multiprocess", "xxhash"),
        ),
        shown=("llamafactory", "transformers", "trl", "accelerate", "peft"),
        train=llamafactory,
        stand_in="llamafactory",
        absent=("torchaudio",),  # its wheels are built for one version of torch each
    ),
    "swift": Stack(
        packages=(
            *("ms-swift", "transformers==5.19.0", "trl==0.29.1", "peft==0.20.0", "datasets==4.8.4", "modelscope"),
            *("modelscope_hub", "addict", "dacite", "binpacking", "json_repair", "cryptography", "cffi", "pycparser"),
            *("aiohttp", "aiohappyeyeballs", "aiosignal", "multidict", "yarl", "propcache", "frozenlist", "einops"),
            *("httpx", "httpcore", "anyio", "certifi", "idna", "h11", "sniffio"),
        ),
        shown=("ms-swift", "transformers", "trl", "peft"),
        train=swift,
        stand_in="swift",
    ),
    "unsloth": Stack(
        packages=("unsloth", "unsloth_zoo"),
        shown=("unsloth", "unsloth-zoo"),
        train=unsloth,
        stand_in="unsloth",
    ),
    "nemo": Stack(packages=("nemo_automodel",), shown=("nemo-automodel",), train=nemo, stand_in="nemo_automodel"),
    "lightning": Stack(
        packages=("lightning", "lightning-utilities", "torchmetrics"),
        shown=("lightning",),
        train=lightning,
        stand_in="lightning",
    ),
    "composer": Stack(
        packages=(
            *("mosaicml", "torchmetrics<1.7.5", "lightning-utilities", "torch_optimizer", "pytorch_ranger", "coolname"),
            *("tabulate", "py-cpuinfo", "importlib-metadata<9", "zipp"),
        ),
        shown=("mosaicml",),
        train=composer,
        stand_in="composer",
        first=("torchmetrics",),
        absent=(
            *("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.models"),
            *("torchvision.datasets:VisionDataset", "torchvision.models.resnet:Bottleneck:ResNet"),
            *("torchvision.ops:box_convert", "torchvision.utils:draw_segmentation_masks", "mcli"),
        ),
    ),
}
