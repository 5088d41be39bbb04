"""Cuts of documents and mixed rows by the textbook, beside those of `conformance.naive`: slow and plain.

Nothing here imports the planner.
"""

import math

from conformance.naive import best_fit_decreasing, fits, sequential


def pieces(document, capacity, overflow, context, min_piece=1):
    """The segments of a document that is cut, and their targets: two lists of lists, made token by token."""
    shown = context if overflow != "split" else 0
    spans, at = [], 0
    while at < len(document):
        room = capacity - (shown if at else 0)
        spans.append([at, min(at + room, len(document))])
        at = spans[-1][1]
    while len(spans) > 1 and spans[-1][1] - spans[-1][0] < min_piece:
        spans[-1][0] -= 1
        spans[-2][1] -= 1
    segments, targets = [], []
    for first, end in spans:
        before = [] if not first else list(range(first - shown, first) if overflow == "overlap" else range(shown))
        places = before + list(range(first, end))
        follows = [place > 0 and places[place - 1] == t - 1 for place, t in enumerate(places)]
        trained = [place >= len(before) and follows[place] for place in range(len(places))]
        segments.append([document[t] for t in places])
        targets.append([document[t] if yes else -100 for t, yes in zip(places, trained, strict=True)])
    return segments, targets


def mixed(lengths, capacity, max_segments=None):
    """Next fit on documents in their order, then the longest ones left into what is free, one a row and round."""
    sizes = lengths
    bound = max(sum(sizes) / capacity, len(sizes) / (max_segments or len(sizes)))
    enough = bound / 0.999
    if (best := len(best_fit_decreasing(lengths, capacity, max_segments))) > enough:
        enough = 1.005 * best
    sections = cut_evenly(list(range(len(sizes))), max(1, math.ceil(bound) // 64))
    for section in sections:
        fifth = len(section) // 5
        for place in range(fifth):
            late, early = len(section) - fifth + place, 4 * place
            if sizes[section[late]] > capacity / 2 >= sizes[section[early]]:
                section[late], section[early] = section[early], section[late]
    for percent in (100, 90, 80, 65, 40, 0):
        rows_of_sections = cut_evenly(range(math.ceil(bound) * percent // 100), len(sections))
        rows, held = [], []
        for section, share in zip(sections, rows_of_sections, strict=True):
            started = sequential([lengths[document] for document in section], capacity, max_segments)
            rows += [[section[place] for place in row] for row in started[: len(share)]]
            held += [section[place] for row in started[len(share) :] for place in row]
        if percent == 100 and sum(sizes[document] for document in held) > 0.15 * sum(sizes):
            continue
        rows += _in_turns(rows, held, lengths, capacity, max_segments)
        if len(rows) <= enough:
            return rows
    raise AssertionError("the last round is best fit")


def _in_turns(rows, held, lengths, capacity, max_segments):
    """Fill ``rows`` from ``held``, and return the rows of what fits none of them."""

    def choices(row):
        return [d for d in held if fits(row, d, lengths, capacity, max_segments)]

    while any(choices(row) for row in rows):
        for row in sorted(rows, key=lambda row: len(choices(row))):
            if found := choices(row):
                best = max(found, key=lambda d: lengths[d])
                row.append(best)
                held.remove(best)
    rest = best_fit_decreasing([lengths[d] for d in held], capacity, max_segments)
    return [[held[place] for place in row] for row in rest]


def cut_evenly(items, parts):
    """``items`` in consecutive parts whose lengths differ by one at most, the shorter ones first."""
    return [items[part * len(items) // parts : (part + 1) * len(items) // parts] for part in range(parts)]
