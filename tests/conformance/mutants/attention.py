"""Wrong attention kernels."""

from __future__ import annotations

import numpy as np

from conformance.draws import round_to
from packing_core.protocol import ALL_OPTIONS, Capabilities, position_ids, segments
from tests.conformance.mutants.base import Mutant, padding_joined, rows_alike, starts

# -- which keys a query sees -----------------------------------------------------------------------------------------


class MaskLeaksOneToken(Mutant, rejected_by="ISO-01"):
    """The first token of a segment sees the last token of the one before."""

    def visible(self, segment_ids, causal, window):
        seen = super().visible(segment_ids, causal, window)
        row, t = np.nonzero(starts(segment_ids)[:, 1:] & (segment_ids[:, 1:] > 0) & (segment_ids[:, :-1] > 0))
        seen[row, t + 1, t] = True
        return seen


class LeaksPast64Segments(Mutant, rejected_by="ISO-03"):
    """All segments from the 64th on are one."""

    def visible(self, segment_ids, causal, window):
        return super().visible(np.minimum(segment_ids, 64), causal, window)


class RowsShareBoundaries(Mutant, rejected_by="ISO-04"):
    """Every row of a batch is cut where the first one is."""

    def visible(self, segment_ids, causal, window):
        return super().visible(rows_alike(segment_ids), causal, window)


class LastSegmentStartsLate(Mutant, rejected_by="MASK-01"):
    """The last boundary of a row is off by one: a token of the last segment belongs to the one before."""

    def visible(self, segment_ids, causal, window):
        ids = segment_ids.copy()
        for row in range(len(ids)):
            own = [place for place in segments(segment_ids) if place[0] == row]
            if len(own) > 1:
                ids[row, own[-1][1]] = ids[row, own[-2][1]]
        return super().visible(ids, causal, window)


class WindowOffByOne(Mutant, rejected_by="MASK-02"):
    """A window of W shows W keys and the query's own."""

    def visible(self, segment_ids, causal, window):
        return super().visible(segment_ids, causal, None if window is None else window + 1)


class WindowAcrossBoundary(Mutant, rejected_by="MASK-03"):
    """A window replaces the document mask."""

    def visible(self, segment_ids, causal, window):
        return super().visible(segment_ids if window is None else 1 * (segment_ids > 0), causal, window)


class AlwaysCausal(Mutant, rejected_by="MASK-10"):
    """Bidirectional attention is causal all the same."""

    def visible(self, segment_ids, causal, window):
        return super().visible(segment_ids, True, window)


class WindowLooksBack(Mutant, rejected_by="MASK-15"):
    """Under a window, bidirectional attention shows the keys before the query alone."""

    def visible(self, segment_ids, causal, window):
        return super().visible(segment_ids, causal or window is not None, window)


