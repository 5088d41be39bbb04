"""TRL's preference, reward and policy trainers, built over tiny random models as users build them, and audited.

The name of a trainer and a family -> a tiny model of each layer kind and a few answers of very different lengths -> the
trainer, as it is or after ``enable_packing`` -> :func:`torch_backend.auditing.trainer.audit_trainer` -> a word for the
table in ``docs/post-training.md``, which ``docs/make_post_training.py`` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from torch_backend.auditing.tiny import family_config, tiny_config, tiny_model
from torch_backend.auditing.trainer import audit_trainer
from torch_backend.trainers.enable_packing import enable_packing

HEAD_DIM, WORDS = 16, 64
LENGTHS = (2, 6), (40, 48)  # of answers, from and below; longrope changes its frequencies between the two
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [4.0 + i for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 24,
    "factor": 4.0,
}
# family -> what is special about it, and the fields of its tiny config that make it so
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("attention", {}),
    "gpt_oss": ("sinks, sliding windows, experts", {}),
    "qwen3_5_text": ("linear attention", {}),
    "phi3": ("longrope", {"rope_parameters": LONGROPE}),
    "bloom": ("ALiBi", {}),
}


def scored_verdict(name: str, family: str, *, packed: bool) -> str:
    """``right``, ``contaminated`` with the cosine of the gradients, or ``refused`` with the reason.

    Args:
        name: DPO, KTO, Reward, GRPO or RLOO.
        family: of ``FAMILIES``.
        packed: whether ``enable_packing`` is called before.
    """
    with TemporaryDirectory() as folder:
        try:
            trainer = BUILDERS[name](family, folder)
            report = audit_trainer(enable_packing(trainer, verify=False) if packed else trainer)
        except (PackingError, ValueError, RuntimeError, NotImplementedError) as refusal:
            return f"refused: {first_line(refusal)}"
    return "right" if report.verdict == "exact" else f"contaminated ({report.cosine:.3f})"


def scored_model(family: str, *, scores: bool = False) -> Any:
    """A tiny random model with a language-model head, or with one that gives each document a score."""
    transformers = require("transformers", extra="hf")
    changes = {"pad_token_id": 0, **FAMILIES[family][1]}
    config = tiny_config(family_config(family), head_dim=HEAD_DIM, changes=changes)
    if not scores:
        return tiny_model(config)
    config.num_labels = 1
    return tiny_model(config, transformers.AutoModelForSequenceClassification.from_config)


def words(rng: np.random.Generator, low: int, high: int) -> str:
    """``low`` to ``high - 1`` random words."""
    return " ".join(f"w{i}" for i in rng.integers(4, WORDS, rng.integers(low, high)))


def _tokenizer() -> Any:
    """Splits at blanks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w3"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, **special)


def _build(
    name: str, folder: str, example: Callable[[np.random.Generator, int], Any], *models: Any, **more: Any
) -> Any:
    """A trainer with its model, what else it takes by position, and examples."""
    datasets, trl = require("datasets", extra="hf"), require("trl", extra="hf")
    rng = np.random.default_rng(0)
    arguments = getattr(trl, f"{name}Config")(
        folder,
        per_device_train_batch_size=8,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **more,
    )
    return getattr(trl, f"{name}Trainer")(
        *models,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([example(rng, number) for number in range(8)]),
        processing_class=_tokenizer(),
    )


def _dpo(family: str, folder: str) -> Any:
    def pair(rng: np.random.Generator, number: int) -> dict[str, str]:
        chosen, rejected = (f" {words(rng, *LENGTHS[(number + i) % 2])} w2" for i in range(2))
        return {"prompt": words(rng, 2, 10), "chosen": chosen, "rejected": rejected}

    return _build("DPO", folder, pair, scored_model(family), scored_model(family))


def _kto(family: str, folder: str) -> Any:
    def answer(rng: np.random.Generator, number: int) -> dict[str, Any]:
        completion = f" {words(rng, *LENGTHS[number % 2])} w2"
        return {"prompt": words(rng, 2, 10), "completion": completion, "label": number % 4 < 2}

    return _build("KTO", folder, answer, scored_model(family), scored_model(family))


def _reward(family: str, folder: str) -> Any:
    def pair(rng: np.random.Generator, number: int) -> dict[str, str]:
        chosen, rejected = (f"{words(rng, *LENGTHS[(number + i) % 2])} w2" for i in range(2))
        return {"chosen": chosen, "rejected": rejected}

    return _build("Reward", folder, pair, scored_model(family, scores=True))


def _policy(name: str) -> Callable[[str, str], Any]:
    def build(family: str, folder: str) -> Any:
        def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
            return [float(sum(ids) % 17) for ids in completion_ids]

        def prompt(rng: np.random.Generator, number: int) -> dict[str, str]:
            return {"prompt": words(rng, *LENGTHS[number % 2])}

        more = {"num_generations": 2, "max_completion_length": 8, "beta": 0.0}
        return _build(name, folder, prompt, scored_model(family), rewards, **more)

    return build


BUILDERS: dict[str, Callable[[str, str], Any]] = {
    "DPO": _dpo,
    "KTO": _kto,
    "Reward": _reward,
    "GRPO": _policy("GRPO"),
    "RLOO": _policy("RLOO"),
}
