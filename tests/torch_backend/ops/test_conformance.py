"""The conformance adapter: who takes part here, what is declared, and that what is not declared is refused.

That the declared is right is what ``pytest conformance --backend torch`` tests.
"""

import dataclasses

import numpy as np
import pytest
import torch

from conformance import sizes
from conformance.judge import Judge
from packing_core.errors import UnsupportedError
from packing_core.protocol import ALL_OPTIONS, LEVELS, Document
from torch_backend.collate import with_boundaries
from torch_backend.conformance import backends, capabilities
from torch_backend.ops import operators
from torch_backend.ops.attention import IMPLEMENTATIONS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIBRARIES = ["flash2", "flash3", "flash4", "varlen", "xformers"]


def test_every_implementation_is_offered():
    assert backends().keys() == IMPLEMENTATIONS.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("name", [*LIBRARIES, "flex"])
def test_what_cannot_run_here_says_why(name):
    with pytest.raises(UnsupportedError, match="runs on CUDA, not on cpu|no backward on the CPU"):
        backends()[name]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_how_triton_runs_without_a_gpu_is_said(monkeypatch):
    monkeypatch.setattr(operators, "INTERPRETED", False)
    with pytest.raises(
        UnsupportedError, match="needs Triton and a GPU.*TRITON_INTERPRET=1 runs its kernels on the CPU"
    ):
        backends()["triton"]()


def test_interpreted_triton_declares_no_bfloat16(monkeypatch):
    monkeypatch.setattr(operators, "INTERPRETED", True)
    declared = capabilities("triton", CPU)
    assert declared.interpreted and declared.dtypes == ("float32", "float16")


def test_sdpa_takes_part_at_every_level_and_the_others_where_attention_matters():
    sdpa, reference = backends()["sdpa"](), backends()["reference"]()
    assert all(sdpa.provides(method) for methods in LEVELS.values() for method in methods)
    assert {method for methods in LEVELS.values() for method in methods if reference.provides(method)} == {
        "attention",
        "forward",
        "gradients",
        "index_loss",
        "shared_gradients",
    }


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("flash4", {"alibi", "narrow_values"}),
        ("flash2", {"sinks", "narrow_values"}),
        ("varlen", {"softcap", "sinks", "alibi", "narrow_values"}),
        ("xformers", {"bidirectional", "softcap", "sinks", "alibi", "narrow_values"}),  # its windows are causal
        ("flex", set()),
        ("sdpa", set()),
        ("reference", set()),
    ],
)
def test_what_is_declared_on_a_gpu_is_what_the_implementation_says_of_itself(name, lacks):
    options = {"bidirectional", "window", "softcap", "sinks", "alibi", "gqa", "narrow_values"}
    declared = capabilities(name, CUDA)
    assert options - declared.options == lacks
    assert set(declared.dtypes) >= {"bfloat16", "float16"}
    assert ("float32" in declared.dtypes) == (name in {"sdpa", "reference"})
    assert declared.atomic_backward == (name not in {"flex", "reference"})
    assert (100 in declared.head_dims) == (name in {"flex", "sdpa", "reference"})


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS.keys() - {"triton"}))
def test_everything_but_what_is_named_is_declared(name, device):
    """A backend that declared less would be judged by fewer tests, and pass."""
    of_attention = {"bidirectional", "window", "softcap", "sinks", "alibi", "gqa", "narrow_values", "sliding_window"}
    library = set() if name in {"sdpa", "reference"} else {"nonfinite_padding", "shared_prefixes"}
    one_way = {"both_ways"} if library and (name, device) != ("flex", CUDA) else set()
    lacks = {"context_parallel"} | library | one_way | ({"cut_documents"} if device == CUDA else set())
    lacks |= set() if name == "sdpa" else {"selected_keys", "selected_blocks"}
    assert ALL_OPTIONS - capabilities(name, device).options - of_attention == lacks - of_attention


def test_what_is_not_declared_is_refused():
    sdpa = backends()["sdpa"]()
    q = np.zeros((1, 4, 2, 16), np.float32)
    ids = np.ones((1, 4), np.int64)
    with pytest.raises(UnsupportedError, match="float8"):
        sdpa.attention(q, q, q, ids, dtype="float8")


def test_gradients_of_a_deep_model_in_bfloat16_are_within_budget():
    """Three first tokens make the largest one, where the errors of one rounded run happen to cancel."""
    judge = Judge(backends()["reference"](), method="gradients", required=True)
    judge.backend.capabilities = dataclasses.replace(judge.backend.capabilities, dtypes=("bfloat16",))
    sizes.check_gradients(judge, sizes.MODELS["12 layers and 42 rows, two of equal documents"])


def test_collated_padding_is_padding_and_no_segment():
    documents = [Document(np.arange(n) + 1, np.arange(n) + 1) for n in (5, 3, 6)]
    batch = backends()["sdpa"]().collate(documents, 8)  # into which 5 and 3 go together, in either order, and 6 alone
    rows = sorted(map(tuple, batch.segment_ids.tolist()), key=lambda row: row.count(0))
    assert rows[0] in [(1,) * 5 + (2,) * 3, (1,) * 3 + (2,) * 5] and rows[1] == (1,) * 6 + (0,) * 2
    assert (batch.labels[batch.segment_ids == 0] == -100).all()
    assert "real" not in batch.native


def test_labels_that_stand_at_padding_are_no_targets():
    ids = torch.tensor([[1, 1, 0, 0, 2, 2, 2]])
    batch = {"input_ids": ids, "labels": torch.tensor([[1, 8, 9, 9, 2, 5, 6]])}  # first tokens are their own labels
    for marks in ({"segment_ids": ids}, {"attention_mask": ids}):
        labels = with_boundaries(lambda batch: batch)({**batch, **marks})["labels"]
        assert labels.tolist() == [[-100, 8, -100, -100, -100, 5, 6]]
