"""Keywords of other packers: the error names ours, whatever function they are given to."""

import inspect

import pytest

from packing_core import PackedDataset, PackingError, balance, pack, plan, stream
from packing_core.hints import _CALLED

D, MADE = [[1, 2]], plan([2], 4)
HINTS = [
    (lambda: pack(D, max_length=4), r"pack\(\) has no argument 'max_length': pass capacity_or_plan="),
    (lambda: plan([2], max_seq_length=4), r"plan\(\) has no argument 'max_seq_length': pass capacity="),
    (lambda: stream(D, seq_len=4), r"stream\(\) has no argument 'seq_len': pass capacity="),
    (lambda: pack(D, capacity=4), r"pack\(\) has no argument 'capacity': pass capacity_or_plan="),
    (lambda: pack(D, 4, pad_token_id=1), "'pad_token_id': pass pad_id="),
    (lambda: stream(D, 4, pad_token_id=1), "'pad_token_id': pass pad_id="),
    (lambda: pack(D, 4, return_boundaries=True), "leave it out, every batch has them: batch.cu_seqlens"),
    (lambda: pack(D, 4, label_pad_id=-100), "'label_pad_id': leave it out, labels are padded with -100"),
    (lambda: stream(D, 4, alignment=2), "'alignment': leave it out, since 0.3 documents start anywhere"),
    (lambda: plan([2], 4, effort="max"), "'effort': leave it out, since 0.3 strategy=\"best_fit\" is"),
    (lambda: stream(D, 4, drop_last=True), "'drop_last': leave it out, no row is left out"),
    (lambda: plan([2], 4, shuffle=True), "'shuffle': pass seed=, an integer shuffles, None keeps the order"),
    (lambda: pack(D, 4, truncation=True), '\'truncation\': pass overflow=, "error", "truncate", "split"'),
    (lambda: stream(D, 4, prefetch=8), "'prefetch': pass buffer="),
    (lambda: stream(D, 4, rank=1), r"'rank': pass shard=, \(index, count\)"),
    (lambda: balance(MADE, num_replicas=1), r"balance\(\) has no argument 'num_replicas': pass world_size="),
    (lambda: balance(MADE, 1, batch_size=4), "'batch_size': pass rows_per_step="),
    (lambda: pack(D, 4, completion_mask=D), "'completion_mask': pass loss_mask="),
    (lambda: PackedDataset(D, 4, packing_strategy="bfd"), r"PackedDataset\(\) .*: pass strategy="),
    (lambda: pack(D, 4, stragety="best_fit"), "'stragety': pass strategy="),
    (lambda: balance(MADE, 1, zzz=1), "'zzz': it has plan, world_size, cost, rows_per_step, seed"),
]


@pytest.mark.parametrize(("call", "message"), HINTS)
def test_the_error_names_the_right_keyword(call, message) -> None:
    for kind in (PackingError, TypeError):
        with pytest.raises(kind, match=message):
            call()


def test_hints_name_arguments_that_exist() -> None:
    functions = (plan, pack, stream, balance, PackedDataset)
    known = {name for function in functions for name in inspect.signature(function).parameters}
    assert set(_CALLED) <= known | {"capacity"}


def test_signatures_and_docstrings_are_those_of_the_functions() -> None:
    assert list(inspect.signature(plan).parameters)[:2] == ["lengths", "capacity"]
    assert plan.__doc__.startswith("Decide which document goes into which row.")
