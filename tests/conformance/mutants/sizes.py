"""The table of backends that are right up to a constant and wrong beyond it.

Each row names the requirement and the case that must reject the kind, whatever the constant. `MUTANTS` gets the first
kind of each requirement with its first constant; a test draws others for all of them.
"""

from __future__ import annotations

from conformance import sizes
from tests.conformance.mutants import beyond as kinds
from tests.conformance.mutants.base import MUTANTS
from tests.conformance.mutants.beyond import beyond

TOKENS = (128, 64, 100, 192, 200, 256, 512, 1000, 1024)
DOCUMENTS = (128, 64, 100, 192, 200, 256)
FEW = (16, 4, 8, 10, 17, 32)
WORDS = (200_000, 65_536, 100_000, 128_256, 151_936, 2**17, 262_143)
LONG, ROWS = sizes.LENGTHS, "42 rows"

DOCUMENTS_OF_MODELS, WIDE, DEEP, MANY_WORDS = sizes.MODELS
ON_RANKS, WINDOW_ON_RANKS = sizes.CASES["SIZE-24"]
FOREST = "21 levels and 20 children"

# The requirement and the case that must reject a kind, and its constants.
KINDS = [
    ("SIZE-01", sizes.LENGTHS_OF_DOCUMENTS, kinds.PlansFewDocuments, DOCUMENTS),
    ("SIZE-02", f"{sizes.LENGTHS_OF_DOCUMENTS}, half of them twice", kinds.EqualDocumentsMerged, (1,)),
    ("SIZE-02", f"{sizes.LENGTHS_OF_DOCUMENTS}, half of them twice", kinds.CollatorCuts, TOKENS),
    ("SIZE-02", ROWS, kinds.RowsOfACollator, FEW),
    ("SIZE-03", "40 heads", kinds.HeadsMixed, FEW),
    ("SIZE-04", "a window of 200", kinds.WindowForgotten, (64, 100, 128, 192, 200)),
    ("SIZE-04", "40 key/value heads", kinds.SharedHeadsLimited, FEW),
    ("SIZE-04", "40 heads of a group", beyond("attention", "heads"), FEW),
    ("SIZE-04", "widths 320 and 256", beyond("attention", "widths"), (128, 64, 100, 192, 200)),
    ("SIZE-04", "40 sinks", kinds.SinksLimited, FEW),
    ("SIZE-04", "40 slopes", kinds.SlopesLimited, (4, 8, 10)),  # later slopes are as good as none
    ("SIZE-04", f"{LONG} in both directions", beyond("attention", "tokens"), TOKENS),
    ("SIZE-04", "200 spans, one of 300 tokens", kinds.SpansLimited, (128, 64, 100, 192)),
    ("SIZE-04", "4 ranks", kinds.RingTooShort, (3, 2, 1)),
    ("SIZE-04", "a window over two of them", kinds.RingTooShort, (2, 1)),
    ("SIZE-06", "40 heads of width 256, interleaved", beyond("rope", "heads"), FEW),
    ("SIZE-06", "256 of 320 channels turned", beyond("rope", "widths"), (128, 64, 100, 192, 200, 256)),
    ("SIZE-07", "256 states", kinds.StatesLimited, (128, 64, 100, 192, 200)),
    ("SIZE-08", "beta to 2", kinds.BetaClipped, (1, 1.5, 1.9)),
    ("SIZE-09", "width 256", kinds.StatesLimited, (128, 64, 100, 192, 200)),
    ("SIZE-09", "40 key heads", kinds.SharedHeadsLimited, FEW),
    ("SIZE-09", "40 heads of a group", kinds.GroupsOfScansSmall, FEW),
    ("SIZE-09", f"{LONG} with channel decays", kinds.StatesLost, TOKENS),
    ("SIZE-09", "40 normalised heads", beyond("delta_rule", "heads"), FEW),
    ("SIZE-10", "40 groups", kinds.SharedHeadsLimited, FEW),
    ("SIZE-10", "40 heads of a group", kinds.GroupsOfScansSmall, FEW),
    ("SIZE-10", "256 states", kinds.StatesLimited, (128, 64, 100, 192, 200)),
    ("SIZE-12", "width 2", kinds.OneConvolutionWrong, (2,)),
    ("SIZE-12", "width 3", kinds.OneConvolutionWrong, (3,)),
    ("SIZE-14", "3,250 tokens of an expert", kinds.ExpertsDropTokens, TOKENS),
    ("SIZE-14", "40 experts", kinds.ExpertsNotRun, FEW),
    ("SIZE-14", "40 choices", kinds.ChoicesLimited, FEW),
    ("SIZE-14", "widths 256 and 300", kinds.InnerWidthLimited, (128, 64, 100, 192, 200, 256)),
    ("SIZE-15", "40 biased experts", kinds.ExpertsNotRun, FEW),
    ("SIZE-15", "40 experts without gates", kinds.ExpertsNotRun, FEW),
    ("SIZE-16", LONG, kinds.LabelsLimited, TOKENS),
    ("SIZE-16", LONG, kinds.ChunksWithoutTheTail, (512, *TOKENS)),
    ("SIZE-16", ROWS, kinds.LabelsLimited, (20, 32)),  # documents and tokens of a row are fewer
    ("SIZE-16", "262,144 words", kinds.WordsWrap, WORDS),
    ("SIZE-17", "negative weights and zeros", kinds.WeightsBelowZeroAreNone, (0,)),
    ("SIZE-17", "negative weights and zeros", kinds.ZerosWeighOne, (0,)),
    ("SIZE-17", f"{LONG} of them", kinds.LabelsLimited, TOKENS),
    ("SIZE-18", LONG, beyond("reduce", "rows"), DOCUMENTS),
    ("SIZE-18", LONG, kinds.ReductionsOfFewTokens, TOKENS),
    ("SIZE-18", ROWS, kinds.ReductionsOfFewPieces, FEW),
    ("SIZE-18", "84 pieces of a document", kinds.ReductionsOfFewPieces, (*FEW, 64)),
    ("SIZE-20", "a window of 200", kinds.WindowForgotten, (64, 100, 128, 192, 200)),
    ("SIZE-23", "a prompt of 1,100 tokens", kinds.TreePositionsEnd, TOKENS),
    ("SIZE-23", "40 answers", kinds.AnswersLost, FEW),
    ("SIZE-23", "8 levels", kinds.LevelsOfATreeMerged, (4, 2, 3, 5, 7)),
    ("SIZE-23", "equal answers", kinds.EqualDocumentsMerged, (1,)),
    ("SIZE-23", "targets in what is shared", kinds.SharedTargetsLost, (24, 8, 16)),
    ("SIZE-24", ON_RANKS, kinds.RingTooShort, (3, 2, 1)),
    ("SIZE-24", ON_RANKS, kinds.CutDocumentsMerged, DOCUMENTS),
    ("SIZE-24", WINDOW_ON_RANKS, kinds.RingTooShort, (3, 2, 1)),
    ("SIZE-24", WINDOW_ON_RANKS, kinds.WindowForgotten, (64, 100, 128, 192, 200)),
    ("SIZE-25", sizes.LENGTHS_OF_DOCUMENTS, kinds.CollatorCuts, TOKENS),
    ("SIZE-25", sizes.LENGTHS_OF_DOCUMENTS, kinds.ModelSegmentsEnd, DOCUMENTS),
    ("SIZE-25", "42 microbatches, most of equal documents", kinds.TrainsFewMicrobatches, FEW),
    ("SIZE-26", "4 ranks", kinds.RanksLeftOut, (3, 2, 1)),
    ("SIZE-27", "150 pairs", kinds.PairsDropped, (64, 100, 128)),
    ("SIZE-27", "1,100 tokens", kinds.ModelPositionsEnd, TOKENS),
    ("SIZE-27", "42 microbatches, most of equal pairs, beta 2", kinds.EqualPairsMerged, (1, *FEW)),
    ("SIZE-27", "42 microbatches, most of equal pairs, beta 2", kinds.PairsOfFewMicrobatches, FEW),
    ("SIZE-27", "42 microbatches, most of equal pairs, beta 2", kinds.BetaClipped, (1, 1.5)),
    ("SIZE-27", "equal answers", kinds.EqualAnswersDropped, (1,)),
    ("SIZE-28", sizes.LENGTHS_OF_DOCUMENTS, beyond("embed", "rows"), DOCUMENTS),
    ("SIZE-28", sizes.LENGTHS_OF_DOCUMENTS, kinds.PooledDocumentsCut, TOKENS),
    ("SIZE-29", LONG, beyond("index_loss", "rows"), DOCUMENTS),
    *(("SIZE-29", LONG, beyond("index_loss", "tokens", x), TOKENS) for x in ("index_q", "index_k", "index_weights")),
    ("SIZE-29", ROWS, beyond("index_loss", "rows", "index_k"), (20, 32)),
    ("SIZE-29", "a choice of 300 keys", kinds.ChoicesOfFewKeys, (256, 64, 128, 200)),
    ("SIZE-30", "1,100 frames and 301 clips", beyond("clips", "rows"), TOKENS),
    ("SIZE-30", "1,100 frames and 301 clips", beyond("clips", "rows", "features"), DOCUMENTS),
    ("SIZE-30", "300 channels", beyond("clips", "heads", "features"), DOCUMENTS),
]
for _name in ("SIZE-19", "SIZE-21", "SIZE-22"):
    KINDS += [
        (_name, DOCUMENTS_OF_MODELS, kinds.ModelPositionsEnd, TOKENS),
        (_name, DOCUMENTS_OF_MODELS, kinds.ModelSegmentsEnd, DOCUMENTS),
        (_name, WIDE, kinds.HeadsMixed, FEW),
        (_name, DEEP, kinds.EqualDocumentsMerged, (1,)),
        (_name, DEEP, kinds.RowsOfACollator, FEW),
        (_name, DEEP, kinds.LayersSkipped, (2, 4, 8, 10, 11)),
        (_name, MANY_WORDS, kinds.WordsWrap, WORDS[:-1]),
    ]
