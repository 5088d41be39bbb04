"""A replayed forward takes the recorded experts, with the present routing weights; anything else is an error."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_backend
from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.models import collate, documents, error, tiny
from torch_backend import RoutingRecord, record_routing, replay_routing
from torch_backend.hf.override import original_class

LENGTHS = (7, 20, 13, 1)
# Rows of 24: | 7 |   | 20 | 1 |   | 13 |     one row of 48: | 7 | 20 | 13 | 1 |
ROWS, ROW = {"capacity": 24, "strategy": "first_fit"}, {"capacity": 48}

FAMILIES = (
    *("afmoe", "aria_text", "axk1", "bailing_hybrid", "beam", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3"),
    *("dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "gpt_oss", "granitemoe"),
    *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jamba"),
    *("jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4_text", "longcat_flash", "mellum"),
    *("mimo_v2_flash", "minimax", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "qwen2_moe", "qwen3_5_moe_text"),
    *("qwen3_moe", "qwen3_next", "solar_open"),
)


def moe(family: str = "qwen3_moe", **changes: Any) -> Any:
    """A tiny patched model, whose experts add up in the same order in every batch."""
    model = tiny(family, **changes)
    model.set_experts_implementation("eager")
    return torch_backend.patch(model, verify=False)


def moved(model: Any) -> Any:
    """The model after a step that changes which experts it chooses."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.3 * parameter.abs().mean() * noise
    return model


@contextmanager
def watched(model: Any) -> Iterator[list[Tensor]]:
    """Collects the indices that the experts are given [T, K], in the order of the calls."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.extend(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point())

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if original_class(module).__name__.endswith("Experts")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def recorded(model: Any, batch: dict[str, Any]) -> RoutingRecord:
    with record_routing(model) as record, torch.no_grad():
        model(**batch)
    return record


# -- the choice --------------------------------------------------------------------------------------------------------


def expert(module: Any, number: int, x: Tensor) -> Tensor:
    gate, up = (x @ module.gate_up_proj[number].T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ module.down_proj[number].T


def by_loop(block: Any, x: Tensor, indices: Tensor) -> Tensor:
    """Qwen3's mixture at given experts, token by token: softmax over all, here not normalised over those visited."""
    found = []
    for token, visited in zip(x, indices.tolist(), strict=True):
        weights = (block.gate.weight @ token).softmax(-1)[visited]
        found.append(sum(w * expert(block.experts, e, token) for w, e in zip(weights, visited, strict=True)))
    return torch.stack(found)


