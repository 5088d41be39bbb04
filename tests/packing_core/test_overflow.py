"""overflow="split", "overlap", "restart": the pieces of a loop over tokens, each token trained once, exact resumes."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing_core import LayoutError, PackingError, PackPlan, pack, plan, stream
from packing_core.batches.joining import concatenate
from packing_core.planning.epochs import plan_epoch
from packing_core.training.schedule import Corpus, EncodedDocument, Schedule
from tests.packing_core import naive

CUTS = ("split", "overlap", "restart")


@st.composite
def problems(draw):
    """Documents of tokens that say where they are from, a capacity, and the options of overflow."""
    capacity = draw(st.integers(2, 24))
    lengths = draw(st.lists(st.integers(1, 4 * capacity), min_size=1, max_size=12))
    context = draw(st.integers(0, capacity - 1))
    overflow = draw(st.sampled_from(CUTS))
    shown = context if overflow != "split" else 0
    least = draw(st.integers(1, max(1, (capacity - shown) // 2)))
    options = {"overflow": overflow, "min_piece": least, "context": context if overflow != "split" else None}
    return [[1000 * d + t for t in range(n)] for d, n in enumerate(lengths)], capacity, options


def expected(documents, capacity, options):
    found = [naive.pieces(d, capacity, **options) for d in documents]
    return sorted((s, t) for segments, targets in found for s, t in zip(segments, targets, strict=True))


def made_of(rows):
    """Segments and their targets, of batches of rows."""
    return sorted(
        (row.input_ids.reshape(-1)[at : at + n].tolist(), row.targets.reshape(-1)[at : at + n].tolist())
        for row in rows
        for at, n in zip(row.flat_starts.tolist(), row.lengths.tolist(), strict=True)
    )


@given(problems(), st.sampled_from([None, 0, 3]), st.sampled_from(["mixed", "best_fit", "sequential"]))
@example(([list(range(17))], 8, {"overflow": "overlap", "min_piece": 2, "context": 3}), None, "mixed")
def test_packs_hold_the_pieces_that_a_loop_makes(problem, seed, strategy) -> None:
    documents, capacity, options = problem
    batch = pack(documents, capacity, seed=seed, strategy=strategy, **options)
    assert made_of([batch]) == expected(documents, capacity, options)
    assert {d: tokens.tolist() for d, tokens in batch.unpack().items()} == dict(enumerate(documents))
    kept = [min(len(d) for d in segments) for segments, _ in (naive.pieces(x, capacity, **options) for x in documents)]
    assert min(kept) >= min(options["min_piece"], min(map(len, documents)))


@given(problems(), st.sampled_from([None, 1, 2]))
def test_every_token_is_trained_at_most_once_and_overlap_trains_all_but_the_first(problem, most) -> None:
    documents, capacity, options = problem
    made = plan([len(d) for d in documents], capacity, max_segments=most, **options)
    replace(made, check=True)  # checks the invariants that the planner vouches for
    own = [
        (d, start + t)
        for d, start, n, c in zip(
            made.source.tolist(),
            made.start.tolist(),
            made.length.tolist(),
            made.context.tolist() if len(made.context) else [0] * made.n_pieces,
            strict=True,
        )
        for t in range(c, n)
    ]
    assert sorted(own) == [(d, t) for d, tokens in enumerate(documents) for t in range(len(tokens))]
    for first, end in zip(made.row_offsets[:-1].tolist(), made.row_offsets[1:].tolist(), strict=True):
        assert len(set(made.source[first:end].tolist())) == end - first <= (most or end), (
            "one piece of a document a row"
        )
    targets = pack(documents, made).targets
    counts = np.unique(targets[targets != -100], return_counts=True)
    assert not len(counts[1]) or counts[1].max() == 1
    if options["overflow"] == "overlap" and options["context"]:
        assert counts[0].tolist() == sorted(t for d in documents for t in d[1:])


@settings(max_examples=15)
@given(problems(), st.integers(1, 6), st.sampled_from([None, 1]), st.booleans())
def test_streams_hold_the_same_pieces_and_resume_exactly(problem, buffer, seed, as_lists) -> None:
    documents, capacity, options = problem
    source = documents if as_lists else [{"input_ids": np.array(d), "score": np.array(d) / 7} for d in documents]
    options |= {"buffer": buffer, "seed": seed}
    whole = list(stream(source, capacity, **options))
    limits = {name: options[name] for name in ("overflow", "context", "min_piece")}
    assert made_of(whole) == expected(documents, capacity, limits)
    for position in range(0, len(whole), 3):
        stopped = stream(source, capacity, **options)
        for _ in range(position):
            next(stopped)
        continued = stream(source, capacity, **options)
        continued.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        for row, same in zip(continued, whole[position:], strict=True):
            assert np.array_equal(row.input_ids, same.input_ids) and np.array_equal(row.targets, same.targets)
    for row in whole if not as_lists else ():
        assert np.allclose(row.columns["score"], np.where(row.attention_mask, row.input_ids / 7, 0))


def test_context_is_an_eighth_of_the_capacity_by_default() -> None:
    assert plan([100], 64, overflow="restart") == plan([100], 64, overflow="restart", context=8)
    assert plan([100], 64, overflow="overlap").context.tolist().count(8) == 1


@pytest.mark.parametrize(("overflow", "positions"), [("overlap", [4, 5, 6, 7, 8, 9]), ("restart", [0, 1, 6, 7, 8, 9])])
def test_where_tokens_come_from_is_known(overflow, positions) -> None:
    #     overlap: [0 1 2 3 4 5] [4 5 6 7 8 9], the latter's 4 and 5 not trained; restart: [0 1 6 7 8 9], nor its 6
    document = list(range(100, 110))
    batch = pack(
        [document], 6, overflow=overflow, context=2, strategy="sequential", seed=None, columns={"x": [document]}
    )
    assert batch.document_positions.tolist() == [[0, 1, 2, 3, 4, 5], positions]
    assert batch.input_ids[1].tolist() == batch.columns["x"][1].tolist() == [100 + t for t in positions]
    assert batch.document_ids.tolist() == [[0] * 6, [-1, -1, 0, 0, 0, 0]]
    assert (batch.starts + batch.context).tolist() == [0, 6]
    assert batch.reduce(np.ones((2, 6)), "sum").tolist() == [10]
    assert batch.reduce(batch.input_ids, "last").tolist() == [109]


@pytest.mark.parametrize("overlap", [True, False])
def test_context_follows_its_segments_into_rows_and_copies(overlap) -> None:
    documents = [list(range(1000 * d, 1000 * d + n)) for d, n in enumerate((5, 30, 9, 17))]
    batch = pack(documents, 8, overflow="overlap" if overlap else "restart", context=3, seed=1)
    whole = {d: tokens.tolist() for d, tokens in batch.unpack().items()}
    for same in (
        concatenate(list(batch.single_rows())),
        concatenate([batch[row] for row in range(len(batch))]),
        batch[:],
        batch[list(range(len(batch)))],
        pickle.loads(pickle.dumps(batch)),
    ):
        assert same.context.tolist() == batch.context.tolist()
        assert {d: tokens.tolist() for d, tokens in same.unpack().items()} == whole
        assert np.array_equal(same.document_positions, batch.document_positions)
    view = batch.padding_free()
    assert np.count_nonzero(view.targets != -100) == np.count_nonzero(batch.targets != -100)
    differs = "context missing and batch 0 given" if overlap else "restarts False and batch 0 True"
    with pytest.raises(LayoutError, match=f"batch 1 has {differs}: pack both alike"):
        concatenate([batch, pack(documents, 8, overflow="split", loss_mask=[[1] * len(d) for d in documents])])


def test_plans_with_context_are_saved_and_those_without_still_load(tmp_path) -> None:
    made = plan([30, 5], 8, overflow="restart", context=3)
    made.save(tmp_path / "plan.npz")
    assert PackPlan.load(tmp_path / "plan.npz") == made == pickle.loads(pickle.dumps(made))
    assert made.select(slice(1, 3)).context.tolist() == made.context[made.row_offsets[1] : made.row_offsets[3]].tolist()
    overlap = plan([30, 5], 8, overflow="overlap", context=3)
    assert made.fingerprint != overlap.fingerprint
    without = plan([5, 6], 8)
    without.save(tmp_path / "old.npz")
    stored = dict(np.load(tmp_path / "old.npz"))
    np.savez(tmp_path / "old.npz", **{name: stored[name] for name in stored if name not in ("context", "restarts")})
    assert PackPlan.load(tmp_path / "old.npz") == without


@pytest.mark.parametrize("overflow", CUTS)
def test_a_schedule_counts_and_pads_what_is_trained(overflow) -> None:
    rng = np.random.default_rng(0)
    documents = [list(range(1000 * d, 1000 * d + int(n))) for d, n in enumerate(rng.integers(1, 60, 12))]
    masks = [rng.random(len(d)) < 0.7 for d in documents]
    corpus = Corpus.collect(
        EncodedDocument(np.array(d, np.int32), mask) for d, mask in zip(documents, masks, strict=True)
    )
    made = plan(corpus.documents.lengths, 16, overflow=overflow, context=None if overflow == "split" else 4)
    schedule = Schedule(corpus, (made,), rows_per_step=2, padded_batch=3)
    for step in range(len(schedule)):
        packed = np.concatenate([row.targets[row.targets != -100] for row in schedule.packed(step)])
        padded = np.concatenate([batch.targets[batch.targets != -100] for batch in schedule.padded(step, "padded")])
        assert sorted(packed.tolist()) == sorted(padded.tolist())
        assert schedule.trained_tokens[step] == len(packed)
        batches = list(schedule.padded(step, "padded"))
        shown = {tuple(ids[mask]) for b in batches for ids, mask in zip(b.input_ids, b.attention_mask, strict=True)}
        assert shown == {tuple(segment) for segment, _ in made_of(schedule.packed(step))}


@given(st.lists(st.integers(1, 30), min_size=6, max_size=40), st.integers(1, 4), st.sampled_from(CUTS), st.booleans())
def test_epochs_keep_the_cap_the_context_and_their_number_of_rows(lengths, most, overflow, in_order) -> None:
    context = None if overflow == "split" else 3
    options = {"overflow": overflow, "context": context, "min_piece": 2, "max_segments": most, "in_order": in_order}
    counts = set()
    for epoch in range(3):
        made = plan_epoch(lengths, 12, seed=1, epoch=epoch, ranks=2, **options).plan
        replace(made, check=True)
        assert np.diff(made.row_offsets).max() <= most
        assert int(made.length.sum() - made.context.sum()) == sum(lengths)
        counts.add(made.n_rows)
    assert len(counts) == 1


REFUSED = [
    (
        {"overflow": "split", "context": 4},
        'context=4 has no effect under overflow="split": pass overflow="overlap" or "restart", or leave context out',
    ),
    ({"overflow": "overlap", "context": 8}, "context must be an integer from 0 to 7, less than the"),
    ({"overflow": "overlap", "context": 1.5}, "context must be an integer from 0 to 7"),
    ({"min_piece": 3}, 'min_piece=3 has no effect under overflow="error", which makes one piece at most: pass'),
    (
        {"overflow": "overlap", "context": 4, "min_piece": 3},
        "min_piece is 3, and may be at most 2 in rows of 8 tokens with context=4: lower",
    ),
    ({"overflow": "split", "min_piece": 0}, "min_piece must be an integer of at least 1, got 0"),
    ({"overflow": "overlap", "stride": 4}, "plan() has no argument 'stride': pass context="),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_options_without_effect_are_refused(options, text) -> None:
    with pytest.raises(PackingError, match=re.escape(text)):
        plan([20, 3], 8, **options)
    if "stride" not in options:
        with pytest.raises(PackingError, match=re.escape(text)):
            stream([[1] * 20], 8, **options)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"context": [0]}, "context has 1 entries and there are 2 pieces: pass one each"),
        ({"context": [0, 6]}, "piece 1 has 6 tokens of context and length 6: a piece has a token of its own after"),
        ({"context": [0, 1]}, "token 5 of document 0 stands in two pieces, 0 and 1"),
    ],
)
def test_plans_that_train_a_token_twice_are_refused(changes, text) -> None:
    fields = {"row_offsets": [0, 1, 2], "source": [0, 0], "start": [0, 4], "length": [6, 6], "capacity": 6}
    with pytest.raises(LayoutError, match=re.escape(text)):
        PackPlan(**fields, n_documents=1, **changes)
    assert PackPlan(**fields, n_documents=1, context=[0, 2]).n_pieces == 2
