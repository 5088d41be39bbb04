"""Training conditions, on a family of every route: none of them may let documents see each other.

Families: qwen3 (segments reach attention), gpt_oss (sinks and windows), qwen3_next (segments reach the convolution and
scan of a mixer), phi3 with longrope (rotary frequencies per document), bloom (the whole decoder per document).
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_backend
from conformance.pairwise import pairwise
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import Run, alone, assert_same, collate, documents, error, packed, tiny, traces
from torch_backend.hf.attention import PREFIX
from torch_backend.hf.patch import state_of

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [4.0 + i for i in range(8)],
        "original_max_position_embeddings": 24,
        "factor": 4.0,
    },
}
CHANGES: dict[str, dict[str, Any]] = {"phi3": LONGROPE}
ROUTES = ["qwen3", "gpt_oss", "qwen3_next", "phi3", "gptj", "bloom", "falcon_alibi"]


def model_of(family: str, seed: int = 0) -> Any:
    return tiny(family, seed, **CHANGES.get(family, {}))


def patched(family: str, seed: int = 0) -> Any:
    return torch_backend.patch(model_of(family, seed), verify=False)


@pytest.mark.parametrize(
    ("family", "layout", "train"),
    [
        tuple(case.values())
        for case in pairwise(
            {"family": ROUTES, "layout": ["padded_rows", "padding_free", "all_ones_mask"], "train": [True, False]}
        )
    ],
)
def test_layouts_in_both_modes(family: str, layout: str, train: bool) -> None:
    model, docs = model_of(family).train(train), documents()
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    options = {"padding_free": {"capacity": None}}.get(layout, {})
    batch = collate(docs, **options)
    if layout == "all_ones_mask":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    assert_same(packed(model, docs, batch), truth, 2e-5)


@pytest.mark.parametrize(
    ("family", "reentrant"), [*((family, False) for family in ROUTES), ("qwen3", True), ("falcon_alibi", True)]
)
def test_checkpointing_with_two_forwards_and_backward_on_another_thread(family: str, reentrant: bool) -> None:
    model, first, second = model_of(family), documents(), documents((30, 3, 11), seed=5)
    truths = [alone(model, first), alone(model, second)]
    torch_backend.patch(model, verify=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss = model(**collate(first)).loss + model(**collate(second)).loss
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    want = {name: truths[0].gradients[name] + truths[1].gradients[name] for name in truths[0].gradients}
    got = {name: parameter.grad for name, parameter in model.named_parameters() if name in want}
    assert_same(Run([], loss.detach(), got), Run([], truths[0].loss + truths[1].loss, want), 2e-5)


@pytest.mark.parametrize("family", ROUTES)
def test_autocast(family: str) -> None:
    """Under bfloat16 autocast packed differs from alone by what autocast itself costs, and no document by another."""
    model, docs = model_of(family), documents()
    exact = alone(model, docs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = alone(model, docs)
        torch_backend.patch(model, verify=False)
        got = packed(model, docs)
        changed = packed(model, [documents((33,), seed=9)[0] if i == 2 else d for i, d in enumerate(docs)])
    cost = max(error(r, e) for r, e in zip(rounded.logits, exact.logits, strict=True))
    assert 1e-3 < max(error(g, e) for g, e in zip(got.logits, exact.logits, strict=True)) <= 2 * cost
    if family != "gpt_oss":  # a router's grouping depends on all tokens, and with it the rounding
        assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(got.logits, changed.logits, strict=True)) if i != 2)


@pytest.mark.parametrize(
    ("family", "when"), [*((family, "before") for family in ROUTES), ("qwen3", "after"), ("falcon_alibi", "after")]
)
def test_lora(family: str, when: str) -> None:
    from peft import LoraConfig, get_peft_model

    base, docs = model_of(family), documents()
    linear = {name.rpartition(".")[2] for name, m in base.named_modules() if isinstance(m, nn.Linear)}
    config = LoraConfig(r=4, target_modules=sorted(linear - {"lm_head"}), init_lora_weights=False)
    torch.manual_seed(0)
    truth = alone(get_peft_model(copy.deepcopy(base), config), docs)
    torch.manual_seed(0)
    if when == "before":
        model = get_peft_model(torch_backend.patch(base, verify=False), config)
    else:
        model = torch_backend.patch(get_peft_model(base, config), verify=False)
    assert_same(packed(model, docs), truth, 2e-5)
    assert any("lora_A" in name for name in truth.gradients)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_queries_left_in_float32(family: str) -> None:
    """PEFT on quantised weights can hand float32 queries and keys to attention beside bfloat16 values."""
    model, docs = model_of(family).to(torch.bfloat16), documents()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_hook(lambda module, args, out: out.float())
    torch_backend.patch(model, verify=False)
    output = model(**collate(docs))
    assert output.logits.dtype == torch.bfloat16 and output.logits.isfinite().all()
    output.loss.backward()


@pytest.mark.parametrize("family", ROUTES)
def test_dropout(family: str) -> None:
    """It drops, the same seed drops the same, and one document's draw is not another's business."""
    model = model_of(family)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.5
    torch_backend.patch(model, verify=False)
    docs = documents()

    def run(docs: list[Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        return packed(model, docs).logits

    first, again = run(docs), run(docs)
    changed = run([documents((33,), seed=9)[0] if i == 2 else d for i, d in enumerate(docs)])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert max(error(b, a) for i, (a, b) in enumerate(zip(first, changed, strict=True)) if i != 2) < 1e-5
    dry = packed(model.eval(), docs).logits
    assert error(first[2], dry[2]) > 1e-2


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["lfm2"])  # attention and a convolution
def test_compiled_once_for_all_segmentations(family: str) -> None:
    """Holds where shapes are fixed and no lengths are needed on the host, unlike batches of documents."""
    rows = []
    for seed in range(3):
        cuts = torch.randperm(15, generator=torch.Generator().manual_seed(seed))[:2].sort().values.tolist()
        lengths = tuple(end + 1 - start for start, end in zip([0, *(c + 1 for c in cuts)], [*cuts, 15], strict=True))
        rows.append(collate(documents(lengths, seed), capacity=16, max_seqlen=16, bucket=4))
    model, sibling = (torch_backend.patch(model_of(family), implementation="triton", verify=False) for _ in range(2))
    eager = [sibling(**row).loss for row in rows]
    model(**rows[0])  # asks what serves each layer
    for row in rows:
        del row["packed_lengths"]  # numbers on the host would be compiled in
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    graphs = []
    for row, want in zip(rows, eager, strict=True):
        loss = compiled(**row).loss
        graphs.append(counter.frame_count)
        assert error(loss.detach(), want.detach()) < 1e-5
    loss.backward()
    assert len(set(graphs)) == 1
    torch._dynamo.reset()


# Families that compute attention themselves, beside one of every route.
OWN_ATTENTION = ["openai-gpt", "mpt", "falcon", "xglm"]


@pytest.mark.parametrize("family", [*ROUTES, *OWN_ATTENTION])
def test_unpacked_batches_generation_and_siblings_are_unchanged_to_the_bit(family: str) -> None:
    model, sibling = model_of(family).eval(), model_of(family, seed=1).eval()
    ids = torch.stack(documents((20, 20)))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    calls: list[Callable[[], Tensor]] = [
        lambda: model(input_ids=ids).logits,
        lambda: model(input_ids=ids, attention_mask=mask).logits,
        lambda: model(input_ids=ids, attention_mask=mask.flip(1)).logits,
        lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss,
        lambda: model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False),
        lambda: sibling(input_ids=ids).logits,
    ]
    with torch.no_grad():
        before = [call() for call in calls]
        torch_backend.patch(model, verify=False)
        after = [call() for call in calls]
        packed(model, documents())
        later = [call() for call in calls]
    for want, got, again in zip(before, after, later, strict=True):
        assert torch.equal(want, got) and torch.equal(want, again)


@pytest.mark.parametrize("family", [*ROUTES, *OWN_ATTENTION])
def test_unpatch_restores_everything(family: str) -> None:
    model = model_of(family)
    before = traces(model)
    torch_backend.patch(model, verify=False)
    assert traces(model) != before
    if family != "phi3":  # whose frequencies are those of its last call
        packed(model, documents())
    for _ in range(2):
        torch_backend.unpatch(model)
        assert traces(model) == before


@pytest.mark.parametrize("family", ROUTES)
def test_two_patched_models_in_one_process(family: str) -> None:
    one, two = model_of(family), model_of(family, seed=1)
    first, second = documents(), documents((30, 3, 11), seed=5)
    truths = alone(one, first), alone(two, second)
    torch_backend.patch(one, verify=False)
    torch_backend.patch(two, implementation="reference", verify=False)
    outputs = one(**collate(first)), two(**collate(second))
    for model, output, truth in zip((one, two), outputs, truths, strict=True):
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if n in truth.gradients}
        assert_same(Run([], output.loss.detach(), gradients), Run([], truth.loss, truth.gradients), 2e-5)
    torch_backend.unpatch(one)
    assert_same(packed(two, second), truths[1], 2e-5)


@pytest.mark.parametrize("family", ROUTES)
def test_saving_and_loading(family: str, tmp_path: Any) -> None:
    model, docs = patched(family), documents()
    want = packed(model, docs)
    model.save_pretrained(tmp_path)
    assert PREFIX not in "".join(p.read_text() for p in tmp_path.glob("*.json"))
    loaded = type(model).from_pretrained(tmp_path).train()
    assert state_of(loaded) is None and not loaded.config._attn_implementation.startswith(PREFIX)
    weights = loaded.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], x) for name, x in model.state_dict().items())
    # as near as rounding allows: where weights lie in memory decides in which order a CPU adds
    assert_same(packed(torch_backend.patch(loaded, verify=False), docs), want)


@pytest.mark.parametrize("family", ROUTES)
def test_what_a_call_keeps_is_freed_with_its_output(family: str) -> None:
    """A cycle of references would hold all activations until garbage is looked for."""

    def results() -> int:
        return sum(type(x) is Tensor and x.grad_fn is not None for x in gc.get_objects())

    model, batch = patched(family), collate(documents())
    model(**batch)
    gc.collect()
    gc.disable()
    try:
        before = results()
        output = model(**batch)
        assert results() > before
        del output
        assert results() == before
    finally:
        gc.enable()


def without_values(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model whose tensors have shapes, dtypes and devices only."""
    fake = copy.deepcopy(model)
    for module in fake.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(mode.from_tensor(parameter.detach()))
        for holder in (module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, Tensor):
                    holder[name] = mode.from_tensor(value)
    return fake