def test_results_and_gradients_are_those_of_a_loop_over_tokens_at_the_recorded_experts() -> None:
    model = moe(num_hidden_layers=1, norm_topk_prob=False).double()
    record = recorded(model, collate(documents(LENGTHS), **ROW))
    block = moved(model).model.layers[0].mlp
    kept: dict[str, Tensor] = {}
    hook = block.register_forward_hook(lambda _, args, output: kept.update(x=args[0], y=output))
    with replay_routing(model, record):
        model(**collate(documents(LENGTHS), **ROW))
    hook.remove()
    own = recorded(model, collate(documents(LENGTHS), **ROW))
    indices = torch.cat(record.documents)[:, 0].long()
    assert (torch.cat(own.documents)[:, 0].sort(-1)[0] != indices.sort(-1)[0]).any()  # the replay changed something
    x = kept["x"].detach()[0, : len(indices)].requires_grad_()
    want = by_loop(block, x, indices)
    assert error(kept["y"][0, : len(indices)], want) < 1e-6  # transformers' softmax is float32
    out = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(2))
    trained = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    right = torch.autograd.grad(want, [x, *trained], out)
    whole = torch.zeros_like(kept["y"])
    whole[0, : len(indices)] = out
    found = torch.autograd.grad(kept["y"], [kept["x"], *trained], whole)
    assert error(found[0][0, : len(indices)], right[0]) < 1e-6
    assert all(error(a, b) < 1e-6 for a, b in zip(found[1:], right[1:], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_recorded_experts_in_other_rows(family: str) -> None:
    docs = documents(LENGTHS)
    model = tiny(family, **({"num_experts": 4, "moe_topk": 2} if family == "hunyuan_v1_moe" else {})).eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    torch_backend.patch(model, verify=False)
    own_choice = recorded(model, collate(docs, **ROWS))
    assert [len(document) for document in own_choice.documents] == list(LENGTHS)
    experts = 1 + max(int(document.max()) for document in own_choice.documents)
    record = own_choice.select(range(len(docs)))
    record.documents = [(document + 1) % experts for document in record.documents]
    batch = collate(docs, **ROW)
    with torch.no_grad():
        own = model(**batch)
        with watched(model) as seen, replay_routing(model, record):
            replayed = model(**batch)
        alone = []
        for number, document in enumerate(docs):
            with replay_routing(model, record.select([number])):
                alone.append(model(input_ids=document[None], use_cache=False).logits[0])
    assert (own.logits - replayed.logits).abs().max() > 1e-3  # other experts than its own
    assert error(replayed.logits[0, : sum(LENGTHS)], torch.cat(alone)) < 1e-5
    of_record = torch.cat(record.documents).long()
    if family not in ("jetmoe", "llama4_text"):  # their experts get other arguments
        for layer, indices in enumerate(seen):
            assert torch.equal(indices[: len(of_record)], of_record[:, layer])


def test_groups_of_the_recorded_experts_are_chosen_however_the_router_ranks_them() -> None:
    shape = {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 2}
    weights: list[Tensor] = []
    for family in ("deepseek_v2", "deepseek_v3"):
        weights.clear()
        model = moe(family, **shape, topk_method="group_limited_greedy").double().eval()
        docs = documents(LENGTHS)
        record = recorded(model, collate(docs, **ROW))
        other = RoutingRecord(record.routers, [(document + 2) % 8 for document in record.documents])  # the next group
        routers = [m for m in model.modules() if type(m).__name__.endswith("TopkRouter")]
        hooks = [r.register_forward_hook(lambda _, args, output: weights.append(output[1])) for r in routers]
        with watched(model) as seen, replay_routing(model, other):
            model(**collate(docs, **ROW))
        for hook in hooks:
            hook.remove()
        for layer, (indices, found) in enumerate(zip(seen, weights, strict=True)):
            assert torch.equal(indices[: sum(LENGTHS)], torch.cat(other.documents)[:, layer].long())
            assert (found[: sum(LENGTHS)] > 0).all()  # 0 where the group was hidden


def test_a_second_forward_gives_nearer_log_probabilities_where_rounding_chooses_other_experts() -> None:
    """In bfloat16, padded and packed: the policy loss's ratio is off by rounding alone."""
    model = tiny("qwen3_moe", num_local_experts=64, num_experts_per_tok=8, num_hidden_layers=6).bfloat16().eval()
    docs = documents((30,) * 8)
    torch_backend.patch(model, verify=False)
    batch, padded = collate(docs, capacity=512), {"input_ids": torch.stack(docs), "use_cache": False}

    def logits(batch: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            return model(**batch).logits.flatten(0, 1)[: 30 * 8].float().log_softmax(-1)

    with record_routing(model) as record:
        first = logits(padded)
    own = recorded(model, batch)
    pairs = zip(record.documents, own.documents, strict=True)
    assert any((a.sort(-1)[0] != b.sort(-1)[0]).any() for a, b in pairs)
    second = logits(batch)
    with replay_routing(model, record):
        replayed = logits(batch)
    assert (replayed - first).abs().max() < 0.5 * (second - first).abs().max()


def test_recording_changes_nothing_and_leaves_nothing_behind() -> None:
    model, batch = moe(), collate(documents(LENGTHS), **ROWS)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    want = model(**batch).logits
    with record_routing(model):
        found = model(**batch).logits
    assert torch.equal(found, want)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert not model.model._forward_pre_hooks and not model.model._forward_hooks


# -- forwards and batches ----------------------------------------------------------------------------------------------


def test_several_forwards_are_recorded_and_replayed_in_their_order() -> None:
    model, docs = moe(), documents(LENGTHS)
    with record_routing(model) as record:
        for document in docs:
            model(**collate([document]))
    assert [len(document) for document in record.documents] == list(LENGTHS)
    moved(model)
    with watched(model) as seen, replay_routing(model, record.select([2, 3, 0])):
        model(**collate([docs[2], docs[3]], **ROW))
        model(**collate([docs[0]], **ROW))
    for call, numbers in enumerate(([2, 3], [0])):
        want = torch.cat([record.documents[number] for number in numbers]).long()
        for layer in (0, 1):
            assert torch.equal(seen[2 * call + layer][: len(want)], want[:, layer])


def test_padded_and_unpatched_batches_hold_the_tokens_that_their_mask_marks() -> None:
    docs = documents((5, 9))
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for row, document in enumerate(docs):
        ids[row, 9 - len(document) :], mask[row, 9 - len(document) :] = document, 1  # padded on the left
    model = tiny("qwen3_moe").eval()
    model.set_experts_implementation("eager")
    record = recorded(model, {"input_ids": ids, "attention_mask": mask})
    for document, found in zip(docs, record.documents, strict=True):
        assert torch.equal(found, recorded(model, {"input_ids": document[None]}).documents[0])
    torch_backend.patch(moved(model), verify=False)
    with watched(model) as seen, replay_routing(model, record):
        model(**collate(docs, **ROW))
    assert torch.equal(seen[0][:14], torch.cat(record.documents)[:, 0].long())


def test_a_split_document_is_one_document_of_the_record() -> None:
    model, docs = moe(), documents((30, 6))
    split = collate(docs, capacity=20, overflow="split")
    record = recorded(model, split)
    assert [len(document) for document in record.documents] == [30, 6]
    with replay_routing(moved(model), record), watched(model) as seen:
        model(**collate(docs, capacity=40))
    assert torch.equal(seen[1][:36], torch.cat(record.documents)[:, 1].long())


# -- the backward ------------------------------------------------------------------------------------------------------


def gradients(model: Any, loss: Tensor, *, elsewhere: bool = False) -> dict[str, Tensor]:
    model.zero_grad()
    thread = threading.Thread(target=loss.backward) if elsewhere else None
    if thread is None:
        loss.backward()
    else:
        thread.start()
        thread.join()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "backward on another thread"])
def test_recomputed_layers_take_the_same_experts_after_the_context(reentrant: bool, elsewhere: bool) -> None:
    model, docs = moe(), documents(LENGTHS)
    record = recorded(model, collate(docs, **ROWS))
    moved(model)
    batch = collate(docs, **ROW)
    with replay_routing(model, record):
        loss = model(**batch).loss
    want = gradients(model, loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with watched(model) as seen:
        with replay_routing(model, record.select([0, 1, 2, 3] * 2)):  # two forwards before the first backward
            losses = [model(**batch).loss, model(**batch).loss]
        forward = len(seen)
        found = [gradients(model, loss, elsewhere=elsewhere) for loss in losses]
    assert len(seen) == 2 * forward
    for each in found:
        assert set(each) == set(want) and all(torch.equal(each[name], want[name]) for name in want)


def test_adapters_of_peft_train_at_the_recorded_experts() -> None:
    from peft import LoraConfig, get_peft_model

    model, docs = moe(), documents(LENGTHS)
    record = recorded(model, collate(docs, **ROWS))
    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        init_lora_weights=False,
    )  # fmt: skip
    adapted = get_peft_model(model, config)
    torch_backend.patch(adapted, verify=False)
    with watched(model) as seen, replay_routing(adapted, record):
        loss = adapted(**collate(docs, **ROW)).loss
    assert torch.equal(seen[0][: sum(LENGTHS)], torch.cat(record.documents)[:, 0].long())
    found = gradients(adapted, loss)
    adapted_parts = {part for name in found for part in re.findall(r"(\w+)(?:\.base_layer)?\.lora_", name)}
    assert adapted_parts == {"q_proj", "experts", "gate"}
    assert all(gradient.abs().max() > 0 for gradient in found.values())


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_records_that_do_not_fit_are_refused_before_a_layer_with_experts_runs() -> None:
    model, docs = moe(), documents(LENGTHS)
    record = recorded(model, collate(docs, **ROW))

    def refused(record: RoutingRecord, batch: dict[str, Any], text: str) -> None:
        with watched(model) as seen, pytest.raises(LayoutError, match=re.escape(text)), replay_routing(model, record):
            model(**batch)
        assert not seen

    batch = collate(docs, **ROW)
    refused(
        record.select([1, 0, 2, 3]), batch, "document 0 of the record has 20 tokens and the batch's document in its"
    )
    refused(record.select([0, 1]), batch, "the batch has 4 documents and 2 of the record's 2 are left")
    refused(RoutingRecord(record.routers), batch, "the record has no documents")
    refused(
        RoutingRecord(record.routers, [d + 3 for d in record.documents]), batch,
        "for layers.0.mlp.gate, which has 4: it is of another model, so record this one",
    )  # fmt: skip
    refused(
        RoutingRecord(record.routers, [d[..., :1] for d in record.documents]), batch,
        "the record has 1 experts of each token for layers.0.mlp.gate, which takes 2",
    )  # fmt: skip
    refused(
        RoutingRecord(record.routers, [d[:, 0] for d in record.documents]), batch,
        "document 0 of the record must be integers [L, 2 routers, K], got torch.int16 [7, 2]",
    )  # fmt: skip
    other = recorded(moe(num_hidden_layers=3), batch)
    refused(
        other, batch, "the record is of another model: its routers are layers.0.mlp.gate, layers.1.mlp.gate, ... (3)"
    )


def test_documents_that_are_left_over_are_an_error_and_so_is_a_record_of_nothing() -> None:
    model, docs = moe(), documents(LENGTHS)
    record = recorded(model, collate(docs, **ROW))
    with pytest.raises(LayoutError, match="had 1 documents and the record has 4"), replay_routing(model, record):
        model(**collate(docs[:1], **ROW))
    with pytest.raises(LayoutError, match="no forward of Qwen3MoeForCausalLM ran inside"), record_routing(model):
        pass
    with pytest.raises(LayoutError, match="document 4 is selected, and the record has 4: select 0 to 3"):
        record.select([4])


def test_one_context_at_a_time() -> None:
    model, batch = moe(), collate(documents(LENGTHS), **ROW)
    with record_routing(model):
        model(**batch)
        with (
            pytest.raises(UnsupportedError, match="the routing of Qwen3MoeForCausalLM is recorded or replayed already"),
            record_routing(model),
        ):
            pass
    assert len(recorded(model, batch)) == len(LENGTHS)


def test_an_error_inside_is_the_one_that_is_raised_and_leaves_the_model_usable() -> None:
    model, batch = moe(), collate(documents(LENGTHS), **ROW)
    with pytest.raises(ZeroDivisionError), record_routing(model):
        raise ZeroDivisionError
    with pytest.raises(LayoutError, match="no forward"), record_routing(model), pytest.raises(PackingError):
        model(**batch, no_such_argument=1)
    assert len(recorded(model, batch)) == len(LENGTHS)


def test_a_forward_that_ends_in_an_error_adds_no_documents() -> None:
    model, batch = moe(), collate(documents(LENGTHS), **ROW)
    with record_routing(model) as record:
        late = model.model.norm.register_forward_pre_hook(lambda *args: 1 / 0)  # behind all routers
        with pytest.raises(ZeroDivisionError):
            model(**batch)
        late.remove()
        model(**batch)
    assert len(record) == len(LENGTHS)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", "Qwen3ForCausalLM has no routers whose choice could be recorded: leave record_routing out"),
        (
            "phimoe",
            "PhimoeForCausalLM does not choose its experts by topk, .*: train it without routing replay",
        ),
        ("inkling_text", "the layers of InklingForCausalLM run per document"),
        ("zaya", "the layers of ZayaForCausalLM run per document"),
    ],
)
def test_families_that_cannot_be_recorded_are_refused_by_name(family: str, text: str) -> None:
    model = torch_backend.patch(tiny(family), verify=False)
    with pytest.raises(UnsupportedModelError, match=text), record_routing(model):
        model(**collate(documents(LENGTHS), **ROW))


def test_layers_that_are_compiled_or_recomputed_by_others_are_refused() -> None:
    model, docs = moe(), documents(LENGTHS)
    record = recorded(model, collate(docs, **ROW))
    layer = model.model.layers[0]
    run = layer.forward
    for reentrant in (False, True):
        layer.forward = lambda *a, r=reentrant, **k: checkpoint(lambda *b: run(*b, **k), *a, use_reentrant=r)
        torch_backend.patch(model, verify=False)
        text = "runs inside torch.utils.checkpoint and would not"
        with pytest.raises(UnsupportedModelError, match=text), replay_routing(model, record):
            model(**collate(docs, **ROW))
        del layer.forward
    layer.compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="the layers of Qwen3MoeForCausalLM are compiled"):
        recorded(model, collate(docs, **ROW))


def test_a_forward_that_goes_on_from_a_cache_is_refused() -> None:
    model = tiny("qwen3_moe").eval()
    cache = model(input_ids=documents((5,))[0][None], use_cache=True).past_key_values
    with pytest.raises(UnsupportedModelError, match="goes on from a cache"), record_routing(model):
        model(input_ids=torch.tensor([[4]]), past_key_values=cache)