class WindowHalvedBothWays(Mutant, rejected_by="MASK-15"):
    """A window of W shows W keys in all, half of them on either side, as some libraries count."""

    def visible(self, segment_ids, causal, window):
        return super().visible(segment_ids, causal, window if causal or window is None else (window + 1) // 2)


class PaddingAttended(Mutant, rejected_by="PAD-04"):
    """Padding belongs to the segment after it, which attends to it."""

    def visible(self, segment_ids, causal, window):
        return super().visible(padding_joined(segment_ids), causal, window)


class SegmentsCappedAt256(Mutant, rejected_by="SHAPE-02"):
    """A table of 256 segments: what comes later shares its last entry."""

    def visible(self, segment_ids, causal, window):
        return super().visible(np.minimum(segment_ids, 256), causal, window)


class TileBoundaryKeyLost(Mutant, rejected_by="SHAPE-05"):
    """The first key of every further tile of 64 keys is skipped, but for the query that stands there."""

    def visible(self, segment_ids, causal, window):
        place = position_ids(segment_ids)
        skipped = (place > 0) & (place % 64 == 0)
        own = np.eye(segment_ids.shape[1], dtype=bool)
        return super().visible(segment_ids, causal, window) & (~skipped[:, None, :] | own)


class LastPartialTileLost(Mutant, rejected_by="SHAPE-07"):
    """Keys in the row's last, partial tile of 16 are never loaded, but for the query's own."""

    def visible(self, segment_ids, causal, window):
        width = segment_ids.shape[1]
        loaded = np.arange(width) < width // 16 * 16
        return super().visible(segment_ids, causal, window) & (loaded | np.eye(width, dtype=bool))


# -- what happens to scores and values -------------------------------------------------------------------------------


class SoftcapBeforeScale(Mutant, rejected_by="MASK-04"):
    """Scores are capped first and scaled after."""

    def capped(self, z, scale, softcap):
        if softcap is None:
            return super().capped(z, scale, softcap)
        tanh = np.tanh(z / softcap)
        return tanh * softcap * scale, (1 - tanh**2) * scale


class SoftcapIgnoredUndeclared(Mutant, rejected_by="MASK-04"):
    """Softcap is not declared, and is ignored instead of refused."""

    capabilities = Capabilities(options=ALL_OPTIONS - {"softcap"})

    def capped(self, z, scale, softcap):
        return super().capped(z, scale, None)


class Bfloat16Answers(Mutant, rejected_by="DTYPE-01"):
    """Answers are rounded to bfloat16 for every requested dtype."""

    def attention(self, *args, **kwargs):
        out, gradients = super().attention(*args, **kwargs)
        return round_to("bfloat16", out), gradients


class ScoresClamped(Mutant, rejected_by="DTYPE-04"):
    """Scores are clamped at 80 so that exp does not overflow."""

    def capped(self, z, scale, softcap):
        capped, derivative = super().capped(z, scale, softcap)
        return np.clip(capped, -80, 80), derivative


class KvHeadsInterleaved(Mutant, rejected_by="MASK-07"):
    """Query head h reads key/value head h % K."""

    def kv_head(self, heads, kv_heads):
        return np.arange(heads) % kv_heads


class Bfloat16Accumulator(Mutant, rejected_by="DTYPE-03"):
    """Values are added up key by key in a bfloat16 accumulator."""

    def weigh(self, p, v):
        total = np.zeros(p.shape[:-1] + v.shape[-1:])
        for key in range(p.shape[-1]):
            total = round_to("bfloat16", total + p[..., key, None] * v[..., key, None, :]).astype(np.float64)
        return total


class GqaGradientNotSummed(Mutant, rejected_by="GRAD-05"):
    """Keeps the gradient of the last query head alone among those that read one key/value head."""

    @staticmethod
    def _sum_groups(x, kv, kv_heads):
        kept = np.zeros((x.shape[0], x.shape[2], kv_heads, x.shape[3]))
        for head, group in enumerate(kv):
            kept[:, :, group] = x[:, head]
        return kept


class Around(Mutant):
    """Changes the arguments, the output or the gradients of the right attention."""

    def arguments(self, arrays, options):
        """Exchange q, k, v or options."""

    def output(self, out, segment_ids):
        return out

    def found(self, gradients, segment_ids):
        """Change gradients in place."""

    def _attend(self, q, k, v, segment_ids, **options):
        arrays = {"q": q, "k": k, "v": v}
        self.arguments(arrays, options)
        out, right = super()._attend(arrays["q"], arrays["k"], arrays["v"], segment_ids, **options)

        def backward(dout):
            gradients = right(dout)
            self.found(gradients, segment_ids)
            return gradients

        return self.output(out, segment_ids), backward


class SinksIgnored(Around, rejected_by="MASK-05"):
    """Sinks are accepted and left out."""

    def arguments(self, arrays, options):
        options["sinks"] = None


class AlibiSlopesReversed(Around, rejected_by="MASK-06"):
    """The heads take each other's slopes."""

    def arguments(self, arrays, options):
        if options.get("alibi_slopes") is not None:
            options["alibi_slopes"] = options["alibi_slopes"][::-1]


class OneKvHeadOneQueryHead(Around, rejected_by="MASK-08"):
    """With one key/value head, all query heads are the first."""

    def arguments(self, arrays, options):
        if arrays["k"].shape[2] == 1 and arrays["q"].shape[2] > 1:
            arrays["q"] = np.broadcast_to(arrays["q"][:, :, :1], arrays["q"].shape)


class NarrowValuesReversed(Around, rejected_by="MASK-09"):
    """Values narrower than keys are read from the wrong end."""

    def arguments(self, arrays, options):
        if arrays["v"].shape[3] < arrays["q"].shape[3]:
            arrays["v"] = arrays["v"][..., ::-1]


class ScaleIgnored(Around, rejected_by="MASK-11"):
    """A given scale is ignored."""

    def arguments(self, arrays, options):
        options["scale"] = None


class HeadDimCutAt256(Around, rejected_by="SHAPE-06"):
    """Channels beyond the 256th are not loaded."""

    def arguments(self, arrays, options):
        width = arrays["q"].shape[3]
        options["scale"] = width**-0.5 if options.get("scale") is None else options["scale"]
        arrays["q"] = np.where(np.arange(width) < 256, arrays["q"], 0.0)


class OneTokenDocumentsSkipped(Around, rejected_by="SHAPE-01"):
    """Documents of one token are not computed."""

    def output(self, out, segment_ids):
        for row, start, stop in segments(segment_ids):
            if stop - start == 1:
                out[row, start] = 0.0
        return out


class SegmentsCutAt90Tokens(Around, rejected_by="SHAPE-03"):
    """A segment's tokens beyond the 90th are left unwritten."""

    def output(self, out, segment_ids):
        out[(position_ids(segment_ids) >= 90) & (segment_ids > 0)] = 0.0
        return out


class PaddingIsNaN(Around, rejected_by="PAD-02"):
    """Outputs at padding are 0 / 0."""

    def output(self, out, segment_ids):
        out[segment_ids == 0] = np.nan
        return out


class TailUnwritten(Around, rejected_by="SHAPE-04"):
    """Padding beyond the length of the longest segment is left as the memory was."""

    def output(self, out, segment_ids):
        longest = max((stop - start for _, start, stop in segments(segment_ids)), default=0)
        out[(segment_ids == 0) & (position_ids(segment_ids) >= longest)] = np.nan
        return out


class EmptyRowIsNaN(Around, rejected_by="SHAPE-08"):
    """A row without a segment is divided by its number of tokens."""

    def output(self, out, segment_ids):
        out[~(segment_ids > 0).any(axis=1)] = np.nan
        return out


class LastSegmentBesidePaddingLate(Around, rejected_by="REP-01"):
    """The last segment of several rows with padding is written one token late."""

    def output(self, out, segment_ids):
        if (segment_ids == 0).any() and len(segment_ids) > 1:
            row, start, stop = segments(segment_ids)[-1]
            out[row, start:stop] = np.roll(out[row, start:stop], 1, axis=0)
        return out


class PaddingDilutesOutputs(Around, rejected_by="PAD-01"):
    """The scale of a row's output is its share of real tokens."""

    def output(self, out, segment_ids):
        share = out * (segment_ids > 0).mean(axis=1)[:, None, None, None]
        return share


class SoftcapLeaks(Around, rejected_by="ISO-05"):
    """With a softcap, a millionth of the largest value of the batch reaches every output."""

    def arguments(self, arrays, options):
        if options.get("softcap") is not None:
            arrays["v"] = arrays["v"] + 1e-6 * np.abs(arrays["v"]).max()


class SinksSwitchOffTheWindow(Around, rejected_by="MASK-12"):
    """A window is ignored when there are sinks."""

    def arguments(self, arrays, options):
        if options.get("sinks") is not None:
            options["window"] = None


class AlibiTooSteep(Around, rejected_by="DTYPE-02"):
    """ALiBi slopes are off by a tenth."""

    def arguments(self, arrays, options):
        if options.get("alibi_slopes") is not None:
            options["alibi_slopes"] = options["alibi_slopes"] * 1.1


class AnswersDrift(Around, rejected_by="DET-01"):
    """Every call differs from the one before in the last bits."""

    calls = 0

    def output(self, out, segment_ids):
        self.calls += 1
        return out * (1 + 1e-7 * self.calls)


# -- gradients -------------------------------------------------------------------------------------------------------


class GradientCrossesBoundary(Around, rejected_by="ISO-02"):
    """The forward is right, and the gradient of v at a segment's last token takes in a little of the next segment's."""

    def found(self, gradients, segment_ids):
        row, t = np.nonzero(starts(segment_ids)[:, 1:])
        gradients["v"][row, t] += 1e-3 * gradients["v"][row, t + 1]


class GradientOfQDetached(Around, rejected_by="GRAD-01"):
    """No gradient reaches q."""

    def found(self, gradients, segment_ids):
        gradients["q"] *= 0.0


class GradientOfKUnscaled(Around, rejected_by="GRAD-02"):
    """The gradient of v is right, and that of k lacks the scale."""

    def found(self, gradients, segment_ids):
        gradients["k"] *= gradients["k"].shape[-1] ** 0.5


class GradientOfVTransposed(Around, rejected_by="GRAD-03"):
    """Two channels of the gradient of v are exchanged."""

    def found(self, gradients, segment_ids):
        gradients["v"][..., [0, 1]] = gradients["v"][..., [1, 0]]


class GradientOfSinksNegated(Around, rejected_by="GRAD-04"):
    """The gradient of the sinks has the wrong sign."""

    def found(self, gradients, segment_ids):
        if "sinks" in gradients:
            gradients["sinks"] *= -1.0


class GradientAtPadding(Around, rejected_by="PAD-03"):
    """Padding gets a gradient."""

    def found(self, gradients, segment_ids):
        gradients["v"][segment_ids == 0] = 1e-6
