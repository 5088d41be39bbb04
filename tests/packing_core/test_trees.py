"""Rows in which a common beginning stands once: every document comes back whole, and nothing is there twice."""

import numpy as np
import pytest

from packing_core import (
    CapacityError,
    LayoutError,
    PackedBatch,
    PackingError,
    UnsupportedError,
    pack_tree,
)

# Two prompts of one system prompt (1 1), with two and three answers:
#   1 1 +- 2 2 +- 9        segments  0 | 1 | 2 | 3 | 4 | 5 | 6 | 7
#       |      +- 8 8      parents  -1   0   1   1   0   4   4   4
#       +- 3 3 +- 7, 6, 5 5 5
DOCUMENTS = [[1, 1, 2, 2, 9], [1, 1, 2, 2, 8, 8], [1, 1, 3, 3, 7], [1, 1, 3, 3, 6], [1, 1, 3, 3, 5, 5, 5]]
PROMPTS = [4] * 5


def two_levels(**options) -> PackedBatch:
    return pack_tree(DOCUMENTS, 16, prompt_lengths=PROMPTS, shortest=2, seed=None, **options)


def assert_whole(batch: PackedBatch, documents) -> None:
    assert {number: tokens.tolist() for number, tokens in batch.unpack().items()} == dict(enumerate(documents))


def random_documents(rng: np.random.Generator) -> tuple[list[list[int]], list[int]]:
    """Documents of two token values, so that beginnings of every length and depth are common."""
    documents = [rng.integers(1, 3, rng.integers(1, 12)).tolist() for _ in range(rng.integers(1, 12))]
    return documents, [int(rng.integers(1, len(document) + 1)) for document in documents]


def test_a_common_beginning_stands_once_on_every_level():
    batch = two_levels()

    assert batch.input_ids.tolist() == [[1, 1, 2, 2, 9, 8, 8, 3, 3, 7, 6, 5, 5, 5, 0, 0]]
    assert batch.parents.tolist() == [-1, 0, 1, 1, 0, 4, 4, 4]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 5, 2, 3, 4, 4, 4, 5, 6, 0, 0]]
    assert_whole(batch, DOCUMENTS)


@pytest.mark.parametrize("seed", range(200))
def test_every_document_comes_back_whole_and_no_beginning_stands_twice(seed):
    rng = np.random.default_rng(seed)
    documents, prompts = random_documents(rng)
    column = [rng.integers(0, 2, len(document)).tolist() for document in documents]
    batch = pack_tree(
        documents, 128, prompt_lengths=prompts, shortest=1, columns={"kind": column}, per_document={"n": prompts}
    )

    assert_whole(batch, documents)
    assert {i: x.tolist() for i, x in batch.unpack("kind").items()} == dict(enumerate(column))
    assert {i: x.sum() for i, x in batch.unpack("loss_mask").items()} == {
        i: len(d) - n for i, (d, n) in enumerate(zip(documents, prompts))
    }
    leaves = np.setdiff1d(np.arange(batch.n_segments), batch.parents)
    assert sorted(batch.sources[leaves].tolist()) == list(range(len(documents)))
    assert batch.per_document["n"][leaves].tolist() == [prompts[i] for i in batch.sources[leaves]]
    # the tokens kept are the different beginnings that may be shared, and each document's own end
    own, shared = 0, set()
    for document, kind, prompt in zip(documents, column, prompts):
        most = min(prompt, len(document) - 1)
        own += len(document) - most
        shared |= {(tuple(document[:n]), tuple(kind[:n])) for n in range(1, most + 1)}
    assert batch.n_tokens == own + len(shared)


@pytest.mark.parametrize("seed", range(50))
def test_trees_of_more_than_a_row_repeat_what_their_documents_need(seed):
    rng = np.random.default_rng(seed)
    documents, prompts = random_documents(rng)
    batch = pack_tree(documents, 24, prompt_lengths=prompts, shortest=1, overflow="repeat")

    assert_whole(batch, documents)
    inner = np.unique(batch.parents[batch.parents >= 0])
    children = np.bincount(batch.parents[batch.parents >= 0], minlength=batch.n_segments)
    assert (children[inner] > 1).all()


