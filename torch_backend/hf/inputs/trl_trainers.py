"""The table of TRL's trainers: what the loss of each reads, and whether its padded calls can run packed."""

from __future__ import annotations

from typing import Any

PAIRS = "compares answers with each other"
SCORES = "gives each example one score"
GENERATES = "generates completions and scores each of them"
LOGITS = (
    "generates completions and reads all logits of padded calls, which rows would hold twice (crosspack.unpad(model) "
    "runs the layers of its models without padding)"
)
TEACHER = "compares each example with a teacher"
UNKNOWN = "is a trainer of TRL that computes its loss per example"
OTHER_PROMPTS = "generates completions and runs its teacher on other prompts than its student"
OF_SERVER = "gets a few of its teacher's log-probabilities for each padded example from a server"
OWN_ROWS = "packs its rollouts itself, each with the few log-probabilities that a server of its teacher gave"
ADVANTAGES = "weighs sampled tokens by those before them in each completion, or compares a few ids of each"
# Why rows of several documents cannot be their examples, by the name of a class, which may be a base of another.
_LOSSES = {
    **dict.fromkeys(("DPOTrainer", "KTOTrainer", "CPOTrainer", "ORPOTrainer", "BCOTrainer", "TPOTrainer"), PAIRS),
    **dict.fromkeys(("RewardTrainer", "PRMTrainer"), SCORES),
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer"), GENERATES),
    **dict.fromkeys(("A2POTrainer", "OnlineDPOTrainer", "NashMDTrainer", "PPOTrainer", "XPOTrainer"), LOGITS),
    **dict.fromkeys(("SDFTTrainer", "SDPOTrainer"), OTHER_PROMPTS),
    **dict.fromkeys(("DistillationTrainer", "GKDTrainer", "GOLDTrainer", "MiniLLMTrainer"), TEACHER),
    "ServerDistillationTrainer": OF_SERVER,
    "AsyncDistillationTrainer": OWN_ROWS,
    "IWOPDTrainer": ADVANTAGES,
}
# Those that compute their loss from padded calls, which run packed, and the rows that an example has in a batch.
_ROWS = {"DPOTrainer": 2, "RewardTrainer": 2, "KTOTrainer": 1, "GRPOTrainer": 1, "RLOOTrainer": 1}
_ROWS |= {"GKDTrainer": 1, "GOLDTrainer": 1, "DistillationTrainer": 1}
_OTHER_FORMULA = ("GMPOTrainer",)  # subclasses of them in TRL that change the formula of the loss alone
_ON_ROWS = ("SFTTrainer", "_BaseTrainer")


def kind_of(trainer: Any) -> str | None:
    """The name of the trainer of TRL whose padded calls run packed that this one is or derives from.

    TRL's own subclasses (``trl.experimental``) call models in ways of their own and are not among them, except those
    that carry the name of the class itself or change its formula alone.
    """
    for base in type(trainer).__mro__:
        if _of_trl(base) and base.__name__ not in _OTHER_FORMULA:
            return base.__name__ if base.__name__ in _ROWS else None
    return None


def has_tree_rows(trainer: Any) -> bool:
    """Returns whether a trainer makes rows in which samples share prefixes, and asks for attention of them by name."""
    return any(_of_trl(base) and base.__name__ == "AsyncGRPOTrainer" for base in type(trainer).__mro__)


def generates(trainer: Any) -> bool:
    """Returns whether a trainer that has a kind generates the completions that it trains on."""
    return _LOSSES.get(kind_of(trainer) or "") == GENERATES


def distils(trainer: Any) -> bool:
    """Returns whether a trainer that has a kind compares its model with a teacher."""
    return _LOSSES.get(kind_of(trainer) or "") == TEACHER


def rows_of_example(trainer: Any) -> int:
    """Rows of a batch for each example of a trainer that has a kind."""
    return _ROWS[str(kind_of(trainer))]


def why_per_example(trainer: Any) -> str | None:
    """Explains why a row of several documents cannot be an example of a trainer; None if it can."""
    for base in type(trainer).__mro__:
        other = _of_trl(base) and base.__name__.endswith("Trainer") and base.__name__ not in _ON_ROWS
        if reason := _LOSSES.get(base.__name__, UNKNOWN if other else None):
            return reason
    return None


def _of_trl(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "trl"
