"""Random models and batches, packed against each document alone, for as long as it is given.

    python -m tests.fuzz --minutes 120
    python -m tests.fuzz --family qwen3_next bamba
    python -m tests.fuzz --seed 4711 --cases 1        # that case again

Each case follows from its number alone. A model is a random family with random fields of its config, in float64; a
batch has random lengths, rows, padding and marks. A refusal is an answer, and counted by its message. Anything else
than the numbers of the documents alone is a finding: it is written to ``--output`` as it comes, and the exit status
is 1. Random trainers and rows: ``CROSSPACK_EXAMPLES`` with ``test_any_trainer.py`` and ``tests/packing_core``.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import torch_backend
from packing_core.errors import PackingError
from tests.torch_backend.models import in_float64, tiny
from torch_backend.auditing.tiny import all_families, family_config
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.families import refusal

TOLERANCE = 1e-4  # of the largest value; a document that sees another one is off by 1e-2 and more
# Fields of configs and values for them. A family that cannot be built or run with one is left out of the comparison.
FIELDS: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1, 2, 3),
    "head_dim": (8, 16, 32),
    "num_key_value_heads": (1, 2, 4),
    "sliding_window": (1, 3, 8, 12, 33, None),
    "use_sliding_window": (True,),
    "max_window_layers": (0, 1),
    "attention_chunk_size": (4, 16, 40),
    "tie_word_embeddings": (False, True),
    "attention_bias": (False, True),
    "rope_theta": (100.0, 10000.0),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "use_qk_norm": (False, True),
    "attn_logit_softcapping": (None, 2.0, 30.0),
    "final_logit_softcapping": (None, 3.0),
    "logit_scale": (0.3, 1.0),
    "residual_multiplier": (0.5, 1.0),
    "hidden_act": ("silu", "gelu", "relu"),
    "num_experts_per_tok": (1, 2),
    "linear_conv_kernel_dim": (2, 4),
    "conv_kernel": (2, 4),
    "parallel_residual": (False, True),
    "parallel_attn": (False, True),
    "alibi": (False, True),
    "new_decoder_architecture": (False, True),
    "multi_query": (False, True),
}
# Phi-3.5-MoE draws its experts at random in training.
NO_NOISE = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}


@cache
def _families() -> list[str]:
    """Returns the families that are not refused as such."""
    found = []
    for name in all_families():
        with suppress(Exception):  # transformers' own check of the defaults of some config
            if not refusal(name, family_config(name)):
                found.append(name)
    return found


class NotBuilt(Exception):
    """The model cannot be built, or cannot run a document alone."""


@dataclass
class Tally:
    """Counts of a run."""

    cases: int = 0
    loss_of_its_own: int = 0  # models whose gradients were those of a plain loss over their logits
    refused: Counter[str] = field(default_factory=Counter)
    not_built: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)


def model_case(rng: np.random.Generator) -> dict[str, Any]:
    """A family, fields of its config, and a batch for it."""
    families = _families()
    names = rng.choice(list(FIELDS), rng.integers(0, 5), replace=False).tolist()
    changes = {name: FIELDS[name][rng.integers(len(FIELDS[name]))] for name in names}
    count = int(rng.integers(1, 10))
    lengths = [int(min(60, 1 + rng.geometric(rng.choice([0.05, 0.2, 0.6])))) for _ in range(count)]
    if sum(lengths) == count:  # nothing to predict
        lengths[0] += 1
    return {
        "family": families[rng.integers(len(families))],
        "changes": changes,
        "lengths": lengths,
        "capacity": [None, max(lengths), max(lengths) + int(rng.integers(0, 40)), 64][rng.integers(4)],
        "strategy": ["best_fit", "mixed", "sequential"][rng.integers(3)],
        "masked": float(rng.choice([0.0, 0.0, 0.3, 0.9])),
        "checkpointing": bool(rng.integers(4) == 0),
        "implementation": ["auto", "auto", "sdpa", "reference"][rng.integers(4)],
        "position": int(rng.integers(1 << 30)),
    }


def case_of(seed: int) -> dict[str, Any]:
    """Returns the case of a number."""
    return model_case(np.random.default_rng(seed))


def compare(case: dict[str, Any], tally: Tally) -> None:
    """Compares logits, loss and gradients of a packed batch with those of its documents alone.

    Raises:
        NotBuilt: there is no such model.
        PackingError: it is refused.
        AssertionError: they differ.
    """
    documents, labels = _batch(case)
    model = _built(case)
    truth = _alone(model, documents, labels)
    torch_backend.patch(model, implementation=case["implementation"], verify=False)
    options = {"capacity": case["capacity"], "strategy": case["strategy"]}
    if case["capacity"] is None:
        options["strategy"] = "sequential"
    features = [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(documents, labels, strict=True)]
    batch = PackedCollator(**options)(features)
    places = _places(batch, documents)
    model.zero_grad()
    output = model(**batch)
    pieces = torch.split(output.logits.flatten(0, 1), list(batch["packed_lengths"]))
    logits = [pieces[places[number]] for number in range(len(documents))]
    loss = output.loss if truth[3] else _mean_loss(logits, labels)
    tally.loss_of_its_own += not truth[3]
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for number, right in enumerate(truth[0]):
        _same(logits[number].detach(), right, f"logits of document {number}")
    _same(loss.detach(), truth[1], "loss")
    largest = max(float(x.abs().max()) for x in truth[2].values())
    for name, right in truth[2].items():
        assert name in gradients, f"no gradient of {name}"
        _same(gradients[name], right, f"gradient of {name}", floor=largest / 100)


def _batch(case: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the documents of a case and their labels."""
    generator = torch.Generator().manual_seed(case["position"])
    documents = [torch.randint(4, 90, (length,), generator=generator) for length in case["lengths"]]
    labels = [torch.where(torch.rand(len(x), generator=generator) < case["masked"], -100, x) for x in documents]
    return documents, documents if all(bool((x[1:] == -100).all()) for x in labels) else labels


