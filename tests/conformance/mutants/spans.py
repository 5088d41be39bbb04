"""Wrong spans: tokens that should see one another in both directions, and do not, or that see others."""

from __future__ import annotations

import numpy as np

from tests.conformance.mutants.attention import Around
from tests.conformance.mutants.base import Mutant


class SpanSeesTheNextImage(Mutant, rejected_by="SPAN-01"):
    """Spans side by side in a segment are one."""

    def ahead_in_span(self, segment_ids, spans):
        return super().ahead_in_span(segment_ids, np.where(spans >= 0, 0, -1))


class SpanStaysCausal(Mutant, rejected_by="SPAN-01"):
    """Spans are accepted and left out."""

    def ahead_in_span(self, segment_ids, spans):
        return super().ahead_in_span(segment_ids, np.full_like(spans, -1))


class TokensBesideSpansSeeAhead(Mutant, rejected_by="SPAN-02"):
    """The tokens that are in no span of a segment are a span, too."""

    def ahead_in_span(self, segment_ids, spans):
        return super().ahead_in_span(segment_ids, np.where(spans < 0, spans.max(initial=0) + 1, spans))


class GradientOfSpansCausal(Around, rejected_by="SPAN-02"):
    """The forward is right, and the gradient of k at the end of a span lacks the queries before it."""

    def arguments(self, arrays, options):
        self.spans = options.get("spans")

    def found(self, gradients, segment_ids):
        if self.spans is not None:
            ends = (self.spans >= 0) & (self.spans != np.roll(self.spans, -1, axis=1))
            gradients["k"][ends] *= 0.5


class SpanAcrossDocuments(Mutant, rejected_by="SPAN-03"):
    """Tokens of one span's number see each other although a boundary stands between them."""

    def ahead_in_span(self, segment_ids, spans):
        return super().ahead_in_span((segment_ids > 0).astype(segment_ids.dtype), spans)
