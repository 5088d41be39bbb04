"""The entry of a patched model: packed batches pass it, whoever calls the model and however, or they raise."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torch_backend
from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from tests.processes import limited
from tests.torch_backend.hf.test_document_heads import classifier
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import alone, assert_same, collate, documents, error, packed, patched, tiny
from torch_backend import PackedCollator, make_train_step, with_boundaries
from torch_backend.hf.override import original_class
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.trainers.enable_packing import enable_packing

NOT_PATCHED = "not patched.*crosspack.patch"


class CallsForward(nn.Module):
    """As PEFT 0.18 to 0.20 have it: the model's forward is called past the hooks on the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        return self.model.forward(**kwargs)


# ---- forward called in place of the model


@pytest.mark.parametrize("family", ["llama", "falcon_alibi", "mamba2"])
def test_a_wrapper_may_call_forward(family: str) -> None:
    docs = documents()
    truth = alone(tiny(family), docs)
    found = packed(CallsForward(patched(family)), docs)
    found.gradients = {name.removeprefix("model."): x for name, x in found.gradients.items()}
    assert_same(found, truth, 2e-5)


class PicksArguments(CallsForward):
    """Leaves out what it does not know, as a head of somebody's own may."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        embedded = self.model.get_input_embeddings()(input_ids)
        return self.model(inputs_embeds=embedded, attention_mask=attention_mask, labels=labels)


def test_a_wrapper_that_leaves_out_the_boundaries_raises() -> None:
    model = torch_backend.patch(PicksArguments(tiny("llama")))
    batch = collate(documents())
    for _ in range(2):
        with pytest.raises(PackingError, match=NOT_PATCHED):
            model(**batch)
    model(input_ids=batch["input_ids"].as_subclass(Tensor))
    found = packed(torch_backend.patch(CallsForward(tiny("llama"))), documents())
    assert found.loss.isfinite()


@pytest.mark.parametrize("family", ["llama", "bert", "falcon_alibi"])
def test_a_wrapper_may_call_forward_of_a_classifier(family: str) -> None:
    docs = [{"input_ids": d, "labels": i % 3} for i, d in enumerate(documents())]
    model = torch_backend.patch(classifier(family).eval(), verify=False)
    batch = PackedCollator(model)(docs)
    want, found = model(**batch), model.forward(**batch)
    assert torch.equal(found.logits, want.logits) and torch.equal(found.loss, want.loss)
    one = classifier(family).eval()
    truth = torch.cat([one(input_ids=d["input_ids"][None]).logits for d in docs])
    assert error(found.logits, truth) < 2e-5


@pytest.mark.parametrize("family", ["bert", "mpnet"])  # by its attention layers, and per document
def test_a_wrapper_may_call_forward_of_an_encoder(family: str) -> None:
    docs = documents()
    one, model = (encoder(family, transformers.AutoModel).eval() for _ in range(2))
    torch_backend.patch(model, verify=False)
    truth = [one(input_ids=d[None]) for d in docs]
    found = model.forward(**PackedCollator(model)([{"input_ids": d} for d in docs]))
    assert error(found.last_hidden_state[0], torch.cat([x.last_hidden_state[0] for x in truth])) < 2e-5
    assert error(found.pooler_output, torch.cat([x.pooler_output for x in truth])) < 2e-5


def replaced(model: Any) -> Any:
    """As libraries replace the forward of an instance: by a function that never calls the one before."""
    stock = original_class(model).forward
    model.forward = MethodType(lambda self, *args, **kwargs: stock(self, *args, **kwargs), model)
    return model


def test_a_forward_that_replaces_the_patched_one_of_a_language_model_is_exact() -> None:
    docs = documents()
    assert_same(packed(replaced(patched()), docs), alone(tiny("llama"), docs), 2e-5)


def test_a_forward_that_replaces_the_patched_one_of_a_classifier_is_refused_until_it_is_patched_again() -> None:
    model = torch_backend.patch(classifier("llama").eval(), verify=False)
    batch = PackedCollator(model)([{"input_ids": d} for d in documents()])
    want = model(**batch).logits
    with pytest.raises(UnsupportedModelError, match="forward of LlamaForSeq.* was replaced.*crosspack.patch"):
        replaced(model)(**batch)
    assert torch.equal(torch_backend.patch(model, verify=False)(**batch).logits, want)
    torch_backend.unpatch(model)
    assert type(model) is type(classifier("llama")) and model.forward.__func__.__name__ == "<lambda>"


# ---- a batch of our collators meets a model that is not patched


def marked(docs: list[Tensor]) -> dict[str, Any]:
    """One row of documents, as ``with_boundaries`` carries them."""
    lengths = [[len(d) for d in docs]]
    return with_boundaries(dict)({"input_ids": torch.cat(docs)[None], "seq_lengths": lengths})


@pytest.mark.parametrize(
    ("family", "make"),
    [("llama", collate), ("falcon", marked), ("mamba", collate), ("qwen3_next", marked), ("recurrent_gemma", collate)],
)
def test_a_model_that_is_not_patched_cannot_run_a_packed_batch(family: str, make: Callable[..., Any]) -> None:
    with pytest.raises(PackingError, match=NOT_PATCHED):
        tiny(family)(**make(documents()))


def test_tokens_stay_packed_through_what_moves_batches() -> None:
    from accelerate.utils import concatenate, find_batch_size, send_to_device, slice_tensors

    docs = [{"input_ids": d.tolist()} for d in documents()]
    loader = DataLoader(docs, batch_size=4, collate_fn=PackedCollator(capacity=64), num_workers=1)
    with limited():
        loaded = next(iter(loader))
    saved = io.BytesIO()
    torch.save(loaded, saved)
    saved.seek(0)
    for batch in (
        loaded,
        torch.load(saved),
        copy.deepcopy(collate(documents())),
        pickle.loads(pickle.dumps(marked(documents()))),
    ):
        moved = send_to_device(batch, "cpu", non_blocking=True)
        ids = moved["input_ids"]
        parts = slice_tensors({"ids": ids}, slice(0, 1)), concatenate([{"ids": ids}, {"ids": ids}])
        assert find_batch_size(moved) == len(batch["input_ids"])
        for tokens in (ids, *(part["ids"] for part in parts)):
            with pytest.raises(PackingError, match=NOT_PATCHED):
                tiny("llama")(input_ids=tokens)
        patched()(**moved)


def _from_worker() -> dict[str, Any]:
    docs = [{"input_ids": d.tolist()} for d in documents(seed=11)]
    with limited():
        return dict(next(iter(DataLoader(docs, batch_size=4, collate_fn=PackedCollator(capacity=64), num_workers=1))))


@pytest.mark.parametrize("made", [lambda: collate(documents(seed=9)), lambda: marked(documents(seed=10)), _from_worker])
def test_tokens_that_are_picked_out_of_a_packed_batch_are_noticed(made: Callable[[], dict[str, Any]]) -> None:
    model, batch = patched(), made()
    ids, lost = batch["input_ids"], "^input_ids came packed from a collator, and its boundaries were left"
    with pytest.raises(LayoutError, match=lost):
        model(input_ids=ids.clone(), labels=ids)
    with pytest.raises(LayoutError, match=lost), torch.no_grad():
        model.eval()(ids[-1:], attention_mask=torch.ones_like(ids[-1:]))
    with pytest.raises(LayoutError, match=lost):
        model.model(input_ids=ids)
    step = torch_backend.make_train_step(model.train(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LayoutError, match=lost):
        step({"input_ids": ids, "labels": ids})
    model(**batch)


# ---- trainers


def trainer_of(tmp_path: Any, family: str, **options: Any) -> Any:
    rng = np.random.default_rng(0)
    data = [{"input_ids": (ids := rng.integers(4, 90, n).tolist()), "labels": ids} for n in rng.integers(3, 20, 12)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=1, learning_rate=0.1, optim="sgd",
        max_grad_norm=0.0, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        lr_scheduler_type="constant", dataloader_pin_memory=False,
    )  # fmt: skip
    return transformers.Trainer(args=arguments, train_dataset=data, data_collator=padded, **options)


def padded(features: list[Any]) -> dict[str, Tensor]:
    """Collates without packing: pads."""
    columns = {name: [torch.tensor(x[name]) for x in features] for name in ("input_ids", "labels")}
    fill = {"input_ids": 0, "labels": -100}
    return {name: nn.utils.rnn.pad_sequence(x, True, fill[name]) for name, x in columns.items()}


def test_a_trainer_keeps_the_column_that_marks_documents(tmp_path: Any) -> None:
    docs = datasets.Dataset.from_dict({"input_ids": [d.tolist() for d in documents(seed=13)]})
    rows = torch_backend.pack_dataset(docs, 64)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, max_steps=1, per_device_train_batch_size=1
    )

    def trainer(collator: Any) -> Any:
        return transformers.Trainer(patched(), arguments, train_dataset=rows, data_collator=collator)

    batches = list(trainer(PackedCollator()).get_train_dataloader())
    lengths = [n for batch in batches for n in batch["packed_lengths"]]
    assert len(batches) < len(lengths) and sorted(lengths) == sorted(map(len, docs["input_ids"]))
    with pytest.raises(LayoutError, match="marks its documents by seq_lengths, which a model does not read"):
        trainer(transformers.default_data_collator).train()
    assert "seq_lengths" not in inspect.signature(torch_backend.unpatch(patched()).forward).parameters


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_the_model_that_model_init_makes_is_patched(tmp_path: Any, family: str) -> None:
    def moved(trainer: Any) -> dict[str, Tensor]:
        enable_packing(trainer, capacity=64, verify=False, fast=False).train()
        return {name: x.detach() for name, x in trainer.model.named_parameters()}

    rebuilt = trainer_of(tmp_path, family, model_init=lambda: tiny(family))
    found = moved(rebuilt)
    assert state_of(rebuilt.model) is not None
    want = moved(trainer_of(tmp_path, family, model=tiny(family)))
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_the_model_that_model_init_makes_gets_the_noise_of_neftune(tmp_path: Any) -> None:
    def moved(alpha: float | None) -> Tensor:
        trainer = trainer_of(tmp_path, "llama", model_init=lambda: tiny("llama"))
        trainer.neftune_noise_alpha = alpha
        enable_packing(trainer, capacity=64, verify=False, fast=False).train()
        return trainer.model.get_input_embeddings().weight.detach()

    assert not torch.equal(moved(5.0), moved(None)) and torch.equal(moved(None), moved(None))


@pytest.mark.parametrize("fast", [True, False])
def test_a_model_put_into_a_trainer_later_is_refused_until_it_is_patched(tmp_path: Any, fast: bool) -> None:
    trainer = enable_packing(trainer_of(tmp_path, "llama", model=tiny("llama")), capacity=64, verify=False, fast=fast)
    trainer.model = trainer.model_wrapped = tiny("llama")
    with pytest.raises(PackingError, match=NOT_PATCHED):
        trainer.train()
    torch_backend.patch(trainer.model, verify=False)
    trainer.train()


def test_a_train_step_takes_a_patched_model_alone() -> None:
    model = tiny("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM is {NOT_PATCHED}"):
        make_train_step(model, optimizer)
    step = make_train_step(torch_backend.patch(model, verify=False), optimizer)
    torch_backend.unpatch(model)
    with pytest.raises(PackingError, match=NOT_PATCHED):
        step(collate(documents()))


# ---- the names of other packers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("packed_seq_lengths", torch.tensor([[3, 5]])),
        ("seq_lengths", [[3, 5]]),
        ("segment_ids", torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]])),
        ("cu_seqlens", torch.tensor([0, 3, 8])),
        ("cu_doc_lens", torch.tensor([0, 3, 8])),
        ("doc_lens", torch.tensor([[3, 5]])),
        ("sequence_id", torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])),
    ],
)
def test_a_mark_that_no_model_reads_is_refused_by_name(name: str, value: Any) -> None:
    model, ids = patched(), torch.arange(4, 12)[None]
    with pytest.raises(LayoutError, match=rf"by {name}, .*crosspack.with_boundaries"):
        model(input_ids=ids, **{name: value})
    with pytest.raises(LayoutError, match=f"by {name}, "):
        model(input_ids=ids, packed_lengths=(3, 5), **{name: value})
    model(input_ids=ids, **{name: None})


# ---- threads


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_two_threads(run: Callable[[int], list[Tensor]]) -> None:
    """``run(0)`` and ``run(1)`` give in two threads at once what they give alone, every time."""
    want = [run(number) for number in (0, 1)]

    def several(number: int) -> None:
        for _ in range(6):
            for got, right in zip(run(number), want[number], strict=True):
                assert torch.equal(got, right)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(several, number) for number in (0, 1)]:
            done.result()


@pytest.mark.parametrize("family", ["llama", "falcon_alibi", "qwen3_next"])
def test_two_threads_share_a_patched_model(switching: None, family: str) -> None:
    model = patched(family)
    weights = [p for p in model.parameters() if p.requires_grad]
    batches = collate(documents()), collate(documents((40, 9, 3, 12), seed=2))

    def run(number: int) -> list[Tensor]:
        output = model(**batches[number])
        return [output.logits.detach(), *torch.autograd.grad(output.loss, weights, allow_unused=False)]

    in_two_threads(run)


def test_a_packed_and_an_unpacked_thread_share_a_model(switching: None) -> None:
    model = patched().eval()
    batches = collate(documents()), {"input_ids": documents((40,))[0][None]}
    in_two_threads(lambda number: [model(**batches[number]).logits.detach()])


def test_threads_share_a_classifier(switching: None) -> None:
    model = torch_backend.patch(classifier("bert").eval(), verify=False)
    batches = [PackedCollator(model)([{"input_ids": d} for d in documents(n)]) for n in ((5, 9, 3), (12, 2, 7, 4))]
    in_two_threads(lambda number: [model(**batches[number]).logits.detach()])


def test_threads_share_a_model_that_one_of_them_calls_without_logits(switching: None) -> None:
    model, batch = patched(), collate(documents())

    def run(number: int) -> list[Tensor]:
        if number:
            return [x.detach() for x in causal_lm_loss(model, batch)]
        output = model(**batch)
        return [output.logits.detach(), output.loss.detach()]

    in_two_threads(run)
