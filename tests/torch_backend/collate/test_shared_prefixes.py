"""A prompt that is computed once trains like one computed for every answer: loss, gradients, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_backend
from packing_core import Cost
from packing_core.batches.trees import part_saved
from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from packing_core.storage.forest import lineage
from tests.torch_backend.models import documents, error, patched, tiny
from torch_backend import PackedCollator, next_token_pairs, packed_cross_entropy, reduce, spread, token_logprobs
from torch_backend.hf.inputs.forests import why_not_this_call
from torch_backend.hf.patch import state_of
from torch_backend.hf.shared_rows import SharedRow
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.segments import PackedMetadata

# every family here has attention of another kind: plain, sinks and windows, softcaps and windows, one window and others
FAMILIES = ("llama", "qwen3", "gpt_oss", "gemma2", "gemma3_text", "phi3", "cohere2", "olmo3", "mixtral")
# layers that carry a state: Mamba-2, gated delta rule, Mamba, RG-LRU, short convolution, lightning attention
RECURRENT = ("bamba", "qwen3_5_text", "mamba2", "jamba", "recurrent_gemma", "lfm2", "minimax", "falcon_h1")


def answers(levels: tuple[int, ...] = (20, 18), several: int = 3) -> list[dict[str, Any]]:
    """Two prompts of one system prompt, each with ``several`` answers, and a document of its own."""
    system, *parts, own = documents((levels[0], levels[1], levels[1] + 2, 7, 3, 1, 12, 5, 9, 40), seed=3)
    prompts = [torch.cat([system, part]) for part in parts[:2]]
    ends = parts[2:]
    whole = [torch.cat([prompts[i // several], ends[i]]) for i in range(2 * several)]
    features = [
        {"input_ids": document.tolist(), "labels": [-100] * len(prompts[i // several]) + ends[i].tolist()}
        for i, document in enumerate(whole)
    ]
    return [*features, {"input_ids": own.tolist(), "labels": own.tolist()}]


def shared_and_unshared(model: nn.Module | None = None, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    collators = [PackedCollator(model, share_prefix=share, **options) for share in (True, False)]
    shared, unshared = (collator(answers()) for collator in collators)
    assert shared["input_ids"].numel() < unshared["input_ids"].numel() * 0.7
    starts = torch.tensor((0, *shared["packed_lengths"])).cumsum(0)
    parents = shared["packed_parents"]
    first = [s for s, parent in enumerate(parents) if parent >= 0 and shared["labels"].flatten()[starts[s]] != -100]
    assert len(first) == 6 and any(parents[parents[s]] >= 0 for s in first)  # two levels, and targets after a prefix
    return shared, unshared


def loss_and_gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    model.zero_grad()
    loss, weight = causal_lm_loss(model, batch)
    (loss / weight).backward()
    return loss.detach(), weight, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_trains_alike(model: nn.Module, shared: dict[str, Any], unshared: dict[str, Any]) -> None:
    loss, weight, gradients = loss_and_gradients(model, shared)
    right, right_weight, right_gradients = loss_and_gradients(model, unshared)
    torch.testing.assert_close(weight, right_weight)
    assert error(loss, right) <= 1e-5
    assert gradients.keys() == right_gradients.keys()
    for name, gradient in gradients.items():
        assert error(gradient, right_gradients[name]) <= 1e-5, name


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_gradients_are_those_of_unshared_packing(family):
    model = patched(family)
    assert_trains_alike(model, *shared_and_unshared(model))


@pytest.mark.parametrize(
    "options", [{"capacity": 128}, {"capacity": 64}, {"capacity": 128, "padding_free": True}], ids=str
)
def test_rows_of_a_capacity_train_alike(options):
    model = patched("llama")
    shared, unshared = (PackedCollator(model, share_prefix=share, **options)(answers()) for share in (True, False))
    assert max(shared["packed_parents"]) >= 0
    assert_trains_alike(model, shared, unshared)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_gradients_under_gradient_checkpointing_and_each_implementation(name):
    model = torch_backend.patch(tiny("gemma2"), implementation=name, verify=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_alike(model, *shared_and_unshared(model))


def test_weights_per_document_are_counted_alike():
    from packing_core import pack, pack_tree

    model, features = patched("llama"), answers()
    ids, labels = (
        [feature.get(name, feature["input_ids"]) for feature in features] for name in ("input_ids", "labels")
    )
    rows = [function(ids, 512, labels=labels, weighting="document", seed=None) for function in (pack_tree, pack)]
    assert_trains_alike(model, *(PackedCollator(model)(batch) for batch in rows))


def test_a_step_trains_alike():
    parameters = []
    for batch in shared_and_unshared():
        model = patched("qwen3")
        step = torch_backend.make_train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1.0)
        metrics = step([batch, batch])
        assert int(metrics["tokens"]) == 2 * (7 + 3 + 1 + 12 + 5 + 9 + 39)
        parameters.append((metrics["loss"], list(model.parameters())))
    (loss, found), (right_loss, right) = parameters
    assert error(loss, right_loss) <= 1e-5
    for one, other in zip(found, right, strict=True):
        assert error(one.detach(), other.detach()) <= 1e-5


def test_log_probabilities_stand_at_the_tokens_of_each_document():
    model, (shared, unshared) = patched("gemma2"), shared_and_unshared()
    found, right = (token_logprobs(model, batch, entropy=True, top_k=2) for batch in (shared, unshared))
    for name in ("logprobs", "entropy", "candidate_logprobs"):
        sums = [
            reduce(getattr(result, name), batch, "sum", where=batch["labels"] != -100)
            for result, batch in ((found, shared), (right, unshared))
        ]
        assert error(*(x.detach() for x in sums)) <= 1e-5, name
    first = [
        reduce(x.candidates, batch, "first", where=batch["labels"] != -100)
        for x, batch in ((found, shared), (right, unshared))
    ]
    assert torch.equal(*first)
    gradients = []
    for result, batch in ((found, shared), (right, unshared)):
        advantages = spread(torch.linspace(-1, 1, 7), batch)
        model.zero_grad()
        (result.logprobs * advantages).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert error(one, other) <= 1e-5


def test_logits_and_pairs_make_the_same_loss():
    model, (shared, unshared) = patched("llama"), shared_and_unshared()
    sums = []
    for batch in (shared, unshared):
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits.flatten(0, 1)
        places, targets = next_token_pairs(batch)
        sums.append(packed_cross_entropy(logits[places], targets))
    (loss, weight), (right, right_weight) = sums
    assert weight == right_weight
    assert error(loss.detach(), right.detach()) <= 1e-5


def test_auto_shares_where_it_saves():
    def parents(levels, answers_=None):
        return PackedCollator(share_prefix="auto")(answers(levels))["packed_parents"]

    assert max(parents((100, 9))) >= 0
    assert max(parents((20, 9))) == -1
    assert max(PackedCollator(share_prefix=True)(answers((20, 9)))["packed_parents"]) >= 0
    assert "packed_parents" not in PackedCollator()(answers())


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.1}, {"output_router_logits": True}], ids=str)
def test_auto_shares_nothing_in_a_model_that_would_refuse_it_in_training(changes):
    model = patched("mixtral", **changes)
    assert PackedCollator(model.eval(), share_prefix="auto").share_prefix is False
    assert PackedCollator(model, share_prefix=True).share_prefix is True  # and the model raises where it is on


@pytest.mark.parametrize(
    ("lengths", "parents", "whole"),
    [([100, 30, 20], [-1, 0, 0], [130, 120]), ([8, 5, 3, 4, 6], [-1, 0, 1, 1, 0], [16, 17, 14])],
)
def test_the_work_saved_is_that_of_the_tokens_and_pairs_that_are_not_computed(lengths, parents, whole):
    def pairs(length, before=0):
        return sum(2 * (before + i) + 1 for i in range(length))  # twice the keys that each query sees, less itself

    before = [sum(lengths[above] for above in lineage(parents, s)[:-1]) for s in range(len(lengths))]
    shared = sum(lengths) + 0.25 * sum(map(pairs, lengths, before))
    unshared = sum(whole) + 0.25 * sum(map(pairs, whole))
    saved = part_saved(lengths, parents, whole, Cost(tokens=1, squares=0.25))
    assert saved == pytest.approx(1 - shared / unshared, rel=1e-12)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("falcon", {"alibi": True}, "it runs on batches of documents"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "frequencies depend",
        ),
    ],
)
def test_families_that_are_not_exact_are_refused_by_name(family, changes, reason):
    model = patched(family, **changes)
    name = type(model).__name__
    with pytest.raises(UnsupportedError, match=f"share_prefix=True is not possible, because {name} .*{reason}"):
        PackedCollator(model, share_prefix=True)
    assert PackedCollator(model, share_prefix="auto").share_prefix is False
    with pytest.raises(
        UnsupportedModelError, match=f"{name} cannot run shared prefixes: .*{reason}.*share_prefix=False"
    ):
        causal_lm_loss(model, shared_and_unshared()[0])


def test_batches_that_are_not_exact_are_refused():
    batch = shared_and_unshared()[0]
    refused = "cannot run shared prefixes: "
    with pytest.raises(
        UnsupportedModelError, match=refused + "its own loss predicts every token from the one before it"
    ):
        patched("llama")(**batch)
    dropping = patched("gpt2")
    dropping.transformer.drop.p = 0.1
    with pytest.raises(
        UnsupportedModelError, match=refused + r"dropout \(transformer.drop, p=0.1\) is on, and documents"
    ):
        causal_lm_loss(dropping, batch)
    with pytest.raises(UnsupportedModelError, match=refused + r"dropout \(.*attention_dropout=0.1\) is on"):
        causal_lm_loss(patched("llama", attention_dropout=0.1), batch)
    with pytest.raises(
        UnsupportedModelError, match=refused + "its router's auxiliary loss would count a shared token once"
    ):
        causal_lm_loss(patched("mixtral", output_router_logits=True), batch)
    model = patched("llama")
    with pytest.raises(UnsupportedModelError, match=refused + "the batch came with shift_labels"):
        causal_lm_loss(model, batch | {"shift_labels": batch["labels"]})
    positions = torch.zeros(3, *batch["input_ids"].shape, dtype=torch.int64)
    assert why_not_this_call(state_of(model).anatomy, {"position_ids": positions}) == (
        "the batch came with positions on several axes"
    )
    assert why_not_this_call(state_of(model).anatomy, {"position_ids": positions[0]}) is None
    with pytest.raises(
        LayoutError, match="position_ids are not those of a document of its own at .* continues a shared prefix"
    ):
        causal_lm_loss(model, batch | {"position_ids": torch.arange(batch["input_ids"].numel())[None]})
    with pytest.raises(LayoutError, match=r"parents\[1\] is 3"):
        causal_lm_loss(model, batch | {"packed_parents": (-1, 3, *batch["packed_parents"][2:])})
    with pytest.raises(LayoutError, match="packed_parents needs packed_lengths beside it"):
        causal_lm_loss(model, {name: x for name, x in batch.items() if name != "packed_lengths"})
    with pytest.raises(PackingError, match="share_prefix is 'yes': pass True, False or \"auto\""):
        PackedCollator(share_prefix="yes")


def test_dropout_that_is_off_is_no_reason_to_refuse():
    model = patched("gpt2", resid_pdrop=0.1).eval()
    with torch.no_grad():
        sums = [causal_lm_loss(model, batch)[0] for batch in shared_and_unshared()]
    assert error(*sums) <= 1e-5


def test_a_label_of_the_first_token_of_a_document_is_still_refused():
    model, batch = patched("llama"), shared_and_unshared()[0]
    starts = torch.tensor((0, *batch["packed_lengths"])).cumsum(0)
    root = next(s for s, parent in enumerate(batch["packed_parents"]) if parent < 0 and s)
    labels = batch["labels"].clone()
    labels[0, starts[root]] = 5
    with pytest.raises(LayoutError, match=f"labels train the first token of segment {root}"):
        causal_lm_loss(model, batch | {"labels": labels})


def test_arguments_that_belong_to_no_token_are_not_shortened():
    rows = SharedRow(
        PackedMetadata.from_lengths((2,), device=torch.device("cpu")), torch.arange(2), torch.tensor([0, 1, 1])
    )
    given = {"scale": torch.tensor(2.0), "cache_position": torch.arange(3), "input_ids": torch.tensor([[5, 6, 6]])}
    shrunk = rows.shrink(given)
    assert shrunk["scale"] is given["scale"] and shrunk["cache_position"] is given["cache_position"]
    assert shrunk["input_ids"].tolist() == [[5, 6]]
