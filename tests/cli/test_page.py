"""The page of ``crosspack report``: whole in itself, readable in both colour schemes, and each chart with its table."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from crosspack.cli import charts
from crosspack.cli.findings import by_cap, by_policy, by_rank, by_strategy, histogram, hours
from crosspack.cli.page import DARK, LIGHT, _lengths
from crosspack.cli.report import pictured
from crosspack.cli.speed import SHAPES, Speed, of_run
from packing_core import Cost, PackingError, RowRule, plan
from tests.cli.console import done

VOID = {"meta", "rect", "line"}


class Page(HTMLParser):
    """Elements with their attributes and parents; what is not closed in order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.found, self.text = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes) -> None:
        self.found.append((tag, dict(attributes), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data) -> None:
        self.text += data

    def all(self, tag):
        return [attributes for name, attributes, _ in self.found if name == tag]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A packed folder's rows: two documents each, the second with a prompt."""
    path = tmp_path_factory.mktemp("tokens") / "a<b>&c.jsonl"
    records = [
        {"input_ids": list(range(1, 31 + i)), "seq_lengths": [10, 20 + i], "labels": [*range(1, 11), *[-100] * 5]}
        for i in range(40)
    ]
    for record in records:
        record["labels"] += record["input_ids"][15:]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def written(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    result = done("report", "--data", data, "--capacity", 48, "--output", output, "--ranks", 4, "--json")
    return output.read_text("utf-8"), json.loads(result.stdout)


def test_the_page_is_whole_in_itself(written) -> None:
    text, _ = written
    page = Page(text)
    assert text.startswith("<!doctype html>") and page.all("html")[0]["lang"] == "en"
    assert not page.all("script") and not page.all("link") and not page.all("img")
    assert not re.search(r"https?:|url\(|@import|src=", text)
    assert "a<b>&c.jsonl" not in text and "a&lt;b&gt;&amp;c.jsonl" in text, "names from the data are text"
    assert "default-src 'none'" in text


def test_screen_readers_and_keyboards_reach_everything(written) -> None:
    page = Page(written[0])
    ids = [attributes["id"] for _, attributes, _ in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for image in page.all("svg"):
        assert image["role"] == "img" and image["aria-labelledby"] in ids
    assert len(page.all("figure")) == len(page.all("svg")) == len(page.all("details")) >= 6
    inside = [parents for tag, _, parents in page.found if tag == "table"]
    assert sum("details" in parents for parents in inside) == len(page.all("details"))
    assert len(page.all("caption")) == len(inside)
    assert all(header["scope"] in ("row", "col") for header in page.all("th"))
    assert len(page.all("h1")) == 1 and all(section["aria-labelledby"] in ids for section in page.all("section"))
    assert all(link["href"][1:] in ids for link in page.all("a"))
    scrolling = [found for found in page.all("div") if found.get("class") == "scroll"]
    assert scrolling
    assert all(found["tabindex"] == "0" and found["role"] == "region" and found["aria-label"] for found in scrolling)


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    light, dark = sorted([luminance(one), luminance(other)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast(colours) -> None:
    for name in ("ink", "soft", "link"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    for name in ("main", "other", "warm", "silent", "edge"):
        assert contrast(colours[name], colours["paper"]) >= 3, name


def test_the_page_says_what_the_figures_say(written) -> None:
    text, found = written
    said = Page(text).text
    assert f"{found['documents']:,} documents, {found['tokens']:,} tokens" in said
    assert found["documents"] == 80 and found["tokens"] == 40 * 10 + sum(20 + i for i in range(40))
    assert found["longer_than_capacity"] == sum(20 + i > 48 for i in range(40))
    assert "the dashed line is the capacity, 48 tokens" in said
    assert "no bar is as long as the capacity, 4,096 tokens" in _lengths(found | {"capacity": 4096})
    for made in found["strategies"]:
        assert f"{made['efficiency']:.2%}" in said
    assert f"{found['ranks']['slowest_over_mean_after']:.4f}" in said
    assert {x["overflow"] for x in found["policies"]} == {"truncate", "split", "overlap", "restart", "drop"}
    assert [x["max_segments"] for x in found["caps"]][-1] is None
    assert found["tokenizer"] == "none, the data holds token ids"


def test_rows_are_pictured_with_what_carries_loss() -> None:
    rows = plan([4, 3, 9], 8, overflow="split", seed=None, strategy="sequential")
    trained = [[0, 0, 1, 1], [1, 1, 1], [0, 1, 1, 1, 0, 0, 1, 1, 1]]
    shown = pictured(rows, [np.packbits(mask) for mask in trained])
    assert [[tuple(segment) for segment in row] for row in shown] == [
        [(0, 0, 4, [(2, 4)]), (1, 4, 3, [(1, 3)])],
        [(2, 0, 8, [(1, 4), (6, 8)])],
        [(2, 0, 1, [])],
    ]
    drawn = charts.rows("rows", shown, 8)
    assert "row 1, document 2: 8 tokens, 5 with loss" in drawn


def test_policies_caps_and_ranks_are_counted() -> None:
    found = {x["overflow"]: x for x in by_policy(np.array([4, 10, 17]), 8)}
    assert [found[p]["tokens_left_out"] for p in ("truncate", "split", "drop")] == [11, 0, 27]
    assert found["split"]["pieces"] == 5
    shown = {x["overflow"]: x for x in by_policy(np.array([4, 10, 17]), 8, context=4)}
    assert [shown["restart"][name] for name in ("pieces", "context_tokens", "tokens_left_out")] == [6, 16, 0]
    caps = by_cap(np.full(64, 8), RowRule(64, max_segments=3), 0)
    assert {x["max_segments"]: x["rows"] for x in caps} == {3: 22, 4: 16, 8: 8, 16: 8, 32: 8, None: 8}
    assert next(x["efficiency"] for x in caps if x["max_segments"] == 4) == 0.5
    rows = plan(np.random.default_rng(0).integers(1, 1000, 2000), 1000)
    ranks = by_rank(rows, 4, Cost(tokens=0, squares=1), 0)
    assert ranks["slowest_over_mean_after"] < ranks["slowest_over_mean_before"]
    assert by_rank(plan([1], 8), 4, Cost(), 0) is None
    for values in (np.array([5]), np.array([1, 1, 10, 1000])):
        counts, edges = histogram(values).values()
        assert sum(counts) == len(values) and len(edges) == len(counts) + 1


def test_strategies_are_the_plans_rows_and_hours_follow_the_operations() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    for made in by_strategy(lengths, 32, "truncate", 0, Speed.stated("llama-1b", "h100")):
        rows = plan(lengths, made["capacity"], strategy=made["strategy"], overflow="truncate", seed=0)
        assert (made["rows"], made["efficiency"]) == (rows.n_rows, rows.efficiency)
        cost = Cost.operations(SHAPES["llama-1b"])
        squares = int((rows.length**2).sum())
        forward = cost.tokens * rows.n_rows * rows.capacity + cost.squares * squares
        assert made["hours"] == pytest.approx(3 * forward / (989e12 * 0.4) / 3600)
    rows = plan([100] * 64, 100)
    found = {x["arrangement"]: x["hours"] for x in hours(rows, Speed.stated("llama-8b", "h100"), (8,), 0)}
    cost = Cost.operations(SHAPES["llama-8b"])
    expected = 3 * 64 * (100 * cost.tokens + 100**2 * cost.squares) / (989e12 * 0.4) / 3600
    assert all(value == pytest.approx(expected) for value in found.values())
    assert 2 * 7.5e9 < cost.tokens < 2 * 8.1e9  # two operations a parameter that a token meets


def test_a_measured_run_gives_the_time_of_its_own_rows_and_of_others_by_their_cost(tmp_path) -> None:
    """Rows of the run: 200 tokens in 0.5 s. Rows of one long document take longer, by the cost of its attention."""
    steps = [{"seconds": s, "slots": 400} for s in (9.0, 1.0, 1.1, 0.9)]
    (tmp_path / "crosspack.json").write_text(json.dumps({"device": "cpu", "runs": {"packed": steps}}))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    rows = plan([100] * 8, 200)
    speed = Speed.measured(tmp_path, rows)
    assert speed.of_rows(rows) * 3600 == pytest.approx(4 * 0.5)
    assert speed.of_row(rows) == pytest.approx({"mean": 0.5, "most": 0.5})
    assert speed.of_step(rows) == pytest.approx({"rows": 2, "mean": 1.0, "most": 1.0})
    assert speed.of_step(plan([100] * 2, 200)) == pytest.approx({"rows": 2, "mean": 0.5, "most": 0.5}), (
        "one row is left"
    )
    assert Speed.stated("llama-1b", "h100").of_step(rows) == {}
    token, square = 2 * 8 * 8 * 4 + 6 * 8, 2 * 8
    longer = (200 * token + 200**2 * square) / (200 * token + 2 * 100**2 * square)
    assert speed.of_rows(plan([200] * 4, 200)) * 3600 == pytest.approx(4 * 0.5 * longer)
    uneven = plan([200, 200, *[100] * 6], 200, strategy="sequential", seed=None)  # five rows, two of one document
    assert speed.of_step(uneven)["most"] == pytest.approx(longer) and 1.0 < speed.of_step(uneven)["mean"] < longer
    assert speed.about["tokens_per_second"] == pytest.approx(400)
    # The run's own rows were cheaper: documents of 50 tokens. Rows of longer ones take longer than its steps did.
    (tmp_path / "crosspack.json").write_text(
        json.dumps(
            {"device": "cpu", "runs": {"packed": steps}, **of_run(tmp_path / "config.json", plan([50] * 8, 200))}
        )
    )
    dearer = (100 * token + 100**2 * square) / (100 * token + 2 * 50**2 * square)
    assert Speed.measured(tmp_path, rows).of_rows(rows) * 3600 == pytest.approx(4 * 0.5 * dearer)
    assert of_run(tmp_path / "absent.json", rows) == {}
    with pytest.raises(PackingError, match="is not the output of a run that trained weights .FileNotFoundError"):
        Speed.measured(tmp_path / "absent", rows)
    (tmp_path / "crosspack.json").write_text("[]")
    with pytest.raises(PackingError, match="pass the folder that crosspack train --output wrote"):
        Speed.measured(tmp_path, rows)
