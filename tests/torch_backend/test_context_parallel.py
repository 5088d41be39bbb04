"""A batch cut over ranks has the loss and the gradients of one process, whichever documents straddle."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.torch_backend.context_audits import AUDITS
from tests.torch_backend.test_torchrun import RANKS
from tests.torch_backend.torchrun import assert_same_loss, torchrun
from tests.torch_backend.torchrun_context import (
    CASES,
    COMPILED_HYBRIDS,
    COMPILED_LEVELS,
    MEMORY,
    METHODS,
    PARTS,
    ROUTED,
    WRAPPERS,
    run,
    train,
)

pytestmark = pytest.mark.slow  # starts processes that train
OF_FOUR = ("two groups", "FSDP1, hybrid")  # which two ranks cannot form
NO_GRAPH = (
    "its documents are cut over ranks, into other pieces in every batch",
    "gradients are reduced over ranks during the backward",  # by FSDP1
)


@pytest.fixture(scope="module", params=RANKS, ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and gradients, by case."""
    found: dict[str, Any] = {}
    for part in PARTS:
        target = tmp_path_factory.mktemp("context") / "results.pt"
        torchrun("torchrun_context.py", str(target), part, ranks=request.param, limit=220)  # which compile layers
        found |= torch.load(target)
    return found


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(ranks: dict[str, Any], case: str) -> None:
    one, many = run(CASES[case]), ranks[case]
    assert_same_loss(many, one)
    assert many["tokens"] < one["tokens"]


@pytest.mark.parametrize("case", [*WRAPPERS, *OF_FOUR])
def test_steps_over_ranks_are_those_of_one_process(ranks: dict[str, Any], case: str) -> None:
    if case in OF_FOUR and f"step, {case}" not in ranks:
        return
    assert_same_steps(ranks[f"step, {case}"], train(), groups=2 if case == "two groups" else 1)


def test_steps_over_ranks_add_the_loss_of_routers_once(ranks: dict[str, Any]) -> None:
    one = train(family="qwen3_moe", changes=ROUTED)
    assert one["metrics"][0]["loss"] > 1.1 * train(family="qwen3_moe")["metrics"][0]["loss"]
    assert_same_steps(ranks["step, router"], one)


def test_gradients_are_averaged_after_the_backward(ranks: dict[str, Any]) -> None:
    events = ranks["averaged"]["events"]
    gradients = events.count("gradient")
    assert len(events) > gradients + 1
    assert events[:gradients] == ["gradient"] * gradients


@pytest.mark.parametrize("case", MEMORY)
def test_layers_that_recompute_exchange_again_and_train_the_same(ranks: dict[str, Any], case: str) -> None:
    assert_same_steps(ranks[f"memory, {case}"], train(family=MEMORY[case][0]))


@pytest.mark.parametrize("case", [*WRAPPERS, *COMPILED_HYBRIDS])
def test_layers_are_compiled_around_what_exchanges(ranks: dict[str, Any], case: str) -> None:
    found = ranks.get(f"compiled, {case}")
    if found is None:
        return  # four ranks compile none
    assert_same_steps(found, train(family=case if case in COMPILED_HYBRIDS else "qwen3"))
    assert "layers of the step: compiled, around what exchanges between ranks" in found["explained"]
    assert found["graphs"] > 0


def test_buckets_of_gradients_do_not_split_compiled_layers(ranks: dict[str, Any]) -> None:
    found = ranks.get("compiled, small buckets")
    if found is None:
        return
    assert_same_steps(found, train())
    assert 0 < found["graphs"] <= ranks["compiled, DDP"]["graphs"]


@pytest.mark.parametrize("case", COMPILED_LEVELS)
def test_layers_that_recompute_are_compiled_over_ranks(ranks: dict[str, Any], case: str) -> None:
    found, (family, level) = ranks[f"compiled, {case}"], COMPILED_LEVELS[case]
    assert_same_steps(found, train(family=family))
    if level == "selective":
        assert 'among whose operations memory="selective" cannot choose' in found["explained"]
        assert found["graphs"] == 0
        return
    how = f'compiled, memory="{level}", around what exchanges between ranks'
    how += ", with the inputs of layers on the device" * (level == "offload")
    how += ", keeping what triton and flash4 attention return" * (level == "attention")
    assert f"layers of the step: {how}\n" in found["explained"]
    assert found["graphs"] > 0


