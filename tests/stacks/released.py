"""The released stacks: what is installed of each, and the command that trains in it."""

from __future__ import annotations

from tests.stacks import commands, titan
from tests.stacks.runs import Stack

_LLAMAFACTORY = (
    *("llamafactory", "transformers==5.6.0", "trl==0.24.0", "peft==0.18.1", "accelerate==1.11.0"),
    *("datasets==4.0.0", "huggingface_hub==1.17.0", "tokenizers==0.22.2", "httpx", "httpcore", "anyio"),
    *("certifi", "idna", "h11", "sniffio", "omegaconf", "antlr4-python3-runtime==4.9.3", "fire", "termcolor"),
    *("tyro<0.9", "fsspec", "dill", "multiprocess", "xxhash", "torchdata==0.11.0"),
)

STACKS = {
    "axolotl": Stack(
        packages=(
            *("axolotl", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "transformers==5.16.1"),
            *("trl==1.9.0", "accelerate==1.13.0", "peft==0.20.0", "datasets==4.8.4", "huggingface_hub==1.17.0"),
            *("kernels==0.17.2", "bitsandbytes==0.50.2", "wandb==0.22.2", "protobuf<7", "posthog==6.7.11", "numba"),
            *("llvmlite", "evaluate==0.4.1", "schedulefree", "addict", "fire", "fastcore", "python-dotenv", "colorama"),
            *("termcolor", "backoff", "requests", "six", "distro", "gitpython", "gitdb", "smmap", "platformdirs"),
            *("sentry-sdk", "httpx", "httpcore", "anyio", "certifi", "idna", "h11", "sniffio"),
        ),
        shown=("axolotl", "transformers", "trl", "accelerate", "peft"),
        train=commands.axolotl,
        stand_in="axolotl",
        environment={"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"},
    ),
    "llamafactory": Stack(
        packages=_LLAMAFACTORY,
        shown=("llamafactory", "transformers", "trl", "accelerate", "peft"),
        train=commands.llamafactory,
        stand_in="llamafactory",
        absent=("torchaudio",),  # its wheels are built for one version of torch each
    ),
    "llamafactory-v1": Stack(
        packages=_LLAMAFACTORY,
        shown=("llamafactory", "transformers"),
        train=commands.llamafactory_v1,
        absent=("torchaudio",),
    ),
    "swift": Stack(
        packages=(
            *("ms-swift", "transformers==5.19.0", "trl==0.29.1", "peft==0.20.0", "datasets==4.8.4", "modelscope"),
            *("modelscope_hub", "addict", "dacite", "binpacking", "json_repair", "cryptography", "cffi", "pycparser"),
            *("aiohttp", "aiohappyeyeballs", "aiosignal", "multidict", "yarl", "propcache", "frozenlist", "einops"),
            *("httpx", "httpcore", "anyio", "certifi", "idna", "h11", "sniffio"),
        ),
        shown=("ms-swift", "transformers", "trl", "peft"),
        train=commands.swift,
        stand_in="swift",
    ),
    "torchtitan": Stack(
        packages=(
            *("torchtitan==0.3.0", "spmd_types==0.2.3", "torch_checkpointing", "torchdata==0.11.0", "tyro", "einops"),
            *("docstring-parser", "shtab", "typeguard", "tensorboard"),
            *("fla-core==0.5.2", "flash-linear-attention==0.5.2"),  # 0.6.0 has moved what torchtitan imports
        ),
        shown=("torchtitan", "spmd-types", "torchdata", "flash-linear-attention"),
        train=commands.torchtitan,
        stand_in="torchtitan",
        environment={"TRITON_INTERPRET": "1"},
        prepare=titan.prepare,
    ),
    "unsloth": Stack(
        packages=("unsloth", "unsloth_zoo"),
        shown=("unsloth", "unsloth-zoo"),
        train=commands.unsloth,
        stand_in="unsloth",
    ),
    "nemo": Stack(
        packages=("nemo_automodel",), shown=("nemo-automodel",), train=commands.nemo, stand_in="nemo_automodel"
    ),
    "lightning": Stack(
        packages=("lightning", "lightning-utilities", "torchmetrics"),
        shown=("lightning",),
        train=commands.lightning,
        stand_in="lightning",
    ),
    "composer": Stack(
        packages=(
            *("mosaicml", "torchmetrics<1.7.5", "lightning-utilities", "torch_optimizer", "pytorch_ranger", "coolname"),
            *("tabulate", "py-cpuinfo", "importlib-metadata<9", "zipp"),
        ),
        shown=("mosaicml",),
        train=commands.composer,
        stand_in="composer",
        first=("torchmetrics",),
        absent=(
            *("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.models"),
            *("torchvision.datasets:VisionDataset", "torchvision.models.resnet:Bottleneck:ResNet"),
            *("torchvision.ops:box_convert", "torchvision.utils:draw_segmentation_masks", "mcli"),
        ),
    ),
}
