"""The rows of the board: how each stack's released code turns documents into batches.

Documents are token lists; where a stack's data are text, every token is trained, as its own text data sets have it.
Imports of a stack stand inside its functions, because each runs in a process of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from benchmarks._board_flash import NAME as FLASH
from torch_backend.stacks.paths import placeholder_tokenizer

Documents = list[list[int]]
Batch = dict[str, Any]


@dataclass(frozen=True)
class Stack:
    """One row of the board.

    Attributes:
        name: as the table shows it.
        packages: installed into a folder of their own, the first one's version is shown; empty for what is here anyway.
        batches: of some documents and the capacity of a row, for a model.
        attention: of the model.
        prepare: called with the model type before the model is built, and its result, if any, with the model.
        cache: whether the model keeps its default ``use_cache``; the trainers of all stacks turn it off, a plain loop
            does not.
        note: what was run of the stack.
    """

    name: str
    packages: tuple[str, ...]
    batches: Callable[[Documents, int, Any], list[Batch]]
    attention: str = "sdpa"
    prepare: Callable[[str], Callable[[Any], Any] | None] = lambda family: None
    cache: bool = False
    note: str = ""


# transformers -------------------------------------------------------------------------------------------------------
def _flattening(documents: Documents, capacity: int, model: Any, **options: Any) -> list[Batch]:
    from transformers import DataCollatorWithFlattening

    return [dict(DataCollatorWithFlattening(**options)([{"input_ids": tokens} for tokens in documents]))]


# TRL ----------------------------------------------------------------------------------------------------------------
def _trl_packed(documents: Documents, capacity: int) -> list[dict[str, Any]]:
    from datasets import Dataset
    from trl import pack_dataset

    return list(pack_dataset(Dataset.from_dict({"input_ids": documents}), capacity, "bfd"))


def _trl_collator() -> Any:
    module = import_module("trl.trainer.sft_trainer")
    return module.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


def _trl(documents: Documents, capacity: int, model: Any) -> list[Batch]:
    return [_trl_collator()(_trl_packed(documents, capacity))]


def _trl_padding_free(documents: Documents, capacity: int, model: Any) -> list[Batch]:
    return [_trl_collator()([{"input_ids": tokens} for tokens in documents])]


# axolotl ------------------------------------------------------------------------------------------------------------
def _axolotl(documents: Documents, capacity: int, model: Any, *, flash: bool) -> list[Batch]:
    batching = load("axolotl.utils.collators.batching")
    collator = batching.V2BatchSamplerDataCollatorForSeq2Seq(placeholder_tokenizer(), emit_fa_varlen_kwargs=flash)
    features = [  # the attention mask is dropped, as ``sample_packing_drop_attention_mask`` does
        {"input_ids": tokens, "labels": tokens, "position_ids": list(range(len(tokens)))} for tokens in documents
    ]
    lengths, multipack = np.array([len(tokens) for tokens in documents]), load("axolotl.utils.samplers.multipack")
    rows = multipack.pack_parallel(lengths, capacity, 100_000, 1_000_000, num_processes=1)
    return [dict(collator([[features[i] for i in row]])) for row in rows]


def _axolotl_patches(family: str) -> None:
    """Applies what its patch manager applies to a model type under ``sample_packing: true``."""
    manager = load("axolotl.loaders.patch_manager", stubs=["addict"]).PatchManager
    settings = SimpleNamespace(model_config_type=family, sample_packing=True, torch_compile=False, use_kernels=False)
    made = object.__new__(manager)
    made.cfg, made.model_config = settings, SimpleNamespace(model_type=family)
    made._apply_linear_attention_packing_patches()
    made._apply_ssm_packing_patches()
    if family == "nemotron_h":  # its other patches are for kernels
        patches = load("axolotl.monkeypatch.models.nemotron_h.modeling")
        patches.guard_nemotron_h_fused_scan()
        patches.patch_nemotron_h_modeling_packing(kernels_enabled=False)


# LLaMA-Factory ------------------------------------------------------------------------------------------------------
def _llamafactory(documents: Documents, capacity: int, model: Any, *, neat: bool, flash: bool = False) -> list[Batch]:
    supervised = load("llamafactory.data.processor.supervised", stubs=["torchaudio"])
    collators = load("llamafactory.data.collator")
    settings = SimpleNamespace(cutoff_len=capacity, neat_packing=neat)
    tokenizer = placeholder_tokenizer()

    class Processor(supervised.PackedSupervisedDatasetProcessor):  # type: ignore[name-defined]
        def _encode_data_example(self, prompt: Any, **rest: Any) -> tuple[list[int], list[int]]:
            tokens = list(prompt[0]["content"])  # tokens already; the first one is the prompt
            return tokens, [-100, *tokens[1:]]

    names = ("_response", "_system", "_tools", "_images", "_videos", "_audios")
    examples: dict[str, Any] = {name: [[{}] if name == "_response" else None] * len(documents) for name in names}
    examples["_prompt"] = [[{"content": tokens}] for tokens in documents]
    columns = Processor(None, tokenizer, None, settings).preprocess_dataset(examples)
    unseen = ("images", "videos", "audios")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    plugin = SimpleNamespace(image_token=None, video_token=None, audio_token=None, get_mm_inputs=lambda *a: {})
    collator = collators.SFTDataCollatorWith4DAttentionMask(
        template=SimpleNamespace(mm_plugin=plugin),
        model=model,
        tokenizer=tokenizer,
        block_diag_attn=neat,
        neat_packing=neat,
        attn_implementation="flash_attention_2" if flash else "sdpa",
    )
    return [dict(collator([{k: v for k, v in row.items() if k not in unseen}])) for row in rows]


# ms-swift -----------------------------------------------------------------------------------------------------------
SWIFT_STUBS = ["modelscope", "json_repair", "aiohttp"]


def _swift(documents: Documents, capacity: int, model: Any) -> list[Batch]:
    template = load("swift.template", stubs=SWIFT_STUBS)
    made = template.Template(None, template.TemplateMeta("board", [], ["{{QUERY}}"], None), max_length=capacity)
    made.processor = placeholder_tokenizer()
    made.packing = made.padding_free = True
    made.mode = "train"
    encoded = [  # as ``Template.encode`` leaves them: the first label is -100
        {"input_ids": tokens, "labels": [-100, *tokens[1:]], "length": len(tokens)} for tokens in documents
    ]
    packing = load("swift.dataset.packing", stubs=SWIFT_STUBS)
    rows, _ = packing.calculate_matched_group([(i, len(tokens)) for i, tokens in enumerate(documents)], capacity)
    return [dict(made.data_collator([[encoded[i] for i, _ in row]])) for row in rows]


# Unsloth ------------------------------------------------------------------------------------------------------------
def _unsloth(documents: Documents, capacity: int, model: Any) -> list[Batch]:
    import_module("unsloth.models")  # unsloth.utils cannot be imported before it
    packing = import_module("unsloth.utils.packing")
    trainer = SimpleNamespace(data_collator=_trl_collator(), args=SimpleNamespace(remove_unused_columns=True))
    packing.enable_sample_packing(model, trainer)
    return [dict(trainer.data_collator.torch_call(_trl_packed(documents, capacity)))]


def _import_unsloth(family: str) -> None:
    import_module("unsloth")


# MaxText and EasyDeL: their batches, in a model that honours them --------------------------------------------------
MAXTEXT_STUBS = ["sentencepiece", "tiktoken", "pathwaysutils"]


def _maxtext(documents: Documents, capacity: int, model: Any) -> list[Batch]:
    import grain

    processing = load("maxtext.input_pipeline.data_processing_utils", stubs=MAXTEXT_STUBS)
    settings = SimpleNamespace(
        packing=True,
        max_target_length=capacity,
        max_segments_per_seq=None,
        grain_packing_type="first_fit",
        grain_use_elastic_iterator=False,
    )
    data = grain.MapDataset.source([{"inputs": np.array(t), "targets": np.array(t)} for t in documents])
    packed = processing.format_and_batch(data.to_iter_dataset(), settings, 1, 0, ["inputs", "targets"], None)
    batches = []
    for row in packed:
        labels = np.where(row["targets_segmentation"] != 0, row["targets"], -100)  # what its loss counts
        unshifted = np.concatenate([np.full((len(labels), 1), -100), labels[:, :-1]], 1)
        batches.append(_honoured(row["inputs"], row["inputs_segmentation"], unshifted))
    return batches


def _easydel_packed(documents: Documents, capacity: int) -> list[Any]:
    bare = ["easydel", "easydel.data", "easydel.data.core", "easydel.data.transforms"]
    packer = load("easydel.data.transforms.pack", stubs=["ray", "eformer", "ejkernel"], bare=bare)
    made = packer.FirstFitPacker(capacity, eos_token_id=2, pad_token_id=0)
    return [row for tokens in documents for row in made.add(tokens)] + made.flush_all()


def _easydel(documents: Documents, capacity: int, model: Any) -> list[Batch]:
    batches = []
    for row in _easydel_packed(documents, capacity):
        labels = np.where(row.attention_mask != 0, row.input_ids, -100)  # what its ForCausalLMLoss counts
        segments = np.where(row.attention_mask != 0, row.segment_ids + 1, 0)
        batches.append(_honoured(row.input_ids[None], segments[None], labels[None]))
    return batches


def _honoured(tokens: Any, segments: Any, labels: Any) -> Batch:
    """Returns the batch for our patched model, which keeps the segments apart: what is left is due to the batch."""
    import torch

    from torch_backend.collate import with_boundaries

    names = {"input_ids": tokens, "labels": labels, "segment_ids": segments}
    batch = {name: torch.tensor(np.asarray(values), dtype=torch.int64) for name, values in names.items()}
    return dict(with_boundaries(lambda examples: batch)([])) | {"labels": batch["labels"]}


# crosspack ----------------------------------------------------------------------------------------------------------
def _patched(family: str) -> Callable[[Any], Any]:
    from torch_backend import patch

    return partial(patch, verify=False)


def _crosspack(documents: Documents, capacity: int, model: Any) -> list[Batch]:
    from torch_backend.collate import PackedCollator

    return [dict(PackedCollator(model, capacity=capacity)([{"input_ids": tokens} for tokens in documents]))]


# imports ------------------------------------------------------------------------------------------------------------
def load(module: str, *, stubs: Sequence[str] = (), bare: Sequence[str] = ()) -> Any:
    """Imports one module of a released package without what it does not need here.

    A collator is a few lines of Python, and the package around it imports audio, cloud and GPU libraries. A stub stands
    for such a library at import. Code that calls it gets a mock, so only modules that do not are loaded this way.

    Args:
        module: its dotted name.
        stubs: top-level packages to put stubs for where they are not installed.
        bare: its parent packages whose ``__init__`` is not to run.
    """
    missing = [name for name in stubs if find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Stubs(missing))
    for name in bare:
        _put_bare(name)
    return import_module(module)


def _put_bare(name: str) -> None:
    parent, _, last = name.rpartition(".")
    folders = sys.modules[parent].__path__ if parent else sys.path
    installed = next((str(Path(folder, last)) for folder in folders if Path(folder, last).is_dir()), None)
    if installed is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = types.ModuleType(name)
    package.__path__ = [installed]
    sys.modules[name] = package


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)  # classes are inherited from
        setattr(self, name, value)
        return value


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        stubbed = fullname.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]


# the table ----------------------------------------------------------------------------------------------------------
AXOLOTL = (
    "its bins, collator and model patches, on plain text (`type: completion`), whose labels are its tokens; where the "
    "prompt is masked, no first token is trained"
)
FACTORY = "its packed processor and collator; the first token of a document is its masked prompt"
EVERYTHING: dict[str, Any] = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
TRAINED_BATCH = "its released packer and loss mask, in our patched model with its segments: its own model was not run"
STACKS = {
    "crosspack": Stack("crosspack", (), _crosspack, prepare=_patched, cache=True),
    "flattening": Stack("transformers, DataCollatorWithFlattening", (), _flattening, cache=True),
    "flattening-all": Stack(
        "transformers, flattening with everything passed", (), partial(_flattening, **EVERYTHING), cache=True
    ),
    "trl": Stack("TRL, packing", (), _trl),
    "trl-padding-free": Stack("TRL, padding-free", (), _trl_padding_free),
    "axolotl": Stack(
        "axolotl, sample_packing",
        ("axolotl", "numba", "llvmlite"),
        partial(_axolotl, flash=False),
        prepare=_axolotl_patches,
        note=AXOLOTL,
    ),
    "llamafactory": Stack(
        "LLaMA-Factory, packing", ("llamafactory",), partial(_llamafactory, neat=False), note=FACTORY
    ),
    "llamafactory-neat": Stack(
        "LLaMA-Factory, neat_packing", ("llamafactory",), partial(_llamafactory, neat=True), note=FACTORY
    ),
    "ms-swift": Stack(
        "ms-swift, packing, flash",
        ("ms-swift", "binpacking"),
        _swift,
        FLASH,
        note="its bins and its template's collator; it refuses other attention",
    ),
    "unsloth": Stack(
        "Unsloth, packing",
        ("unsloth", "unsloth_zoo"),
        _unsloth,
        prepare=_import_unsloth,
        note="its wrapped collator and attention, in transformers' model classes",
    ),
    "maxtext": Stack("MaxText, first_fit", ("maxtext",), _maxtext, prepare=_patched, note=TRAINED_BATCH),
    "easydel": Stack(
        "EasyDeL, first_fit",
        ("easydel",),
        _easydel,
        prepare=_patched,
        note=f"{TRAINED_BATCH}; documents longer than a row make longer rows",
    ),
}
WITH_FLASH: dict[str, dict[str, Any]] = {  # what differs besides attention
    "flattening-all": {},
    "trl": {},
    "axolotl": {"batches": partial(_axolotl, flash=True)},
    "llamafactory-neat": {"batches": partial(_llamafactory, neat=True, flash=True)},
}
STACKS |= {
    f"{name}-flash": replace(STACKS[name], name=f"{STACKS[name].name}, flash", attention=FLASH, **more)
    for name, more in WITH_FLASH.items()
}
