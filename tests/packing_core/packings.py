"""Random documents and plans over them, and what a batch must hold by definition, written token by token."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from packing_core import PackPlan, plan


@dataclass
class Packing:
    """Documents, options and the plan of one example; ``arrays`` are the inputs of ``pack`` beside the documents."""

    documents: list[list[int]]
    plan: PackPlan
    arrays: dict = field(default_factory=dict)


@st.composite
def packings(draw, overflow=("split", "truncate", "drop"), beside=True):
    """A Packing of 1 to 12 documents of 1 to 40 tokens."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    capacity = draw(st.integers(4, 48))
    policy = draw(st.sampled_from(overflow))
    if policy in ("error", "drop"):
        lengths = [min(n, capacity) for n in lengths[:1]] + [
            min(n, capacity) if policy == "error" else n for n in lengths[1:]
        ]
    documents = [list(range(100 * i + 1, 100 * i + 1 + n)) for i, n in enumerate(lengths)]
    options = {"overflow": policy, "seed": draw(st.sampled_from([None, 3]))}
    options["strategy"] = draw(st.sampled_from(["mixed", "best_fit", "first_fit", "sequential"]))
    arrays = {}
    if beside and draw(st.booleans()):
        arrays["labels"] = [[draw(st.sampled_from([-100, t, t + 5000])) for t in doc] for doc in documents]
    if beside and draw(st.booleans()):
        arrays["loss_mask"] = [[draw(st.booleans()) for _ in doc] for doc in documents]
    if beside and draw(st.booleans()):
        arrays["prompt_lengths"] = [draw(st.integers(0, n)) for n in lengths]
    if beside and draw(st.booleans()):
        arrays["columns"] = {"reward": [[t / 7 for t in doc] for doc in documents]}
    return Packing(documents, plan(lengths, capacity, **options), arrays)


def pieces(made):
    """(row, column, document, start, length) of every piece of a plan, by walking the rows."""
    for row in range(len(made.row_offsets) - 1):
        column = 0
        for p in range(made.row_offsets[row], made.row_offsets[row + 1]):
            yield row, column, int(made.source[p]), int(made.start[p]), int(made.length[p])
            column += int(made.length[p])


def by_definition(packing, weighting="token", pad_id=0):
    """Every stored and derived per-token array of the batch, as nested lists."""
    made, documents, arrays = packing.plan, packing.documents, packing.arrays
    shape = (len(made.row_offsets) - 1, made.capacity)
    out = {name: np.zeros(shape, int) for name in ("segment_ids", "position_ids", "attention_mask", "boundaries")}
    out["input_ids"] = np.full(shape, pad_id)
    out["targets"] = np.full(shape, -100)
    out["document"] = np.full(shape, -1)
    out["reward"] = np.zeros(shape)
    in_row = [0] * shape[0]
    for row, column, document, start, length in pieces(made):
        in_row[row] += 1
        for k in range(length):
            at, token = (row, column + k), start + k
            out["input_ids"][at] = documents[document][token]
            out["segment_ids"][at] = in_row[row]
            out["position_ids"][at] = k
            out["attention_mask"][at] = 1
            out["boundaries"][at] = k == 0
            out["document"][at] = document
            out["reward"][at] = documents[document][token] / 7
            trained = k > 0
            if "loss_mask" in arrays:
                trained = trained and arrays["loss_mask"][document][token]
            if "prompt_lengths" in arrays:
                trained = trained and token >= arrays["prompt_lengths"][document]
            if trained:
                out["targets"][at] = arrays.get("labels", documents)[document][token]
    out["loss_weights"] = np.zeros(shape)
    for at in zip(*np.nonzero(out["targets"] != -100)):
        same = (out["document"] == out["document"][at]) & (out["targets"] != -100)
        out["loss_weights"][at] = 1 if weighting == "token" else 1 / same.sum()
    return out