# gpt_oss and qwen3_next have routers, which read which experts were hit, unpacked as well.
@pytest.mark.parametrize("family", ["qwen3", "phi3", "mamba2", "bloom", "falcon_alibi"])
def test_nothing_is_read_back_from_the_device(family: str) -> None:
    """Without values whatever reads one raises, be it through .item(), .tolist() or .numpy()."""
    mode = FakeTensorMode()
    fake, batch = without_values(patched(family), mode), collate(documents())
    tensors = {name: mode.from_tensor(value) for name, value in batch.items() if isinstance(value, Tensor)}
    with mode:
        loss = fake(**{**batch, **tensors}).loss
        loss.backward()
    assert all(parameter.grad is not None for parameter in fake.lm_head.parameters())
    del tensors["labels"], batch["packed_lengths"]  # now the lengths have to be read from the boundaries
    with mode, pytest.raises(Exception, match="(?i)fake|data.?dependent|_local_scalar_dense"):
        fake(**{**batch, **tensors})


def test_data_parallel_is_refused_also_when_it_comes_later() -> None:
    model = patched("qwen3")
    replica = copy.copy(model)
    replica._is_replica = True
    with pytest.raises(UnsupportedModelError, match="use DistributedDataParallel"):
        replica(input_ids=documents()[0][None])


def test_dynamic_frequencies_inside_a_layer_are_refused() -> None:
    model = model_of("phi3")
    model.model.layers[0].self_attn.rotary = model.model.rotary_emb
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.rotary chooses its rotary frequencies"):
        torch_backend.patch(model, verify=False)


def test_explain_speaks_of_every_route() -> None:
    texts = {}
    for family in ROUTES:
        model = patched(family)
        model(**collate(documents()))
        texts[family] = str(torch_backend.explain(model))
    assert "layers.0.self_attn: attention -> sdpa  4 heads" in texts["qwen3"]
    assert "linear_attn: row -> its own forward on the row  convolution by plain torch on" in texts["qwen3_next"]
    assert "rotary frequencies depend on the longest position and are chosen per document" in texts["phi3"]
    assert "route documents: its attention is its own and not transformers' interface" in texts["falcon_alibi"]
    assert "sinks" in texts["gpt_oss"]
