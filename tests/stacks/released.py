"""The released stacks: what is installed of each, and the command that trains in it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.stacks import titan

if TYPE_CHECKING:
    import torch

ROWS, CAPACITY, STEP = 4, 64, 2  # rows of a micro-batch, tokens of a row, micro-batches of the one step


@dataclass(frozen=True)
class Step:
    """One step of a trainer, with parameters under the names that transformers gives them.

    Attributes:
        trainer: the name of its class.
        config: of the model, as transformers reads it.
        before: the weights that the step began with.
        gradients: what its micro-batches accumulated.
        documents: tokens and labels of each.
    """

    trainer: str
    config: Any
    before: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    documents: list[tuple[list[int], list[int]]]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Stack:
    """A stack as it is released.

    Attributes:
        packages: what pip installs into its folder, without dependencies; torch is that of the environment.
        shown: packages whose versions are printed.
        train: runs its command in this process, on a folder of data and into another one; returns the step where its
            trainer is not transformers'.
        stand_in: the folder in ``stand_ins`` whose signatures have to be those of the release; None if it has none.
        environment: variables of its process.
        absent: modules that it imports at its start and does not need here, which empty ones stand for.
        prepare: runs before it is imported.
    """

    packages: tuple[str, ...]
    shown: tuple[str, ...]
    train: Callable[[Path, Path], Step | None]
    stand_in: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    prepare: Callable[[], None] = _nothing


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


def torchtitan(data: Path, work: Path) -> Step:
    """As ``torchrun -m torchtitan.train --module tests.stacks.titan --config tiny --override.imports ...``."""
    from torchtitan.train import main
    from torchtitan.trainer import Trainer

    found: dict[str, Any] = {}
    train_step = Trainer.train_step

    def recorded(self: Any, batches: Any) -> None:
        [model] = self.model_parts
        adapter = self.config.model_spec.state_dict_adapter(self.model_config, None)
        named = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}
        weights = {name: p.full_tensor().detach().clone() for name, p in named.items()}
        train_step(self, batches)
        gradients = {name: p.grad.full_tensor() for name, p in named.items()}
        found.update(before=adapter.to_hf(weights), gradients=adapter.to_hf(gradients), trainer=type(self).__name__)
        found["config"] = titan.transformers_config(self.model_config.vocab_size)

    Trainer.train_step = recorded
    source = data / "tokens.jsonl"
    rows = "crosspack.integrations.torchtitan.packed_rows=" + json.dumps({"documents": str(source), "seed": 0})
    options = {
        "module": "tests.stacks.titan",
        "config": "tiny",
        "hf_assets_path": data / "model",
        "dump_folder": work,
        "training.local_batch_size": ROWS,
        "training.global_batch_size": ROWS * STEP,
        "training.seq_len": CAPACITY,
        "debug.seed": 0,
    }
    words = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    sys.argv[1:] = [*words, "--override.imports", "crosspack.integrations.torchtitan.packed_attention", rows]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29537")
    main()
    documents = [json.loads(line) for line in source.read_text().splitlines()]
    return Step(documents=[(each["input_ids"], each["labels"]) for each in documents], **found)


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
    "torchtitan": Stack(
        packages=(
            *("torchtitan==0.3.0", "spmd_types==0.2.3", "torch_checkpointing", "torchdata==0.11.0", "tyro", "einops"),
            *("docstring-parser", "shtab", "typeguard", "tensorboard"),
        ),
        shown=("torchtitan", "spmd-types", "torchdata"),
        train=torchtitan,
        stand_in="torchtitan",
        prepare=titan.on_the_cpu,
    ),
}
