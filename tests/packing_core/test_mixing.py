"""mix: shares by weight, the same for the same seed, and from any document on what comes after it."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing_core import PackingError, mix


def named(name: str, count: int) -> list[str]:
    return [f"{name}{i}" for i in range(count)]


class Again:
    """Something that can be iterated again and again, and says nothing of its size."""

    def __init__(self, items) -> None:
        self.items = items

    def __iter__(self):
        return iter(self.items)


FORMS = {
    "sequence": lambda items: items,
    "function": lambda items: lambda start: iter(items[start:]),
    "iterable": Again,
}


def test_every_source_gives_its_share_from_the_first_block_on() -> None:
    weights = [0.3, 0.5, 0.2]
    mixture = mix([named(name, 10**6) for name in "abc"], weights, seed=1)
    for count in (2048, 20_000):
        given_documents = Counter(document[0] for document in islice(mixture, count))
        for name, weight in zip("abc", weights, strict=True):
            assert abs(given_documents[name] - weight * count) <= 1024
    whole_blocks = Counter(document[0] for document in islice(mixture, 5 * 1024))
    assert all(abs(whole_blocks[n] - w * 5 * 1024) <= 1 for n, w in zip("abc", weights, strict=True))


def test_a_source_of_a_ten_thousandth_has_its_share_too() -> None:
    mixture = mix([lambda start: iter(lambda: "a", 0), lambda start: iter(lambda: "b", 0)], [9999, 1], seed=0)
    assert 9 <= Counter(islice(mixture, 100_000))["b"] <= 11


def test_the_seed_decides_the_order_and_nothing_else_does() -> None:
    sources = [named("a", 4000), named("b", 4000)]
    runs = [list(mix(sources, [1, 1], seed=seed)) for seed in (0, 0, 1, None)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[3][:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stop", ["first", "all", "once", "never"])
@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
    seed=st.none() | st.integers(0, 5),
    start=st.integers(0, 3000),
)
def test_from_any_document_on_comes_what_comes_after_it(stop, form, sizes, weights, seed, start) -> None:
    sources = [named("abcd"[i], size) for i, size in enumerate(sizes)]
    options = {"weights": weights[: len(sizes)], "seed": seed, "stop": stop}
    whole = list(islice(mix(sources, **options), 4000))
    again = mix([FORMS[form](source) for source in sources], **options)
    start = min(start, len(whole))  # a stream asks for no document after the end
    assert list(islice(again(start), 4000 - start)) == whole[start:]


def test_all_reads_every_source_to_its_end_and_starts_the_others_again() -> None:
    documents = Counter(mix([named("a", 10), named("b", 500)], [1, 1], seed=3, stop="all"))
    assert all(documents[f"b{i}"] == 1 for i in range(500))
    assert all(documents[f"a{i}"] >= 45 for i in range(10))


def test_iterators_are_read_once_and_do_not_start_again() -> None:
    mixture = mix([iter(named("a", 3)), named("b", 3)], [1, 1], stop="once")
    assert len(list(mixture)) == 6
    with pytest.raises(PackingError, match="sources.0. is a list_iterator, which can be read once"):
        list(mixture(2))
    with pytest.raises(PackingError, match='and stop=\'all\' reads sources again: pass stop="first" or "once"'):
        mix([iter([]), ["b"]], [1, 1], stop="all")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], []), "sources is empty"),
        (([["a"]], [1, 2]), r"weights is \[1, 2\] and there are 1 sources: pass one number per source"),
        (([["a"], ["b"]], [1, 0]), "pass numbers above 0, none below a millionth"),
        (([["a"], ["b"]], [1, 1e-9]), "none below a millionth of their sum"),
        (([["a"], ["b"]], [1, float("nan")]), "pass numbers above 0"),
        (([["a"], ["b"]], "xy"), "pass one number per source"),
        (([["a"], 3], [1, 1]), r"sources\[1\] is a int: pass a sequence of documents"),
    ],
)
def test_bad_mixtures_are_refused_with_the_way_out(arguments, text) -> None:
    with pytest.raises(PackingError, match=text):
        mix(*arguments)


def test_an_empty_source_cannot_start_again() -> None:
    with pytest.raises(PackingError, match=r"sources\[0\] is empty: leave it out"):
        list(islice(mix([[], ["b"]], [1, 1], stop="never"), 5))