def _mean_loss(logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    """Returns the mean of the cross-entropy over the targets of all documents."""
    pairs = [(x[:-1], y[1:]) for x, y in zip(logits, labels, strict=True)]
    targets = sum(int((wanted != -100).sum()) for _, wanted in pairs)
    return torch.stack([F.cross_entropy(x, y, reduction="sum") for x, y in pairs]).sum() / targets


def _places(batch: dict[str, Any], documents: list[Tensor]) -> dict[int, int]:
    """Document -> its piece of the batch, found by its tokens; equal documents are interchangeable."""
    left, places = list(range(len(documents))), {}
    for place, ids in enumerate(torch.split(batch["input_ids"].flatten(), list(batch["packed_lengths"]))):
        number = next((n for n in left if torch.equal(documents[n], ids)), None)
        if number is not None:
            left.remove(number)
            places[number] = place
    assert not left, f"documents {left} are not in the batch"
    return places


def _built(case: dict[str, Any]) -> Any:
    try:
        known = vars(tiny(case["family"]).config)
        changes = {name: value for name, value in (case["changes"] | NO_NOISE).items() if name in known}
        model = tiny(case["family"], **changes).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if case["checkpointing"] and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return in_float64(model)
    except Exception as error:  # a library's, about a config that nobody has
        raise NotBuilt(f"{case['family']}: {type(error).__name__}") from error


def _alone(
    model: Any, documents: list[Tensor], labels: list[Tensor]
) -> tuple[list[Tensor], Tensor, dict[str, Tensor], bool]:
    """Logits, loss and gradients, and whether the model's own loss is the mean over the targets."""
    try:
        logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents]
        loss = _mean_loss(logits, labels)
        loss.backward()
        longest = max(range(len(documents)), key=lambda n: int((labels[n][1:] != -100).sum()))
        with torch.no_grad():
            own = model(input_ids=documents[longest][None], labels=labels[longest][None], use_cache=False).loss
            plain = F.cross_entropy(logits[longest][:-1], labels[longest][1:])
    except Exception as error:
        raise NotBuilt(f"{model.config.model_type}: {type(error).__name__} alone") from error
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(x).all()) for x in gradients.values())
    if not finite:
        raise NotBuilt(f"{model.config.model_type}: not finite alone")
    # transformers computes it in float32, of which little is left near 0
    is_mean = own is not None and float(plain) > 1e-2 and abs(float(own - plain)) <= 1e-5 * max(1.0, abs(float(plain)))
    return [x.detach() for x in logits], loss.detach(), gradients, is_mean


def _same(found: Tensor, right: Tensor, what: str, floor: float = 1e-6) -> None:
    error = float((found - right).abs().max() / right.abs().max().clamp_min(floor))
    assert error <= TOLERANCE, f"{what} is off by {error:.1e}"


def run_case(seed: int, tally: Tally, families: Sequence[str] | None = None) -> None:
    """Runs the case of a number, if it is of these families, and counts how it ends."""
    case = case_of(seed)
    if families is not None and case["family"] not in families:
        return
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compare(case, tally)
    except NotBuilt as error:
        tally.not_built[str(error)] += 1
        return
    except PackingError as error:
        tally.refused[re.sub(r"[\d,.]*\d|'[^']*'", "#", str(error).splitlines()[0])[:110]] += 1
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        tally.findings.append(
            {
                "seed": seed,
                "case": case,
                "error": f"{type(error).__name__}: {str(error)[:600]}",
                "where": f"{Path(where.filename).name}:{where.lineno}",
            }
        )
    tally.cases += 1


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=0, help="of the first case")
    options.add_argument("--cases", type=int, help="how many; without it, as many as there is time for")
    options.add_argument("--family", nargs="+", help="of the models")
    options.add_argument("--output", type=Path, default=Path("fuzz-findings.jsonl"))
    given = options.parse_args()
    tally = Tally()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    seed, end = given.seed, time.monotonic() + 60 * given.minutes
    with suppress(KeyboardInterrupt):  # what was found until then counts
        while time.monotonic() < end and (given.cases is None or seed < given.seed + given.cases):
            before = len(tally.findings)
            run_case(seed, tally, given.family)
            for finding in tally.findings[before:]:
                print(f"seed {seed}: {finding['error'].splitlines()[0]}", flush=True)
                with open(given.output, "a") as file:
                    file.write(json.dumps(finding, default=str) + "\n")
            seed += 1
    print(f"seeds {given.seed} to {seed - 1}: {tally.cases:,} cases")
    print(f"with a loss of their own, judged by a plain one: {tally.loss_of_its_own:,}")
    for what, counts in (("not built", tally.not_built), ("refused", tally.refused)):
        print(f"{what}: {sum(counts.values()):,}")
        for message, count in counts.most_common(25):
            print(f"  {count:5,}  {message}")
    print(f"findings: {len(tally.findings)}")
    return int(bool(tally.findings))


if __name__ == "__main__":
    raise SystemExit(main())
