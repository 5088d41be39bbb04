"""Tokens of a packed batch know their documents: however they are changed, no model takes several for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from tests.torch_backend.models import collate, documents, patched, tiny
from torch_backend.packed_tokens import NOWHERE, PackedTokens, packed_tokens

BOS, REFUSED = torch.ones(2, 1, dtype=torch.int64), "a packed batch reached a model that is not patched"


def rows() -> PackedTokens:
    """Two rows: documents of 4 and 3 tokens and padding; one document."""
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, NOWHERE, NOWHERE, NOWHERE], [2] * 10])
    return packed_tokens(torch.arange(5, 25).view(2, 10), segments)


def embed(ids: Tensor) -> Tensor:
    return nn.Embedding(64, 8)(ids)


SEVERAL: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda ids: ids,
    "a row": lambda ids: ids[0],
    "by a list": lambda ids: ids[[0]],
    "by a mask": lambda ids: ids[ids != 11],
    "shifted": lambda ids: ids[:, :-1],
    "masked": lambda ids: ids.masked_fill(ids == 7, 0),
    "changed in place": lambda ids: ids.clone().masked_fill_(torch.rand(2, 10) < 0.5, 3),
    "squeezed in place": lambda ids: ids[:1].clone().squeeze_(0),
    "where": lambda ids: torch.where(ids > 6, ids, 0),
    "where, for several masks": lambda ids: torch.where(torch.ones(3, 1, 1, dtype=torch.bool), ids, 0),
    "where, a token of the row first": lambda ids: torch.where(ids > 6, ids[:, :1], ids),
    "where, a token first": lambda ids: torch.where(ids > 6, ids[0, 0], ids),
    "plus a column": lambda ids: ids[0] + torch.zeros(3, 1, dtype=torch.int64),
    "written into tokens": lambda ids: ids.scatter(1, torch.tensor([[1], [2]]), 3),
    "by a table": lambda ids: torch.arange(64).flip(0)[ids],
    "gathered by a table": lambda ids: torch.arange(64).expand(2, 64).gather(1, ids),
    "taken by a table": lambda ids: torch.arange(64).take(ids),
    "plus": lambda ids: (ids + 1) % 60,
    "of another dtype": lambda ids: ids.int(),
    "with a token before": lambda ids: torch.cat([BOS, ids], 1),
    "by keyword": lambda ids: torch.cat(tensors=[ids, ids], dim=0),
    "stacked": lambda ids: torch.stack([ids[0], ids[1]]),
    "padded": lambda ids: F.pad(ids, (0, 3), value=9),
    "flat": lambda ids: ids.view(-1),
    "turned": lambda ids: ids.T.T,
    "gathered": lambda ids: ids.gather(1, torch.arange(6).repeat(2, 1)),
    "selected": lambda ids: torch.index_select(ids, 0, torch.tensor([0])),
    "repeated": lambda ids: ids.repeat(2, 1),
    "split": lambda ids: ids.split([6, 4], 1)[0],
    "iterated": lambda ids: next(iter(ids)),
    "data": lambda ids: ids.data,
}
ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "the first": lambda ids: ids[:, :4],
    "the second and padding": lambda ids: ids[:1, 4:],
    "a row of one": lambda ids: ids[1:],
    "with a token before": lambda ids: torch.cat([BOS, ids[:, :4]], 1),
    "padded": lambda ids: F.pad(ids[:, :4], (2, 3), value=9),
    "padded as a sequence": lambda ids: nn.utils.rnn.pad_sequence([ids[0, :4], ids[1]], True, 3.0),
    "split": lambda ids: ids[0].split([4, 6])[0],
    "one token": lambda ids: ids[0, 2],
    "none": lambda ids: ids[:, :0],
    "types": torch.zeros_like,
    "places": lambda ids: ids.new_zeros(2, 10),
    "of their dtype": lambda ids: torch.ones(2, 10).to(ids),
    "of their type": lambda ids: torch.ones(2, 10, dtype=torch.int64).type_as(ids),
    "one hot": lambda ids: F.one_hot(ids[0] - 5, 10),
    "outer products": lambda ids: torch.outer(ids[0], torch.ones(10, dtype=torch.int64)),
    "outer products, of a tensor that is there": lambda ids: torch.outer(
        ids[0], ids[0] * 0, out=torch.ones(10, 10).long()
    ),
    "on a diagonal": lambda ids: torch.diag(ids[0]),
    "of their shape": lambda ids: torch.zeros(1, 1, dtype=torch.int64).expand_as(ids),
    "seen in their shape": lambda ids: torch.zeros(20, dtype=torch.int64).view_as(ids),
    "rows of a table": lambda ids: torch.zeros(64, 10, dtype=torch.int64)[ids],
    "counts": lambda ids: (ids != 3).long().cumsum(1),
    "said to be one": lambda ids: ids.as_subclass(Tensor),
}


@pytest.mark.parametrize("how", SEVERAL)
def test_tokens_of_several_documents_are_not_embedded(how: str) -> None:
    ids = SEVERAL[how](rows())
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        embed(ids)
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        torch.compile(embed, backend="eager")(ids)


@pytest.mark.parametrize("how", ONE)
def test_tokens_of_one_document_are(how: str) -> None:
    ids = ONE[how](rows())
    assert torch.equal(embed(ids) * 0, torch.zeros(*ids.shape, 8))


def test_a_recomputed_embedding_refuses_them_too() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (True, False):
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            checkpoint(embed, rows(), use_reentrant=reentrant)


def test_labels_that_are_made_of_tokens_stay_usable() -> None:
    ids = rows()
    labels = ids.masked_fill(ids == 5, -100)
    logits = torch.randn(2, 10, 64, requires_grad=True)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.as_subclass(Tensor)[:, 1:].flatten())
    torch.testing.assert_close(torch.autograd.grad(want, logits)[0], logits.grad, rtol=0, atol=0)
    chosen, same = (logits.gather(-1, x[..., None])[..., 0] for x in (ids, ids.as_subclass(Tensor)))
    assert torch.equal(chosen, same)
    assert ids.tolist() == ids.numpy().tolist() and int(ids.max()) == 24


WAYS_PAST: dict[str, Callable[[transformers.PreTrainedModel, dict[str, Tensor]], object]] = {
    "its tokens alone": lambda model, batch: model(batch["input_ids"]),
    "the decoder": lambda model, batch: model.base_model(batch["input_ids"]),
    "changed tokens": lambda model, batch: model(input_ids=batch["input_ids"].masked_fill(batch["input_ids"] == 9, 4)),
    "embeddings by hand": lambda model, batch: model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"])),
    "generate": lambda model, batch: model.generate(batch["input_ids"], max_new_tokens=2),
    "all that it holds": lambda model, batch: model(**batch),
    "a functional call": lambda model, batch: torch.func.functional_call(model, {}, (batch["input_ids"],)),
}


@pytest.mark.parametrize("how", WAYS_PAST)
def test_a_stock_model_beside_a_patched_one_refuses_packed_tokens(how: str) -> None:
    """A teacher inside a loss, a second model, a rebuilt one."""
    batch = collate(documents())
    patched()(**batch)
    with pytest.raises(PackingError, match=REFUSED):
        WAYS_PAST[how](tiny("llama"), batch)


@pytest.mark.parametrize("how", [name for name in WAYS_PAST if name != "all that it holds"])
def test_a_patched_model_refuses_packed_tokens_without_boundaries(how: str) -> None:
    batch = collate(documents())
    with pytest.raises((LayoutError, UnsupportedModelError), match=f"came packed from a collator|{REFUSED}"):
        WAYS_PAST[how](patched(), batch)


def test_documents_of_a_packed_batch_run_alone() -> None:
    batch, model = collate(documents(), capacity=None), patched().eval()
    packed = model(**batch).logits[0].split(batch["packed_lengths"])
    for ids, logits in zip(batch["input_ids"][0].split(batch["packed_lengths"]), packed, strict=True):
        torch.testing.assert_close(model(input_ids=ids[None]).logits[0], logits, rtol=1e-5, atol=1e-5)
