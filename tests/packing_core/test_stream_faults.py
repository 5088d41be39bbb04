"""stream when things go wrong: bad documents, limits, and states that do not belong to it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from packing_core.errors import PackingError
from packing_core.streaming.stream import stream
from tests.packing_core.test_stream import LENGTHS, OPTIONS, PackStreamSpy, contents, documents

STREAM = sys.modules["packing_core.streaming.stream"]  # the package has a function of that name


def _continued(source, stopped):
    again = stream(source, 20, **OPTIONS)
    again.load_state_dict(stopped.state_dict())
    return again


@pytest.mark.parametrize("bad", [[], [1] * 30, None, {"labels": [1]}, "text", {"input_ids": [1], "x": [1, 2]}])
def test_a_bad_document_stops_the_stream_every_time(bad) -> None:
    packed = stream([[1, 2], [3], bad, [4]], 20, buffer=2)
    for _ in range(3):
        with pytest.raises(PackingError, match="document 2 "):
            list(packed)


def test_the_state_after_a_failure_of_the_source_is_that_without_one() -> None:
    given, failures = documents([n % 7 + 1 for n in range(200)]), [77, 30]

    def opened(start):
        for number in range(start, len(given)):
            if failures and number == failures[-1]:
                raise OSError(f"document {failures.pop()} cannot be read now")
            yield given[number]

    failing, whole = (stream(source, 20, **OPTIONS) for source in (opened, lambda start: given[start:]))
    for row in whole:
        try:
            found = next(failing)
        except OSError:
            found = next(failing)
        assert contents([found]) == contents([row])
        assert failing.state_dict() == whole.state_dict()
    assert not failures


def test_no_document_waits_longer_than_max_age_while_others_are_dropped() -> None:
    lengths = [5] + [99] * 40 + [5] * 3 + [99] * 200 + [6, 7] * 20 + [99]
    packed = PackStreamSpy(documents(lengths), 13, buffer=4, max_age=10, overflow="drop")
    kept = []
    for row in packed:
        assert packed.read - min(row.sources) <= 10
        kept += row.sources.tolist()
    assert sorted(kept) == [i for i, n in enumerate(lengths) if n < 99]


def test_the_documents_named_as_dropped_or_truncated_are_the_last_ones_and_all_are_counted(monkeypatch) -> None:
    monkeypatch.setattr("packing_core.streaming.reader.REMEMBERED", 3)
    for overflow, kept in (("drop", "dropped"), ("truncate", "truncated")):
        packed = stream(documents([30] * 10 + [3]), 20, overflow=overflow)
        list(packed)
        assert getattr(packed, kept) == [7, 8, 9]
        assert getattr(packed, f"n_{kept}") == 10


def test_what_is_pending_and_what_is_made_at_a_time_is_bounded_in_tokens(monkeypatch) -> None:
    monkeypatch.setattr(STREAM, "CHUNK_TOKENS", 60)
    packed = PackStreamSpy(documents([15] * 50), 20, buffer=1000, buffer_tokens=100)
    whole, held = [], []
    for chunk in packed.packed.chunks():
        assert len(chunk) * chunk.capacity <= 60
        whole += contents(chunk[row] for row in range(len(chunk)))
        held.append(packed.read - len(whole))
    assert max(held) <= 100 / 15 + 1
    assert len(whole) == 50
    assert whole == contents(stream(documents([15] * 50), 20, buffer=1000, buffer_tokens=100))


def _state(position=10, **options):
    stopped = stream(documents(LENGTHS), 20, **OPTIONS, **options)
    for _ in range(position):
        next(stopped)
    return stopped.state_dict()


def _other_content():
    source = documents(LENGTHS)
    source[_state()["cursor"] - 1] = source[_state()["cursor"] - 1] + 1
    return source


@pytest.mark.parametrize(("before", "after"), [(0.25, 0.5), (1 << 60, (1 << 60) + 1)])
def test_a_column_of_other_values_is_another_document(before, after) -> None:
    def source(value):
        return [{"input_ids": [1, 2, 3], "scores": [value] * 3} for _ in range(20)]

    stopped = stream(source(before), 6, buffer=4)
    for _ in range(5):
        next(stopped)
    with pytest.raises(PackingError, match="gives other documents"):
        stream(source(after), 6, buffer=4).load_state_dict(stopped.state_dict())


CHANGED = [  # in a state
    ({"rows": 25}, "fingerprint of the state does not"),
    ({"rows": -3}, "rows of the state is -3: it coun"),
    ({"rows": "9"}, "rows of the state is '9': it counts"),
    ({"rows": 0}, "numbers of the state contradict"),
    ({"pending": 5}, "numbers of the state contradict"),
    ({"pending": [[10**6, 0]]}, "numbers of the state contradict"),
    ({"seed": np.arange(2)}, "taken with seed="),
]
REFUSED = [
    *((lambda changes=changes: _state() | changes, None, {}, message) for changes, message in CHANGED),
    (lambda: [1], None, {}, "the state is a list: pass what state_dict"),
    (_state, _other_content, {}, "fingerprint of the state does not match: .* gives other documents"),
    (_state, lambda: documents(LENGTHS[:3]), {}, "and the source ends before it: give the source"),
    (_state, None, {"pad_id": 7}, "taken with pad_id=0 and this stream has pad_id=7"),
    (_state, None, {"weighting": "document"}, "taken with weighting=token"),
]


@pytest.mark.parametrize(("state", "source", "options", "message"), REFUSED)
def test_a_state_that_does_not_belong_here_is_refused_and_changes_nothing(state, source, options, message) -> None:
    given = documents(LENGTHS) if source is None else source()
    packed, calm = (stream(given, 20, **OPTIONS, **options) for _ in range(2))
    first = contents([next(packed)])
    with pytest.raises(PackingError, match=message):
        packed.load_state_dict(state())
    assert first + contents(packed) == contents(calm)


def _alike(count, first=0):
    """Documents of one length, which differ in their tokens alone."""
    return [np.full(7, first + number) for number in range(count)]


@pytest.mark.parametrize("options", [{}, {"lengths": [7] * 60}, {"order": "curriculum"}], ids=["", "lengths", "order"])
@pytest.mark.parametrize("position", [0, 2, 9])
@pytest.mark.parametrize("other", [_alike(60, 1), _alike(60)[::-1], [*_alike(58), *_alike(60)[:57:-1]]])
def test_other_documents_of_the_same_lengths_are_refused(options, position, other) -> None:
    stopped = stream(_alike(60), 20, **OPTIONS, **options)
    for _ in range(position):
        next(stopped)
    state = json.loads(json.dumps(stopped.state_dict()))
    with pytest.raises(PackingError, match="the source (holds|gives) other documents"):
        stream(other, 20, **OPTIONS, **options).load_state_dict(state)
    with pytest.raises(PackingError, match="fingerprint of the state"):
        stream(_alike(60), 20, **OPTIONS, **options).load_state_dict(state | {"source": [0, ""]})


def test_a_state_loads_onto_a_source_that_grew_and_one_without_a_digest_loads(monkeypatch) -> None:
    stopped, grown = stream(_alike(60), 20, **OPTIONS), stream(_alike(90), 20, **OPTIONS)
    next(stopped)
    grown.load_state_dict(stopped.state_dict())
    with pytest.raises(PackingError, match="the source holds other documents"):
        stream(_alike(59), 20, **OPTIONS).load_state_dict(stopped.state_dict())
    rest = contents(stopped)[:10]
    assert contents(next(grown) for _ in range(10)) == rest
    stopped = stream(_alike(60), 20, **OPTIONS)
    next(stopped)
    monkeypatch.setattr("packing_core.streaming.sources.Source.state", lambda self: {})  # as before it was saved
    state = stopped.state_dict()
    assert "source" not in state
    monkeypatch.undo()
    assert contents(_continued(_alike(60), stopped))[:10] == rest


def test_a_document_that_cannot_be_read_keeps_no_state_from_being_saved() -> None:
    packed = stream([[1, 2], [3], "text", [4]], 20, buffer=2)
    with pytest.raises(PackingError, match="document 2 "):
        list(packed)
    assert packed.state_dict()["rows"] == 1 and "source" not in packed.state_dict()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: stream([[1]], 4, shard=3), r"shard is 3: pass \(index, count\) with 0 <= index < count"),
        (lambda: stream([[1]], 4, shard=(0, 1, 2)), r"shard is \(0, 1, 2\): pass"),
        (lambda: stream([[1]], 2**70), r"capacity must be an integer of at most 2\*\*60, got 1180591620717411303424"),
        (lambda: stream([[1]], 4, pad_id="x"), "pad_id is 'x': pass an integer"),
        (lambda: stream([[1]], 4, weighting="row"), "weighting must be one of"),
        (lambda: stream({"input_ids": [[1]]}, 4), "source is a dict: pass a sequence of documents, a function"),
        (lambda: stream(lambda: iter(()), 4), r"a function that does not take one number: pass open\(start\)"),
        (lambda: list(stream(lambda start: 5, 4)), r"open\(0\) returned a int: return an iterable of documents"),
        (
            lambda: list(stream([[1], 5], 4)),
            "document 1 is a int: pass an array of token ids, or a mapping with input_",
        ),
        (lambda: list(stream([[1], {"text": "a"}], 4)), "document 1 has text and no input_ids: tokenise it first"),
        (lambda: list(stream([[1], [2.5]], 4)), "document 1 of the stream: sequences has dtype float64: pass integer"),
        (lambda: list(stream([[1], [-1]], 4)), r"document 1 of the stream: sequences\[0\]\[0\] is -1: token ids run"),
        (lambda: list(stream([[1], {"input_ids": [1]}], 4)), "document . has (input_ids|no columns) and the first one"),
        (
            lambda: list(stream([{"input_ids": [1] * 9, "x": [1] * 8}], 4, overflow="truncate")),
            "x of document 0 has 8 entries and input_ids 9: give one per token",
        ),
        (
            lambda: list(stream([{"input_ids": [1] * 9, "x": 8}], 4, overflow="split")),
            "x of document 0 is a int: give it one entry per token",
        ),
        (
            lambda: list(stream([{"input_ids": [1] * 9, "prompt_length": -1}], 4, overflow="split")),
            "prompt_length of document 0 is -1: pass an integer from 0 to 9",
        ),
    ],
)
def test_odd_input_is_named_with_the_way_out(call, text) -> None:
    with pytest.raises(PackingError, match=text):
        call()
