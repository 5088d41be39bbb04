"""Packing by the textbook, one document and one row at a time: what the planner is compared with. Slow and plain.

Nothing here imports the planner. Rows come out in the order in which they were opened, as lists of document ids in the
order in which they were placed; documents of equal length are taken in the order of their ids.
"""


def best_fit_decreasing(lengths, capacity, max_segments=None, alignment=1):
    """Longest first, each into the fullest row that takes it: fewest segments, then earliest opened among equals."""
    return _decreasing(lengths, capacity, max_segments, alignment, lambda free, segments, row: (free, segments, row))


def first_fit_decreasing(lengths, capacity, max_segments=None, alignment=1):
    """Longest first, each into the earliest opened row that takes it."""
    return _decreasing(lengths, capacity, max_segments, alignment, lambda free, segments, row: row)


def next_fit(lengths, capacity, max_segments=None, alignment=1):
    """In order; the row is closed as soon as a document does not fit."""
    rows = []
    for document in range(len(lengths)):
        if not rows or not fits(rows[-1], document, lengths, capacity, max_segments, alignment):
            rows.append([])
        rows[-1].append(document)
    return rows


def fits(row, document, lengths, capacity, max_segments=None, alignment=1):
    """Whether ``document`` can stand in ``row`` after what is there already."""
    if max_segments is not None and len(row) == max_segments:
        return False
    return tokens_taken(row, lengths, alignment) + lengths[document] <= capacity


def tokens_taken(row, lengths, alignment=1):
    """Where the next document of a row would start: each one starts at a multiple of ``alignment``."""
    at = 0
    for document in row:
        at += lengths[document]
        while at % alignment:
            at += 1
    return at


def _decreasing(lengths, capacity, max_segments, alignment, preference):
    rows = []
    rounded = [tokens_taken([document], lengths, alignment) for document in range(len(lengths))]
    for document in sorted(range(len(lengths)), key=lambda d: -rounded[d]):
        best = None
        for number, row in enumerate(rows):
            if fits(row, document, lengths, capacity, max_segments, alignment):
                key = preference(capacity - tokens_taken(row, lengths, alignment), len(row), number)
                if best is None or key < best[0]:
                    best = key, row
        if best is None:
            rows.append([document])
        else:
            best[1].append(document)
    return rows
