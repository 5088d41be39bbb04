"""CUT: documents that are cut over the ranks of a context-parallel group."""

from __future__ import annotations

import pytest

from conformance import whole_models
from conformance.draws import ONE_LAYER, documents, untrained
from conformance.judge import Judge
from packing_core.protocol import DTYPES, DecoderConfig

requirement = pytest.mark.requirement


@requirement("CUT-01")
@pytest.mark.parametrize("ranks", [2, 3], ids="{} ranks".format)
def test_documents_over_several_ranks(judge: Judge, ranks: int) -> None:
    # the shares of two ranks end inside the document of 70; on three it has pieces on all of them
    short, long, *others = documents(9, 70, 1, 14, seed=3)
    whole_models.check_cut(judge, [short, long, *others], ranks)
    long.labels[:65] = -100  # the first rank has no target
    whole_models.check_cut(judge, [untrained(short), long, *others], ranks)


@requirement("CUT-02")
def test_windows_over_several_ranks(judge: Judge) -> None:
    whole_models.check_cut(judge, documents(5, 60, 17, seed=4), 2, DecoderConfig(sliding_window=8))


@requirement("CUT-03")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cut_documents_in_every_dtype(judge: Judge, dtype: str) -> None:
    whole_models.check_cut(judge, documents(9, 50, 1, 14, seed=3), 3, ONE_LAYER, dtype=dtype)
