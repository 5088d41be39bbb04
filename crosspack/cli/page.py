"""The page of ``crosspack report``: findings in, one HTML file out that needs no network, no script and no font.

It follows the reader's choice of light or dark, fits a phone, and can be read by keyboard and screen reader: every
chart has a title and a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log
from typing import Any

from crosspack.cli import charts
from crosspack.cli.charts import Bar, Segment
from crosspack.cli.speed import said_of
from crosspack.cli.tables import duration
from packing_core.errors import plural

# Text has a contrast of at least 4.5 to its background and the colours of charts of at least 3, in both (tested).
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "soft": "#565e68",
    "link": "#0b57a4",
    "edge": "#7d858f",
    "rest": "#d9dde2",
    "main": "#1f6fb5",
    "other": "#0d4677",
    "warm": "#b4441f",
    "silent": "#8a6fb0",
}
DARK = {
    "paper": "#14171b",
    "ink": "#e8ebee",
    "soft": "#aab2bc",
    "link": "#7cb8f2",
    "edge": "#7b8591",
    "rest": "#343b44",
    "main": "#4f9fe6",
    "other": "#9ecbf5",
    "warm": "#e8855f",
    "silent": "#a98fd0",
}
_SHADES = ("rest", "main", "other", "warm", "silent")


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


_STYLE = f"""
:root{{color-scheme:light dark;{_variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.5 system-ui,sans-serif}}
main,header{{max-width:44rem;margin:0 auto;padding:0 1rem}}
h1{{font-size:1.6rem;line-height:1.2;overflow-wrap:anywhere}}
h2{{font-size:1.2rem;margin:2.5rem 0 .5rem}}
a{{color:var(--link)}}
.skip{{position:absolute;left:-99rem}}
.skip:focus{{left:1rem;top:.5rem;background:var(--paper);padding:.5rem}}
:focus-visible{{outline:3px solid var(--link);outline-offset:2px}}
figure{{margin:1rem 0}}
figcaption,.note{{color:var(--soft);font-size:.9rem}}
svg{{display:block;width:100%;max-width:36rem;height:auto}}
svg text{{font:13px system-ui,sans-serif;fill:var(--ink)}}
svg .end{{text-anchor:end}}svg .middle{{text-anchor:middle}}
svg line{{stroke:var(--edge)}}svg .mark{{stroke:var(--warm);stroke-width:2;stroke-dasharray:4 3}}
{"".join(f"svg .{name}{{fill:var(--{name})}}.key .{name}{{background:var(--{name})}}" for name in _SHADES)}
.key{{display:flex;flex-wrap:wrap;gap:.3rem 1rem;padding:0;list-style:none;font-size:.9rem}}
.key span{{display:inline-block;width:1em;height:1em;margin-right:.4em;border:1px solid var(--edge)}}
summary{{cursor:pointer;color:var(--link);padding:.4rem 0}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}}
caption{{text-align:left;color:var(--soft);padding-bottom:.3rem}}
th,td{{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--rest)}}
th:first-child{{text-align:left}}
"""


def page(report: dict[str, Any], pictured: Sequence[Sequence[Segment]]) -> str:
    """Returns the page of what ``--json`` prints, on which some rows are pictured, each by its segments."""
    name = escape(report["data"])
    sections = [
        ("lengths", "How long the documents are", _lengths(report)),
        ("padding", "What padding costs today", _padding(report)),
        ("rows", "What rows hold", _rows(report, pictured)),
        ("strategies", "Rows by strategy and capacity", _strategies(report)),
        ("attention", "Attention cost by row and rank", _attention(report)),
        ("time", "Estimated time of an epoch", _time(report)),
        ("long", "Documents longer than a row", _long(report)),
    ]
    if report["warnings"]:
        items = "".join(f"<li>{escape(concern['text'])}</li>" for concern in report["warnings"])
        sections.insert(0, ("warnings", "What will train badly", f"<ul>{items}</ul>"))
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{title}</h2>{text}</section>' for key, title, text in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Packing {name}</title><style>{_STYLE}</style></head><body>"
        f'<a class="skip" href="#content">Skip to the content</a><header><h1>Packing {name}</h1>'
        f"<p>{_summary(report)}</p></header>"
        f'<main id="content"><nav aria-label="Sections"><ul>{links}</ul></nav>{body}'
        '<p class="note">Made by crosspack report. The page is complete in itself: it loads nothing.</p>'
        "</main></body></html>\n"
    )


def _summary(report: dict[str, Any]) -> str:
    computed = report["computed_tokens"]
    packed = next(tokens for name, tokens in computed.items() if name.endswith("packed"))
    batches, padded = next(iter(computed.items()))
    less = f"{1 - packed / padded:.0%} less" if packed < padded else "no less"
    return (
        f"{plural(report['documents'], 'document')}, {plural(report['tokens'], 'token')}, "
        f"{report['trained_tokens']:,} of them with loss. "
        f"In padded {batches.partition(',')[0]} in random order a model computes {padded:,} tokens an epoch; packed "
        f"into rows of {report['capacity']:,} it computes {packed:,}: <strong>{less}</strong>."
    )


def _lengths(report: dict[str, Any]) -> str:
    edges = report["length_histogram"]["edges"]
    title = f"Histogram of document lengths, from {edges[0]:,.0f} to {edges[-1]:,.0f} tokens on a logarithmic scale"
    place = _place(edges, report["capacity"])
    where = "the dashed line is" if 0 <= place <= 1 else "no bar is as long as" if place > 1 else "all are longer than"
    caption = f"Documents by length; {where} the capacity, {report['capacity']:,} tokens."
    drawn = charts.columns(title, report["length_histogram"]["counts"], _ticks(edges), mark=place)
    shown = _counts("Documents by length", ["tokens", "documents"], report["length_histogram"])
    return charts.figure(drawn, caption, shown)


def _counts(caption: str, header: list[str], histogram: dict[str, Any]) -> str:
    """Writes the table of a histogram, without its empty bins."""
    bins = zip(histogram["edges"], histogram["edges"][1:], histogram["counts"], strict=False)
    return charts.table(caption, header, [[f"{a:,.0f} to {b:,.0f}", f"{n:,}"] for a, b, n in bins if n])


def _place(edges: list[float], value: float) -> float:
    return log(value / edges[0]) / log(edges[-1] / edges[0])


def _ticks(edges: list[float]) -> list[tuple[float, str]]:
    powers = [10**k for k in range(15) if edges[0] <= 10**k <= edges[-1]]
    if len(powers) < 2:
        powers = [round(edges[0]), round(edges[-1])]
    return [(min(1.0, max(0.0, _place(edges, max(power, 1)))), f"{power:,}") for power in powers]


def _padding(report: dict[str, Any]) -> str:
    real = report["tokens"] - report["tokens_left_out"]
    arrangements = report["computed_tokens"].items()
    colour = {name: "main" if name.endswith("packed") else "warm" for name, _ in arrangements}
    bars = [Bar(name, slots, real, f"{1 - real / slots:.1%} padding", colour[name]) for name, slots in arrangements]
    title = "Tokens that a model computes in an epoch, by the arrangement of the documents"
    lines = [[name, f"{slots:,}", f"{1 - real / slots:.1%}"] for name, slots in arrangements]
    shown = charts.table("Computed tokens of an epoch", ["arrangement", "computed tokens", "padding"], lines)
    return charts.figure(charts.bars(title, bars), "Strong: real tokens. Weak: padding.", shown)


def _rows(report: dict[str, Any], pictured: Sequence[Sequence[Segment]]) -> str:
    title = f"{len(pictured)} packed rows and the segments in them"
    key = [
        ("main", "tokens with loss"),
        ("other", "the same, of every second document"),
        ("silent", "tokens without loss"),
    ]
    items = "".join(f'<li><span class="{name}"></span>{text}</li>' for name, text in [*key, ("rest", "padding")])
    caption = f"Rows of {report['capacity']:,} tokens as they are trained, one below the other. {report['pictured']}"
    shown = charts.rows_table("Segments of these rows", pictured)
    drawn = charts.rows(title, pictured, report["capacity"])
    return f'<ul class="key">{items}</ul>' + charts.figure(drawn, caption, shown)


def _strategies(report: dict[str, Any]) -> str:
    strategies = report["strategies"]
    if not strategies:
        return "<p>No document fits a row.</p>"
    lines = [
        [f"{x['capacity']:,} {x['strategy']}", f"{x['rows']:,}", f"{x['efficiency']:.2%}", duration(3600 * x["hours"])]
        for x in strategies
    ]
    bars = [
        Bar(f"{x['capacity']:,}, {x['strategy']}", 1, x["efficiency"], f"{x['efficiency']:.1%}") for x in strategies
    ]
    drawn = charts.bars("Packing efficiency by capacity and strategy", bars)
    shown = charts.table("Rows, efficiency and time", ["capacity, strategy", "rows", "efficiency", "epoch"], lines)
    caption = f"Real tokens over tokens of the rows; longer documents under --overflow {strategies[0]['overflow']}."
    caps = [[f"{x['max_segments'] or 'no cap'}", f"{x['rows']:,}", f"{x['efficiency']:.2%}"] for x in report["caps"]]
    capped = charts.table("Fill under a cap on the documents of a row", ["--max-segments", "rows", "efficiency"], caps)
    return charts.figure(drawn, caption, shown) + capped


def _attention(report: dict[str, Any]) -> str:
    counts, edges = report["row_cost_histogram"]["counts"], report["row_cost_histogram"]["edges"]
    ends = [(0.0, f"{edges[0]:,.0f}"), (1.0, f"{edges[-1]:,.0f}")]
    drawn = charts.columns("Histogram of the attention cost of rows, on a logarithmic scale", counts, ends)
    shown = _counts("Rows by attention cost", ["squared tokens", "rows"], report["row_cost_histogram"])
    text = charts.figure(drawn, "Rows by attention cost: the sum of the squared lengths of their segments.", shown)
    ranks = report["ranks"]
    if ranks is None:
        return text + "<p>There are fewer rows than ranks: nothing to balance.</p>"
    named = {"as the rows come": ranks["slowest_over_mean_before"], "after balance": ranks["slowest_over_mean_after"]}
    bars = [Bar(f"{ranks['ranks']} ranks, {k}", v, 1, f"{v - 1:.1%} waiting", "main") for k, v in named.items()]
    drawn = charts.bars("Time of a step over the mean of its ranks, before and after balancing", bars)
    shown = charts.table("Slowest rank over the mean", ["rows", "ratio"], [[k, f"{v:.4f}"] for k, v in named.items()])
    return text + charts.figure(drawn, "Strong: the mean rank works. Weak: it waits for the slowest.", shown)


def _time(report: dict[str, Any]) -> str:
    time = report["time"]
    longest, packed = 3600 * max(x["hours"] for x in time["hours"]), 3600 * time["hours"][-1]["hours"]
    bars = [
        Bar(
            x["arrangement"],
            x["hours"],
            x["hours"],
            duration(3600 * x["hours"]),
            "main" if "packed" in x["arrangement"] else "warm",
        )
        for x in time["hours"]
    ]
    if "run" in time:
        of = f"By the run in {time['run']} on {time['device']}, {time['tokens_per_second']:,.0f} tokens a second."
    else:
        of = (
            f"An estimate: a model of the shape of {time['shape']} on one {time['gpu']}, at {time['utilisation']:.0%} "
            "of its stated bfloat16 speed."
        )
    caption = f"{of} Packing saves {duration(longest - packed)} of {duration(longest)} at most; {said_of(time)}."
    lines = [[x["arrangement"], duration(3600 * x["hours"])] for x in time["hours"]]
    shown = charts.table("Estimated time of an epoch", ["arrangement", "time"], lines)
    return charts.figure(charts.bars("Estimated time of an epoch by arrangement", bars), caption, shown)


def _long(report: dict[str, Any]) -> str:
    if not report["longer_than_capacity"]:
        return f"<p>None is longer than {report['capacity']:,} tokens.</p>"
    columns = {
        "--overflow": "{overflow}",
        "documents": "{documents:,}",
        "tokens left out": "{tokens_left_out:,}",
        "of all tokens": "{share_left_out:.2%}",
        "segments made of them": "{pieces:,}",
        "context tokens": "{context_tokens:,}",
    }
    lines = [[text.format(**policy) for text in columns.values()] for policy in report["policies"]]
    return charts.table("What each policy does to longer documents", list(columns), lines)
