"""The overrides for torchtitan on a stand-in, whose signatures ``python -m tests.stacks torchtitan`` compares."""

from __future__ import annotations

import json
import sys
from itertools import islice, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.kernels import interpreted as interpreted

WORDS, WIDTH, HEADS, KEYS, CAPACITY = 20, 8, 4, 2, 12
DOCUMENTS = [[(3 * i + j) % WORDS for j in range(n)] for i, n in enumerate((5, 3, 9, 2, 7, 4, 8, 6))]
PROMPT = 2  # first tokens of each document that are not trained


class Model(nn.Module):
    """One attention layer over absolute positions, so that a wrong position shows as well."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CAPACITY, WIDTH)
        sizes = {"q": HEADS, "k": KEYS, "v": KEYS}
        self.project = nn.ModuleDict({name: nn.Linear(WIDTH, 4 * heads) for name, heads in sizes.items()})
        self.head = nn.Linear(4 * HEADS, WORDS)
        self.inner = inner
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, masks) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        q, k, v = (each(x).unflatten(-1, (-1, 4)) for each in self.project.values())
        return self.head(self.inner(q, k, v, attention_masks=masks, enable_gqa=True).flatten(2))


class Alone(nn.Module):
    """Attention of a whole row to itself: the reference, which knows no documents."""

    def __init__(self, seen) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, q, k, v, *, attention_masks, enable_gqa) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("blnh,bmnh->bnlm", q, k) / q.shape[-1] ** 0.5
        place = torch.arange(q.shape[1])
        scores = scores.masked_fill(~self.seen(place[:, None], place[None]), -torch.inf)
        return torch.einsum("bnlm,bmnh->blnh", scores.softmax(-1), v)


def loader(plugin, documents=None, *, tokenizer=None, rank=0, ranks=1, rows=2, infinite=False, **options):
    source = [{"input_ids": x, "prompt_length": PROMPT} for x in DOCUMENTS] if documents is None else documents
    given = plugin.ParallelAwareDataloader.Config()
    config = plugin.packed_rows(given, documents=source, **options)
    config.infinite = infinite
    return plugin.PackedDataLoader(
        config, dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, seq_len=CAPACITY, local_batch_size=rows
    )


def documents_in(batches) -> list[tuple[list[int], list[int]]]:
    """Cuts batches where positions restart, as torchtitan does; drops what has no target, which is padding."""
    found = []
    for inputs, labels in batches:
        for tokens, positions, row in zip(inputs["input"], inputs["positions"], labels, strict=True):
            starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(tokens)]
            for begin, end in pairwise(starts):
                assert positions[begin:end].tolist() == list(range(end - begin))
                if any(row[begin:end] != -100):
                    found.append((tokens[begin:end].tolist(), row[begin:end].tolist()))
    return found


@pytest.mark.parametrize(
    ("window", "seen"),
    [
        ((-1, 0), lambda i, j: j <= i),
        ((2, 0), lambda i, j: (j <= i) & (i - j <= 2)),
        ((-1, -1), lambda i, j: (i >= 0) & (j >= 0)),
    ],
)
def test_gradients_are_those_of_each_document_alone(plugin, window, seen) -> None:
    attention = sys.modules["torchtitan.models.common.attention"]
    config = plugin.packed_attention(attention.VarlenAttention.Config(window_size=window))
    model, reference = Model(plugin.PackedAttention(config)), Model(Alone(seen))
    reference.load_state_dict(model.state_dict())
    for inputs, labels in loader(plugin, seed=1):
        masks = attention.create_varlen_metadata_for_document(inputs["positions"])
        logits = model(inputs["input"], inputs["positions"], masks)
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for document in DOCUMENTS:
        logits = reference(torch.tensor([document]), torch.arange(len(document))[None], None)[0]
        targets = torch.tensor([-100] * PROMPT + document[PROMPT:])[1:]
        nn.functional.cross_entropy(logits[:-1], targets, reduction="sum").backward()
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_rows_hold_every_document_once_and_no_target_crosses(plugin) -> None:
    expected = [(x, [*([-100] * PROMPT + x[PROMPT:])[1:], -100]) for x in DOCUMENTS if len(x) > PROMPT]
    assert sorted(documents_in(loader(plugin))) == sorted(expected)


def test_ranks_share_the_documents(plugin) -> None:
    parts = [[*loader(plugin, rank=rank, ranks=2, rows=1)] for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    found = [tokens for part in parts for tokens, _ in documents_in(part)]
    assert sorted(found) == sorted(x for x in DOCUMENTS if len(x) > PROMPT)


def test_an_infinite_loader_begins_the_next_epoch_and_a_finite_one_ends(plugin) -> None:
    epoch = len([*loader(plugin, seed=1)])
    batches = [*islice(loader(plugin, seed=1, infinite=True), 2 * epoch)]
    assert len(batches) == 2 * epoch
    assert sorted(documents_in(batches[:epoch])) == sorted(documents_in(batches[epoch:]))


@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_loader_continues_from_its_state(plugin, read) -> None:
    expected = [batch["input"].tolist() for batch, _ in islice(loader(plugin, seed=1, infinite=True), 6)]
    first = loader(plugin, seed=1, infinite=True)
    batches = iter(first)
    for _ in range(read):
        next(batches)
    second = loader(plugin, seed=1, infinite=True)
    second.load_state_dict(first.state_dict())
    assert [batch["input"].tolist() for batch, _ in islice(second, 6 - read)] == expected[read:]


def test_a_file_holds_tokens_or_text_and_other_columns_are_left_out(plugin, tmp_path) -> None:
    file = tmp_path / "train.jsonl"
    tokenizer = SimpleNamespace(encode=lambda text, *, add_bos, add_eos: [1, *map(int, text.split()), 2])
    file.write_text(json.dumps({"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "source": "web"}) + "\n")
    assert documents_in(loader(plugin, str(file), rows=1))[0] == ([5, 6, 7], [-100, 7, -100])
    file.write_text(json.dumps({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}) + "\n")
    assert documents_in(loader(plugin, str(file), rows=1))[0] == ([5, 6, 7], [-100, 7, -100])
    file.write_text(json.dumps({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "seq_lengths": [2, 2]}) + "\n")
    assert documents_in(loader(plugin, str(file), rows=1)) == [([5, 6], [6, -100]), ([7, 8], [8, -100])]
    file.write_text(json.dumps({"input_ids": [5, 6, 7], "seq_lengths": [2, 2]}) + "\n")
    with pytest.raises(LayoutError, match=r"train.jsonl:1: seq_lengths add up to 4 and input_ids has 3"):
        [*loader(plugin, str(file))]
    file.write_text(json.dumps({"input_ids": None, "text": "5 6"}) + "\n")
    assert documents_in(loader(plugin, str(file), tokenizer=tokenizer, rows=1))[0] == ([1, 5, 6, 2], [5, 6, 2, -100])
    file.write_text(json.dumps({"prompt": "5", "answer": "6"}) + "\n")
    with pytest.raises(
        LayoutError, match=r"train.jsonl:1 has the columns prompt, answer: a document has input_ids, or"
    ):
        [*loader(plugin, str(file))]


def test_the_loader_of_training_alone_is_replaced_and_keeps_its_options(plugin) -> None:
    config = plugin.packed_rows(
        plugin.ParallelAwareDataloader.Config(pin_memory=True), documents=[[1]], overflow="drop"
    )
    assert plugin.packed_rows.fqns == ["dataloader"], "validation's is validator.dataloader"
    assert (config.pin_memory, config.documents, config.options) == (True, [[1]], {"overflow": "drop"})


def test_rows_whose_targets_weigh_differently_are_refused(plugin) -> None:
    with pytest.raises(UnsupportedError, match="torchtitan's loss counts every target alike: leave weighting= out"):
        loader(plugin, weighting="document")


def test_layers_share_the_segments_of_a_batch(plugin) -> None:
    attention = sys.modules["torchtitan.models.common.attention"]
    masks = attention.create_varlen_metadata_for_document(torch.tensor([[0, 1, 0, 1]]))
    assert plugin.segments_of(masks, 1, 4) is plugin.segments_of(masks, 1, 4)


def test_a_multimodal_tokenizer_gives_every_batch_its_special_tokens(plugin) -> None:
    tokenizer = plugin.MultiModalTokenizer()
    for number, name in enumerate(tokenizer.TOKEN_FIELDS):
        setattr(tokenizer, f"{name}_id", number)
    batches = [inputs for inputs, _ in loader(plugin, tokenizer=tokenizer)]
    assert all(batch["special_tokens"]["video_id"] == 1 for batch in batches)
    assert all("special_tokens" not in inputs for inputs, _ in loader(plugin))


@pytest.mark.slow
def test_one_graph_serves_batches_of_any_documents(plugin, interpreted) -> None:
    attention = sys.modules["torchtitan.models.common.attention"]
    layer = plugin.PackedAttention(plugin.packed_attention(attention.VarlenAttention.Config()))
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for lengths in ((5, 7), (1, 3, 8), (2, 2, 2, 6)):
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        masks = attention.create_varlen_metadata_for_document(positions)
        q, k, v = (torch.randn(1, 12, heads, 16, requires_grad=True) for heads in (4, 2, 2))
        found, expected = (run(q, k, v, attention_masks=masks) for run in (compiled, layer))
        torch.testing.assert_close(found, expected)
        seed = torch.randn_like(found)
        pairs = zip(*(torch.autograd.grad(out, (q, k, v), seed) for out in (found, expected)), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # one of any number of documents


def test_what_packed_attention_cannot_follow_is_refused(plugin, monkeypatch) -> None:
    attention = sys.modules["torchtitan.models.common.attention"]
    with pytest.raises(UnsupportedError, match=r"window_size=\(3, 2\) sees tokens after the query within a window"):
        plugin.packed_attention(attention.VarlenAttention.Config(window_size=(3, 2)))
    layer = plugin.PackedAttention(plugin.PackedAttention.Config())
    masks = attention.create_varlen_metadata_for_document(torch.tensor([[0, 1, 0, 1]]))
    x = torch.ones(1, 4, 1, 4)
    with pytest.raises(UnsupportedError, match="log-sum-exp of the logits .out_transform.*leave packed_attention out"):
        layer(x, x, x, attention_masks=masks, out_transform=lambda out, lse: out)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no packed attention for .*needs Triton and a GPU"):
        torch.compile(layer, backend="eager", fullgraph=True)(x, x, x, attention_masks=masks)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="this layer is captured: set --training.disable_cuda_graphs"):
        layer(SimpleNamespace(is_cuda=True), x, x, attention_masks=masks)