def assert_same_steps(many: Any, one: dict[str, Any], groups: int = 1) -> None:
    """The ranks have taken the steps of one process."""
    assert not isinstance(many, str), many
    for found, wanted in zip(many["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert many["evaluated"]["loss"] == pytest.approx(one["evaluated"]["loss"], rel=1e-5)
    assert many["evaluated"]["tokens"] == one["evaluated"]["tokens"] * groups
    for name, weight in one["weights"].items():
        assert float((many["weights"][name] - weight).abs().max()) <= 1e-6, name
    assert any(f"no CUDA graph: {reason}" in many["explained"] for reason in NO_GRAPH)


@pytest.mark.parametrize("name", AUDITS)
def test_an_audit_over_ranks_tells_what_is_exact(ranks: dict[str, Any], name: str) -> None:
    assert not isinstance(ranks[f"audit, {name}"], str), ranks[f"audit, {name}"]
    verdict, words, count = ranks[f"audit, {name}"]
    assert verdict == ("exact" if AUDITS[name][1] is None else "contaminated"), words
    assert f"documents cut over {count} ranks" in words


@pytest.mark.parametrize("method", METHODS)
def test_layers_send_what_the_formula_says_and_as_much_back(ranks: dict[str, Any], method: str) -> None:
    found = ranks[f"sent, {method}"]
    assert not isinstance(found, str), found
    assert found["layers"] == 2 and found["expected"] > 0
    assert found["forward"] == found["backward"] == found["expected"]


def test_ranks_that_are_seeded_alike_drop_other_channels(ranks: dict[str, Any]) -> None:
    found = ranks["dropped"]
    assert not isinstance(found, str), found
    assert found["dropped"] == pytest.approx(0.5, abs=0.05)
    assert found["alike"] == pytest.approx([0.5] * len(found["alike"]), abs=0.05)
    assert found["recomputed"]
    assert all(x == found["afterwards"][0] for x in found["afterwards"])


REFUSALS = {
    "shared prefixes": r"UnsupportedModelError: Qwen3ForCausalLM cannot run shared prefixes: the documents of its",
    "shared prefixes in a loss": r"UnsupportedModelError: Qwen3ForCausalLM cannot run shared prefixes: the documents o",
    "ALiBi of a modeling file": r"UnsupportedModelError: BloomForCausalLM cannot be trained under context parallelism",
    "decoder of whole documents": r"UnsupportedModelError: MptForCausalLM .* its decoder runs as a whole on batches of",
    "classifier": r"UnsupportedModelError: LlamaForSequenceClassification .* only the next-token loss of a causal lang",
    "encoder": r"UnsupportedModelError: BertModel .* only the next-token loss of a causal language model",
    "unpadding": r"UnsupportedModelError: unpad\(model\) does not compute over ranks that hold parts of documents",
    "weights in a trainer": r"UnsupportedError: a Trainer divides its loss by the number of targets, and rows with we",
    "mesh that does not divide": r"UnsupportedError: a mesh of 3 ranks does not divide the 4 ranks of the job",
    "dropout": r"UnsupportedModelError: Qwen3Attention \(layer 0\) drops attention weights with probability 0.1",
    "different batches": r"LayoutError: the ranks of a context-parallel group have different batches",
    "different labels": r"LayoutError: the ranks of a context-parallel group have different batches",
    "gradients of some ranks": r"UnsupportedError: DistributedDataParallel reduces gradients over ranks [0-3, ]+ and d",
    "gradients of some ranks, FSDP1": r"UnsupportedError: FullyShardedDataParallel reduces gradients over ranks \d",
    "targets of some ranks": r"UnsupportedError: targets would be counted on ranks [0-3, ]+ and documents are cut over",
    "no boundaries": r"UnsupportedError: the batch does not say where its documents begin, so it is not cut over ranks",
    "no boundaries in evaluation": r"UnsupportedError: the batch does not say where its documents begin, so it is not",
    "fewer tokens than ranks": r"PackingError: 1 tokens are fewer than \d ranks, so a rank would have none",
    "token of another vocabulary": r"LayoutError: input_ids holds 96 at row 0, token 20, and Qwen3ForCausalLM has embe",
    "weights of a call": r"UnsupportedModelError: a packed batch came with loss_weights .* which the loss of Mamba2For",
    "positions": r"LayoutError: position_ids are not those of a document of its own at .* leave position_ids out",
    "embeddings": r"UnsupportedError: a batch with inputs_embeds cannot be cut over ranks",
    "trainer": r"UnsupportedModelError: enable_packing\(trainer\) without ParallelismConfig\(cp_size=...\) does not co",
    "router": r"UnsupportedModelError: DeepseekV3ForCausalLM cannot be trained under .* the loss of its router is n",
    "router of a call": r"UnsupportedModelError: DeepseekV3ForCausalLM does not compute the loss of its router",
    "chunks": r"UnsupportedModelError: Llama4ForCausalLM cannot be trained under context parallelism, because its a",
    "heads": r'UnsupportedError: context_method="heads" needs heads that divide by the \d ranks',
    "method": r"PackingError: context_method is 'ring': pass auto, keys or heads",
    "mesh of two dimensions": r'PackingError: the mesh has 2 dimensions \(dp, cp\): .* as in mesh\["cp"\]',
    "no mesh": r"PackingError: mesh is a \w+: pass one dimension of a DeviceMesh",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_cut_is_refused(ranks: dict[str, Any], case: str) -> None:
    if case == "mesh that does not divide" and f"refuse, {case}" not in ranks:
        return  # every mesh of two ranks divides them
    assert re.match(REFUSALS[case], ranks[f"refuse, {case}"])


def test_explain_says_how_layers_cross_ranks(ranks: dict[str, Any]) -> None:
    assert "straddling documents exchange earlier keys and values (numbers sent: " in ranks["qwen3"]["explained"]
    assert "straddling documents exchange heads (numbers sent: " in ranks["qwen3, heads"]["explained"]
    assert "; straddling documents exchange heads" in ranks["mamba2"]["explained"]
    for case in ("mamba2, one head", "mamba"):
        assert "straddling documents run whole, each on one rank" in ranks[case]["explained"]