for _name in ("SIZE-09", "SIZE-11", "SIZE-13"):
    KINDS += [(_name, FOREST, kind, (16, 4, 8, 10, 17)) for kind in (kinds.LevelsLimited, kinds.ChildrenLimited)]
_OPERATIONS = {
    "attention": ("SIZE-03", "q"),
    "rope": ("SIZE-05", "x"),
    "scan": ("SIZE-07", "x"),
    "delta_rule": ("SIZE-08", "v"),
    "ssd": ("SIZE-10", "x"),
    "convolution": ("SIZE-12", "x"),
    "experts": ("SIZE-14", "x"),
}
_LABELS = {
    ("rope", "heads"): "40 heads of width 256",
    ("rope", "widths"): "40 heads of width 256",
    ("delta_rule", "heads"): "40 heads",
    ("ssd", "widths"): "width 256",
    ("scan", "heads"): "300 channels",
    ("convolution", "heads"): "300 channels",
    ("experts", "heads"): "widths 256 and 300",
}
for _method, (_name, _gradient) in _OPERATIONS.items():
    _long = "3,250 tokens of an expert" if _method == "experts" else LONG
    for _result in ("out", _gradient):
        KINDS.append((_name, _long, beyond(_method, "tokens", _result), TOKENS))
        KINDS.append((_name, ROWS, beyond(_method, "rows", _result), (20, 32)))
        KINDS += [] if _method == "rope" else [(_name, _long, beyond(_method, "documents", _result), DOCUMENTS)]
        for (_of, _size), _label in _LABELS.items():
            if _of == _method:
                limits = FEW if "heads" in _label else (128, 64, 100, 192, 200)
                KINDS.append((_name, _label, beyond(_method, _size, _result), limits))
    if _method in ("attention", "scan", "delta_rule", "ssd", "convolution"):
        KINDS.append((_name, LONG, kinds.SegmentAtLimitSeesItsPredecessor, TOKENS))
    if _method in ("scan", "delta_rule", "ssd", "convolution"):
        KINDS.append((_name, LONG, kinds.StatesLost, TOKENS))


def holding(kind, limit, requirement=None):
    """Returns the backend of a kind with this constant."""
    name = f"{kind.__name__}_{limit}_{requirement}".replace(".", "_").replace("-", "_")
    return type(name, (kind,), {"limit": limit, "__doc__": kind.__doc__}, rejected_by=requirement)


for _name, _, _kind, _constants in KINDS:  # one of each requirement
    if _name not in {mutant.rejected_by for mutant in MUTANTS.values()}:
        holding(_kind, _constants[0], _name)
