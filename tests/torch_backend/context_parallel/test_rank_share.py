"""All ranks in one process: every piece gets the tokens that it sees, each once, and whole documents come together."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from packing_core.planning.context import context_plan
from packing_core.planning.cost import Cost
from torch_backend.context_parallel.exchange import lengthened
from torch_backend.context_parallel.share import RankShare, TokenRun
from torch_backend.context_parallel.states import state_layout
from torch_backend.hf.inputs.context import cut_batch
from torch_backend.segments import PackedMetadata, host_lengths

CPU = torch.device("cpu")
lengths = st.lists(st.integers(1, 9) | st.integers(20, 90), min_size=1, max_size=8).filter(lambda x: sum(x) >= 8)


def shares(lengths: list[int], ranks: int, contiguous: bool) -> list[RankShare]:
    plan = context_plan(lengths, ranks, contiguous=contiguous)
    return [RankShare(plan, rank, None, CPU) for rank in range(ranks)]


def exchanged(sent: list[list[Tensor]]) -> list[Tensor]:
    """Returns the tokens that each rank receives, from those that each sends to each."""
    return [torch.cat([of_source[rank] for of_source in sent]) for rank in range(len(sent))]


def by_rank(index: Tensor, counts: list[int], share: RankShare) -> list[Tensor]:
    return list(torch.from_numpy(share.tokens)[index].split(counts))


def index_of(runs: list[TokenRun]) -> Tensor:
    """Places of the tokens of runs whose targets follow each other."""
    assert [run.target for run in runs] == [0, *accumulate(run.tokens for run in runs)][: len(runs)]
    return torch.tensor([i for run in runs for i in range(run.source, run.source + run.tokens)], dtype=torch.int64)


@given(lengths, st.integers(1, 8), st.none() | st.integers(1, 100), st.booleans())
def test_pieces_get_the_earlier_tokens_that_they_see(lengths, ranks, reach, contiguous) -> None:
    ranked = shares(lengths, ranks, contiguous)
    layouts = [share.earlier(reach) for share in ranked]
    received = exchanged([by_rank(index_of(x.sent), x.send, share) for x, share in zip(layouts, ranked, strict=True)])
    first_of = [0, *accumulate(lengths)]
    sent = 0
    for share, layout, arrived in zip(ranked, layouts, received, strict=True):
        assert len(arrived) == sum(layout.receive)
        assert len(set(arrived.tolist())) == len(arrived)  # no token is sent twice
        sent += len(arrived)
        tokens = torch.from_numpy(share.tokens)
        extended, continuing = (
            lengthened(layout, arrived[:, None], tokens[:, None], whole=whole)[0].flatten() for whole in (True, False)
        )
        assert extended.tolist() == [*tokens[: layout.first].tolist(), *continuing.tolist()]
        assert extended[layout.own_of_extended].tolist() == tokens.tolist()
        for segment, own in zip(
            extended.split(host_lengths(layout.extended)), tokens.split(share.lengths), strict=True
        ):
            document = int(np.searchsorted(first_of, int(own[0]), side="right")) - 1
            seen = first_of[document] if reach is None else max(first_of[document], int(own[0]) - reach + 1)
            assert segment.tolist() == list(range(seen, int(own[-1]) + 1))
    assert sent == ranked[0].tokens_sent(reach)


@given(lengths, st.integers(2, 8), st.booleans())
def test_straddling_documents_come_together_and_go_back(lengths, ranks, contiguous) -> None:
    ranked = shares(lengths, ranks, contiguous)
    if not ranked[0].straddles:
        return
    first_of = [0, *accumulate(lengths)]
    straddling = [t for d in np.flatnonzero(ranked[0].plan.straddling) for t in range(first_of[d], first_of[d + 1])]
    everywhere = torch.cat([torch.from_numpy(share.tokens)[share.whole.straddling] for share in ranked])
    owned: list[int] = []
    received = exchanged([by_rank(share.owned.straddling, share.owned.send, share) for share in ranked])
    for share, arrived in zip(ranked, received, strict=True):
        tokens, whole = torch.from_numpy(share.tokens), share.whole
        assert everywhere[whole.order].tolist() == straddling
        assert torch.cat([tokens[whole.alone], tokens[whole.straddling]])[whole.inverse].tolist() == tokens.tolist()
        layout = share.owned
        documents = torch.cat([tokens[layout.alone], arrived[layout.order]])
        assert torch.cat([tokens[layout.alone], tokens[layout.straddling]])[layout.inverse].tolist() == tokens.tolist()
        owned += arrived.tolist()
        if layout.segments is None:
            assert not len(documents)
            continue
        for segment in documents.split(host_lengths(layout.segments)):
            document = first_of.index(int(segment[0]))
            assert segment.tolist() == list(range(first_of[document], first_of[document + 1]))
    assert sorted(owned) == straddling


@pytest.mark.parametrize("reach", [None, 4])
def test_only_neighbours_inside_the_window_send(reach: Any) -> None:
    # a document of 90 tokens on three ranks: the third needs all earlier tokens, or the 3 before its own
    share = shares([90], 3, contiguous=True)[2]
    first, second, _ = np.bincount(share.plan.rank, share.plan.length).astype(int)
    assert share.earlier(reach).receive == ([first, second, 0] if reach is None else [0, 3, 0])


@pytest.mark.parametrize("shifted", [False, True])
def test_every_token_comes_to_its_rank_with_its_target_and_its_weight(shifted: bool) -> None:
    # two documents, the first on both ranks: token 10 is to predict 11 with its weight, the last of a document nothing
    lengths = (6, 2)
    batch = {"input_ids": [10, 11, 12, 13, 14, 15, 20, 21], "loss_weights": [9, 1, 2, 3, 4, 5, 8, 6]}
    targets = [11, 12, 13, 14, 15, -100, 21, -100]
    weights = [1, 2, 3, 4, 5, 0, 6, 0]
    if shifted:
        batch |= {"shift_labels": targets, "loss_weights": weights}
    else:
        batch["labels"] = batch["input_ids"]
    found: dict[int, tuple[int, int, int]] = {}
    for share in shares(list(lengths), 2, contiguous=False):
        group: Any = SimpleNamespace(share=lambda lengths, *tokens, share=share: share)
        given = {name: torch.tensor([values]) for name, values in batch.items()}
        cut = cut_batch(given, PackedMetadata.from_lengths(lengths, device=CPU), group)
        names = ("input_ids", "position_ids", "shift_labels", "loss_weights")
        ids, *others = (cut[name][0].tolist() for name in names)
        assert 0 < len(ids) < 8
        found |= dict(zip(ids, zip(*others, strict=True), strict=True))
    assert found == dict(zip(batch["input_ids"], zip([*range(6), 0, 1], targets, weights), strict=True))


@given(lengths, st.integers(1, 8), st.booleans(), st.integers(1, 7))
def test_scanned_rows_hold_each_piece_once_in_whole_chunks(lengths, ranks, contiguous, chunk) -> None:
    for share in shares(lengths, ranks, contiguous):
        layout, tokens = state_layout(share, chunk), torch.from_numpy(share.tokens) + 1
        pieces = dict.fromkeys(map(tuple, map(Tensor.tolist, tokens.split(share.lengths))))
        back = None
        for row, size in ((layout.alone, 1), (layout.pieces, chunk)):
            if row is not None:
                taken = row.taken(tokens)
                back = row.put(taken, back, len(tokens))
                for segment in taken.split(host_lengths(row.packed)):
                    piece = segment[segment > 0]
                    assert len(segment) == -(-len(piece) // size) * size and not segment[len(piece) :].any()
                    del pieces[tuple(piece.tolist())]
        assert not pieces and back is not None and torch.equal(back, tokens)


@pytest.mark.parametrize(("chunk", "copied"), [(32, False), (48, True)])
def test_a_single_piece_is_copied_only_to_pad_it(chunk: int, copied: bool) -> None:
    plan = context_plan([256], 2, cost=Cost(tokens=1, squares=0), contiguous=True)
    for rank in range(2):
        row, x = state_layout(RankShare(plan, rank, None, CPU), chunk).pieces, torch.zeros(128, 3)
        assert row is not None and (row.taken(x) is not x) == copied
