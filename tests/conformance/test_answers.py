"""An answer of another form than its method returns is refused with what it is and what it should be."""

import numpy as np
import pytest

from conformance.answers import malformed
from conformance.draws import FULL, AttentionCase, documents
from conformance.judge import Judge, Rejected
from conformance.reference import Reference
from packing_core.errors import PackingError
from packing_core.protocol import Batch, Capabilities

X = np.zeros((1, 4))
IDS = np.ones((1, 4), np.int64)


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("attention", None, "None, not (an output, gradients by name)"),
        ("attention", X, "an array of float64 (1, 4), not (an output, gradients by name)"),
        ("attention", (X, [X]), "a list of 1 in place of gradients by name"),
        ("attention", (X, {"q": X, "k": None}), "None in place of an array for k"),
        ("attention", ("out", {}), "a str in place of an output"),
        ("loss", (1.0, 2.0), "a tuple of 2, not (a loss sum, a weight sum, the gradient of the logits)"),
        ("loss", (1.0, 2.0, None), "None in place of the gradient of the logits"),
        ("shared_gradients", (1.0, {}), "a tuple of 2, not (a mean loss, gradients by name, the number of tokens)"),
        ("train", ([1.0], {"w": "x"}), "a str in place of an array for w"),
        ("forward", (X, {}), "a tuple of 2, not an array of logits"),
        ("plan", [0, 1], "a list of 2, not a list of document numbers for each row"),
        ("collate", {}, "a dict, not a packing_core.protocol.Batch"),
        (
            "collate",
            Batch(IDS, IDS, X, IDS),
            "an array of float64 (1, 4) for position_ids, not a numpy array of integers",
        ),
        (
            "collate",
            Batch(IDS, IDS, IDS, IDS[0]),
            "labels of shape (4,) beside input_ids of shape (1, 4): all four are",
        ),
    ],
)
def test_an_answer_of_another_form_is_explained(method, answer, said):
    assert malformed(method, answer).startswith(said)


def test_right_forms_pass():
    assert malformed("attention", (X, {"q": X})) is None
    assert malformed("plan", [[0, 1], [2]]) is None
    assert malformed("collate", Batch(IDS, IDS, IDS, IDS)) is None
    assert malformed("train", ([1.0], {"w": X})) is None


class Unpaired(Reference):
    """Returns the output alone."""

    def attention(self, *args, **kwargs):
        return super().attention(*args, **kwargs)[0]


def test_a_judge_says_what_came_back_and_where_the_form_is_described():
    judge = Judge(Unpaired(), method="attention", required=True)
    with pytest.raises(
        Rejected, match=r"attention returned an array of .*; see packing_core.protocol.Backend.attention"
    ):
        judge.ask_case(AttentionCase(FULL), "float32")


class Masking(Reference):
    """Masks the first label of the user's own documents."""

    def collate(self, drawn, capacity):
        batch = super().collate(drawn, capacity)
        for document in drawn:
            document.labels[0] = -100
        return batch


def test_arguments_that_changed_are_named():
    judge = Judge(Masking(), method="collate", required=True)
    with pytest.raises(
        Rejected, match=r"collate changed its arguments in place: documents\[0\].labels; work on a copy"
    ):
        judge.collate(documents(5), 16)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"dtypes": ("fp32",)}, "no dtype fp32: declare some of bfloat16, float16, float32"),
        ({"options": {"windows"}}, "no option windows: declare some of adamw, "),
    ],
)
def test_a_declaration_of_something_unknown_is_refused(declared, said):
    with pytest.raises(PackingError, match=said):
        Capabilities(**declared)


def test_options_may_be_any_collection():
    assert Capabilities(options=["window"]).options == {"window"}