def test_short_beginnings_and_targets_are_not_shared():
    assert (pack_tree(DOCUMENTS, 32, prompt_lengths=PROMPTS, shortest=5).parents == -1).all()
    assert (pack_tree(DOCUMENTS, 32, shortest=2).parents == -1).all()
    columns = {"x": [[i] * len(document) for i, document in enumerate(DOCUMENTS)]}
    assert (pack_tree(DOCUMENTS, 32, prompt_lengths=PROMPTS, shortest=2, columns=columns).parents == -1).all()


def test_values_per_document_count_shared_tokens_for_each():
    batch = two_levels()
    assert batch.reduce(batch.input_ids, "sum").tolist() == [float(sum(d)) for d in DOCUMENTS]
    spread = batch.spread(np.arange(1, 6))
    assert spread.tolist() == [[0, 0, 0, 0, 1, 2, 2, 0, 0, 3, 4, 5, 5, 5, 0, 0]]
    assert batch.document_ids.tolist() == [[-1, -1, -1, -1, 0, 1, 1, -1, -1, 2, 3, 4, 4, 4, -1, -1]]
    assert batch.document_positions.tolist() == batch.position_ids.tolist()


@pytest.mark.parametrize("convention", ["hf", "trl", "grain", "maxtext"])
def test_conventions_without_parents_refuse_trees(convention):
    with pytest.raises(UnsupportedError, match=f'"{convention}" has no place for parents'):
        two_levels().to_dict(convention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": [-1, 0]}, r"parents has 2 entries and there are 8 segments"),
        ({"parents": [0, -1, -1, -1, -1, -1, -1, -1]}, r"parents\[0\] is 0: no segment stands before the first"),
        ({"parents": [-1, 0, 3, 1, 0, 4, 4, 4]}, r"parents\[2\] is 3: a parent stands before its children"),
        ({"parents": [-1, 0, 2, 1, 0, 4, 4, 4]}, r"parents\[2\] is 2: a parent stands before its children"),
        (
            {"parents": [-1, 0, 0, 1, 0, 4, 4, 4]},
            r"segment 2 starts at token 4 of its document and its parent ends at 2",
        ),
    ],
)
def test_parents_that_make_no_forest_are_refused(changes, message):
    batch = two_levels()
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    with pytest.raises(LayoutError, match=message):
        PackedBatch(**fields | changes)


def test_a_parent_in_another_row_is_refused():
    with pytest.raises(
        LayoutError, match="segment 1 stands in row 1 and its parent 0 in row 0: a tree stands in one row"
    ):
        PackedBatch(np.ones((2, 4), int), [0, 2, 4], rows=[0, 1], sources=[0, 0], starts=[0, 2], parents=[-1, 0])


def test_bad_options_are_refused():
    with pytest.raises(CapacityError, match="the tree of document 0 and 4 others .* has 14 tokens and capacity is 10"):
        pack_tree(DOCUMENTS, 10, prompt_lengths=PROMPTS, shortest=2)
    with pytest.raises(CapacityError, match="document 4 takes 7 tokens and capacity is 6: raise capacity"):
        pack_tree(DOCUMENTS, 6, prompt_lengths=PROMPTS, shortest=2, overflow="repeat")
    with pytest.raises(PackingError, match='overflow is \'split\': pass "error" or "repeat"'):
        two_levels(overflow="split")
    with pytest.raises(PackingError, match="pack_tree takes no max_segments"):
        two_levels(max_segments=2)
    with pytest.raises(LayoutError, match="groups is .* pass one integer for each of 5 documents"):
        two_levels(groups=[1, 2])


@pytest.mark.parametrize("overflow", ["error", "repeat"])
def test_beginnings_may_be_nested_to_any_depth(overflow):
    """A conversation of 1,500 turns, of which each turn is trained after all before it."""
    turns = np.random.default_rng(0).integers(5, 1000, (1500, 2)).tolist()
    documents = [[token for turn in turns[: n + 1] for token in turn] + [3, n % 5] for n in range(len(turns))]
    prompts = [len(document) - 1 for document in documents]
    capacity = 1 << 16 if overflow == "error" else 4000
    batch = pack_tree(documents, capacity, shortest=2, prompt_lengths=prompts, overflow=overflow, seed=None)
    assert int(batch.lengths.sum()) < sum(prompts) // 50  # a turn or an answer stands once, or once in each part
    assert_whole(batch, documents)


def test_a_document_that_ends_twice_is_refused_where_documents_are_needed():
    batch = two_levels()
    with pytest.raises(LayoutError, match="document 0 ends in two segments"):
        batch[[0, 0]].unpack()
