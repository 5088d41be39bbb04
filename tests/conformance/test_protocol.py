"""The protocol's helpers agree with the golden layouts, and a backend that overrides nothing refuses everything."""

import inspect

import numpy as np
import pytest

from conformance.golden import golden
from packing_core.errors import UnsupportedError
from packing_core.protocol import (
    ALL_OPTIONS,
    LEVELS,
    Backend,
    Capabilities,
    attention_options,
    cu_seqlens,
    position_ids,
    require_declared,
    segments,
)

METHODS = [method for level in LEVELS.values() for method in level]
POSITIONS = [pytest.param(case, id=case["name"]) for case in golden("positions")]


@pytest.mark.parametrize("case", POSITIONS)
def test_positions_and_segments_of_golden_layouts(case):
    ids = np.array(case["segment_ids"])
    real = ids > 0
    np.testing.assert_array_equal(position_ids(ids)[real], np.array(case["position_ids"])[real])
    assert [list(place) for place in segments(ids)] == case["segments"]


def test_padding_is_a_segment_of_the_flat_boundaries_and_rows_always_end_one():
    ids = np.array([[0, 1, 1, 2], [2, 2, 0, 0]])
    bounds = cu_seqlens(ids)
    assert bounds.dtype == np.int32
    assert bounds.tolist() == [0, 1, 3, 4, 6, 8]
    assert segments(ids) == [(0, 1, 3), (0, 3, 4), (1, 0, 2)]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_left_alone_refuses_and_says_what_to_do(method):
    parameters = inspect.signature(getattr(Backend, method)).parameters.values()
    positional = [None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    with pytest.raises(UnsupportedError, match=f"Backend has no {method}: override it to take part"):
        getattr(Backend(), method)(*positional, **named)
    assert not Backend.provides(method)


def test_attention_options_are_named_by_shapes_and_arguments():
    q, k, v = np.zeros((1, 4, 4, 8)), np.zeros((1, 4, 2, 8)), np.zeros((1, 4, 2, 6))
    assert attention_options(q, q, q) == set()
    assert attention_options(q, k, v) == {"gqa", "narrow_values"}
    given = {"causal": False, "window": 3, "softcap": 1.0, "sinks": np.zeros(4), "alibi_slopes": np.zeros(4)}
    assert attention_options(q, q, q, **given, dtype="float32") == {
        "bidirectional",
        "window",
        "softcap",
        "sinks",
        "alibi",
    }


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"dtype": "float32", "options": {"window"}, "head_dim": 64}, None),
        ({"dtype": "float16"}, "dtype float16 is not declared, only float32"),
        ({"options": {"sinks", "window", "alibi"}}, "alibi, sinks not declared"),
        ({"head_dim": 65}, "head_dim 65 is not declared, only range(8, 65, 8)"),
        ({"dtype": "float64"}, "dtype float64 is not declared, only float32"),
    ],
)
def test_refusals(request_, reason):
    class Stack(Backend):
        capabilities = Capabilities(("float32",), ALL_OPTIONS - {"sinks", "alibi"}, range(8, 65, 8))

    assert Stack.capabilities.refusal(**request_) == reason
    if reason is None:
        require_declared(Stack(), **request_)
    else:
        with pytest.raises(UnsupportedError) as caught:
            require_declared(Stack(), **request_)
        assert str(caught.value) == f"Stack: {reason}"


def test_a_model_of_its_own_also_serves_its_oracle():
    assert Capabilities(("bfloat16",), own_model=True).refusal(dtype="float64") is None
