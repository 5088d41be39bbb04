"""Values that would be trained wrongly are refused where they would enter or leave, with the place and the way out."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from packing_core import (
    CapacityError,
    Cost,
    LayoutError,
    PackedBatch,
    PackedDataset,
    PackingError,
    PackPlan,
    ShardedPlan,
    balance,
    pack,
    plan,
)

LARGE = 2**31 + 5


def test_ids_above_int32_are_kept_and_never_wrapped() -> None:
    batch = pack([[1, LARGE]], 2)
    assert batch.targets.tolist() == [[-100, LARGE]]
    assert batch.to_dict("trl")["input_ids"][0].tolist() == [1, LARGE]
    for wrapping in (
        batch.kernel_view,
        batch.padding_free,
        *(lambda name=name: batch.to_dict(name) for name in ("hf", "grain", "maxtext")),
    ):
        with pytest.raises(
            CapacityError, match="(input_ids|targets) holds 2,147,483,653, which does not fit int32: .* renumber"
        ):
            wrapping()
    labels = pack([[1, 2]], 2, labels=[[1, LARGE]])
    for name in ("hf", "grain", "maxtext"):
        with pytest.raises(CapacityError, match="targets holds 2,147,483,653, which does not fit int32"):
            labels.to_dict(name)
    assert pack([[1, 2**31 - 1]], 2).to_dict("maxtext")["targets"].tolist() == [[2**31 - 1, 0]]


@pytest.mark.parametrize("convention", ["hf", "trl", "grain", "maxtext"])
def test_columns_do_not_overwrite_what_a_convention_emits(convention) -> None:
    for name in pack([[1, 2]], 2).to_dict(convention):
        if name in ("input_ids", "labels", "position_ids", "seq_idx", "targets", "loss_weights"):
            continue  # no column can have these names
        with pytest.raises(LayoutError, match=rf"columns\['{name}'\] has the name of an array of .*\"{convention}\""):
            pack([[1, 2]], 2, columns={name: [[7, 7]]}).to_dict(convention)


def fields(**changes):
    one = np.zeros(1, int)
    return {"input_ids": [[1, 2, 0]], "cu_seqlens": [0, 2], "rows": one, "sources": one, "starts": one} | changes


DOCUMENTS = [[1, 2, 3], [4, 5]]
MADE = plan([3, 2], 4)
BAD = [
    (lambda: pack([[1], [2, -7]], 4), r"sequences\[1\]\[1\] is -7: token ids run from 0 to 2\*\*63 - 1"),
    (lambda: pack([[1] * 9 + [-2]], 4, overflow="split"), r"sequences\[0\]\[9\] is -2: token ids"),
    (lambda: pack([np.array([1, 2**63], np.uint64)], 4), r"sequences\[0\]\[1\] is 9223372036854775808"),
    (lambda: pack(DOCUMENTS, 4, loss_mask=[[1, 0, 1], [1, 2]]), r"loss_mask\[1\]\[1\] is 2: pass 1 \(or T"),
    (lambda: pack(DOCUMENTS, 4, loss_mask=[[-100, 0, 1], [1, 1]]), r"loss_mask\[0\]\[0\] is -100: pass 1"),
    (lambda: pack(DOCUMENTS, 4, labels=[[1, -1, 1], [1, 2]]), r"labels\[0\]\[1\] is -1: labels are token"),
    (lambda: PackedBatch(**fields(columns={"targets": [[1, 2, 3]]})), "has the name of a PackedBatch"),
    (lambda: pack(DOCUMENTS, 4, columns={5: DOCUMENTS}), "columns has the name 5: pass names"),
    (lambda: pack(DOCUMENTS, 4, columns=[DOCUMENTS]), "columns is a list: pass a mapping"),
    (lambda: PackedBatch(**fields(pad_id="x")), "pad_id is 'x': pass an integer"),
    (
        lambda: PackedBatch(**fields(input_ids=np.array([[1, 2**64 - 1]], np.uint64))),
        "input_ids holds 18,446,744,073,709,551,615, which does not fit int64: pass token ids",
    ),
    (lambda: PackedBatch(**fields(input_ids=[[1], [1, 2]])), "input_ids is not one flat sequence of numb"),
    (lambda: PackedBatch(**fields(input_ids=None)), "input_ids holds a null"),
    (lambda: PackedBatch(**fields(cu_seqlens=[0, 2**63 - 1])), "cu_seqlens marks 9,223,372,036,854,775,807"),
    (lambda: PackedBatch(**fields(starts=[2**63 - 1])), "that long, so pass the place of each segment"),
    (lambda: PackedBatch([[0]], [0], [], [], []).padding_free(), "nothing but padding: use kernel_view"),
    (lambda: pack(DOCUMENTS, 4).unpack(["x"]), r"no per-token array \['x'\]"),
    (lambda: pack(DOCUMENTS, 4).to_dict(["hf"]), r"there is no convention \['hf'\]"),
    (lambda: pack(DOCUMENTS, 4).kernel_view(max_seqlen=5.5), "max_seqlen must be an integer of at least 1"),
    (lambda: pack(DOCUMENTS, 4).kernel_view(max_seqlen=2**31), "which int32 kernels do not count"),
    (lambda: pack(DOCUMENTS, 4).kernel_view(bucket=2**40), r"bucket is 1,099,511,627,776: pass at most 16"),
    (lambda: plan([1], 2**70), r"capacity must be an integer of at most 2\*\*60, got 11805916207174113"),
    (lambda: pack(DOCUMENTS, 2**60), "1,152,921,504,606,846,976 tokens do not fit into memory"),
    (lambda: pack(DOCUMENTS, 2**50), "1,125,899,906,842,624 tokens do not fit into memory"),
    (lambda: plan([2**50], 1, overflow="split"), r"split into 1,125,899,906,842,624 pieces of 1 tokens"),
    (lambda: plan([1], 4, strategy=["best_fit"]), "strategy must be one of 'best_fit', 'mixed', 'first_fit'"),
    (lambda: plan([1], 4, overflow=np.array(["drop"])), "overflow must be one of"),
    (lambda: plan([1, None], 4), "lengths must be integers, got object: convert"),
    (lambda: plan([2**70], 4), "lengths must be integers, got object"),
    (
        lambda: PackPlan([0, 1], [0], [2**63 - 1], [1], capacity=4, n_documents=1),
        "piece 0 starts at 9,223,372,036,854,775,807: no document is that long, so pass the place",
    ),
    (
        lambda: PackPlan([0, 16], range(16), [0] * 16, [2**60] * 16, capacity=2**60, n_documents=16),
        r"lengths up to 1,152,921,504,606,846,976 over 16 pieces pass 2\*\*60 tokens: use several plans",
    ),
    (
        lambda: PackPlan([0, 1], np.array([2**64 - 1], np.uint64), [0], [1], capacity=4, n_documents=1),
        "source holds 18,446,744,073,709,551,615, which does not fit int64",
    ),
    (lambda: PackPlan.load("/nowhere"), r"/nowhere is not a saved plan \(.*No such file.*\): pass what"),
    (lambda: MADE.save("/nowhere/plan"), r"/nowhere/plan cannot be written \(.*\): pass the path"),
    (lambda: PackedDataset(DOCUMENTS, MADE)[9], "row 9 of 2: rows are numbered 0 to 1"),
    (lambda: PackedDataset(DOCUMENTS, MADE)["a"], "rows are chosen by integers"),
    (lambda: PackedDataset(DOCUMENTS, MADE)[[[0], [0, 1]]], "rows are chosen by integers"),
    (lambda: PackedDataset(DOCUMENTS, MADE)["a":], "rows are chosen by slices of integers"),
    (lambda: MADE.select(slice(0.5)), r"slices of integers, got slice.*: pass one such as batch\[2:5\]"),
    (lambda: balance([1], 1), "plan is a list: pass what crosspack.plan, pack or pack_tree returns"),
    (lambda: balance(MADE, 1, cost="tokens"), r"cost is 'tokens': pass Cost\(tokens=...".replace(".", "[.]")),
    (lambda: Cost(tokens="1"), "cost has tokens=1 and squares=3.06e-05: pass factors of 0 or more"),
    (lambda: Cost(tokens=float("inf")), "cost has tokens=inf"),
    (
        lambda: Cost.from_config({"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": [1, 2]}),
        r"the config's num_attention_heads must be an integer of at least 1, got \[1, 2\]",
    ),
    (lambda: balance(MADE, 1, rows_per_step=2**50), "steps of 1 x 1,125,899,906,842,624 rows do not"),
    (lambda: balance(MADE, 1).rank("0"), "rank is '0' and the plan is for ranks 0 to 0: pass one"),
    (lambda: ShardedPlan(MADE, np.full((1, 1, 1), -1), Cost()), "steps names row -1: the plan has 2 rows"),
    (lambda: ShardedPlan(MADE, np.zeros((1, 2, 1), int), Cost()), "steps names row 0 twice: every row is"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_values_say_what_where_and_the_way_out(call, message) -> None:
    with pytest.raises(PackingError, match=message):
        call()


def test_padding_may_be_negative_and_ids_may_not() -> None:
    assert pack([[1, 2]], 4, pad_id=-1).input_ids.tolist() == [[1, 2, -1, -1]]
    with pytest.raises(LayoutError, match=r"sequences\[1\]\[0\] is -1"):
        pack([[1, 2], [-1]], 4, pad_id=-1)


def test_balanced_steps_are_read_only_and_the_callers_array_is_not() -> None:
    steps = np.zeros((1, 1, 1), np.int64)
    sharded = ShardedPlan(plan([1], 1), steps, Cost())
    steps[0] = 0
    for one in (sharded, pickle.loads(pickle.dumps(sharded))):
        with pytest.raises(ValueError, match="read-only"):
            one.steps[0] = 0
