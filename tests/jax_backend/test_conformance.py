"""Offers, declarations and refusals of the JAX conformance adapter; the suite judges whether it is right."""

import sys

import jax
import numpy as np
import pytest

from conformance.draws import DecoderCase, documents
from jax_backend.attention import IMPLEMENTATIONS
from jax_backend.conformance import JaxStack, _train, backends, capabilities
from jax_backend.conformance.reductions import arithmetic
from jax_backend.training.train_step import TrainStep
from packing_core.errors import UnsupportedError
from packing_core.protocol import ALL_OPTIONS, LEVELS, DecoderConfig
from tests import processes


def offered_methods(name):
    backend = backends()[name]()
    return {method for methods in LEVELS.values() for method in methods if backend.provides(method)}


def test_every_implementation_is_offered():
    assert backends().keys() == IMPLEMENTATIONS.keys()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without an accelerator")
def test_what_cannot_run_here_says_why():
    with pytest.raises(UnsupportedError, match="cuDNN needs an NVIDIA GPU, and JAX runs on cpu here"):
        backends()["cudnn"]()


def test_xla_takes_part_at_every_level_and_the_others_where_attention_matters():
    methods = {method for methods in LEVELS.values() for method in methods}
    lacks = {"clips", "embed", "experts", "index_loss", "shared_gradients", "context_gradients"}
    assert offered_methods("xla") == methods - lacks
    assert offered_methods("chunked") == {"attention", "forward", "gradients"}


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("xla", {"alibi"}),
        ("chunked", {"alibi"}),
        ("pallas", {"alibi"}),
        ("tpu", {"alibi", "sinks"}),
        ("cudnn", {"alibi", "sinks", "window", "softcap", "narrow_values", "sliding_window"}),
    ],
)
def test_what_is_declared(name, lacks):
    declared = capabilities(name, "gpu")
    everywhere = {
        "dynamic_rope",
        "context_parallel",
        "channel_decay",
        "continued_segments",
        "both_ways",
        "selected_blocks",
    }
    everywhere |= set() if name == "chunked" else {"nonfinite_padding"}
    everywhere |= set() if name in ("xla", "chunked") else {"selected_keys"}
    assert ALL_OPTIONS - declared.options - {"ranks"} == lacks | everywhere
    assert ("float32" in declared.dtypes) == (name != "cudnn")
    assert declared.atomic_backward == (name == "cudnn")
    assert declared.atomic_embedding == (name in ("xla", "chunked", "pallas"))


@pytest.mark.parametrize(
    "code", ["import jax_backend.conformance as c; print(c.backends()['xla']())", "import jax_backend.job"]
)
def test_the_adapter_and_the_trainer_load_without_grain(code):
    done = processes.run([sys.executable, "-c", f"import sys; sys.modules['grain'] = None; {code}"])
    assert done.returncode == 0, done.stderr


def test_float32_is_multiplied_in_float32():
    x = np.ones((2, 2), np.float32)
    with arithmetic("float32"):
        assert "HIGHEST" in str(jax.make_jaxpr(lambda x: x @ x)(x))
    with arithmetic("bfloat16"):
        assert "HIGHEST" not in str(jax.make_jaxpr(lambda x: x @ x)(x))


def test_a_cpu_has_as_many_ranks_as_are_asked_for():
    assert "ranks" in capabilities("xla", "cpu").options
    assert "ranks" not in capabilities("xla", "gpu").options


def test_kernels_run_interpreted_on_the_cpu_alone():
    assert {name for name in IMPLEMENTATIONS if capabilities(name, "cpu").interpreted} == {"pallas", "tpu"}
    assert not any(capabilities(name, "gpu").interpreted for name in IMPLEMENTATIONS)


def test_what_is_not_declared_is_refused():
    stack = backends()["xla"]()
    q, ids = np.zeros((1, 4, 2, 16), np.float32), np.ones((1, 4), np.int64)
    with pytest.raises(UnsupportedError, match="no ALiBi"):
        stack.attention(q, q, q, ids, dtype="float32", alibi_slopes=np.ones(2, np.float32))
    decoder = DecoderCase(DecoderConfig(dynamic_rope_factor=2.0)).decoder()
    with pytest.raises(UnsupportedError, match="dynamic_rope not declared"):
        stack.forward(decoder, None, dtype="float32")
    with pytest.raises(UnsupportedError, match="ranks not declared"):
        JaxStack("xla", "gpu").train(
            DecoderCase().decoder(), [], capacity=8, learning_rate=0.1, dtype="float32", ranks=2
        )


@pytest.mark.slow
def test_ranks_are_devices_and_each_has_its_own_microbatch(monkeypatch):
    seen = []
    accumulate = TrainStep.accumulate

    def record(step, state, sums, batch):
        placed = step.place(batch)["segment_ids"]
        seen.append(
            {shard.device.id: np.asarray(shard.data)[0].max(axis=0).tolist() for shard in placed.addressable_shards}
        )
        return accumulate(step, state, sums, batch)

    monkeypatch.setattr(TrainStep, "accumulate", record)
    step = [documents(3), documents(2, 2), documents(4)]
    how = (backends()["xla"]()._config(DecoderCase().decoder(), "float32"), "float32", "sgd", 0.1, 2)
    _train(how, DecoderCase().decoder().weights, [step], 4)
    assert seen == [{0: [1, 1, 1, 0], 1: [1, 1, 2, 2]}, {0: [1, 1, 1, 1], 1: [0, 0, 0, 0]}]


def test_every_run_of_a_shared_step_starts_from_its_own_weights():
    stack, steps = backends()["xla"](), [[documents(9, 5)], [documents(12)]]

    def train(seed):
        decoder = DecoderCase(seed=seed).decoder()
        return stack.train(decoder, steps, capacity=16, learning_rate=0.1, dtype="float32")

    first, other, again = train(0), train(1), train(0)
    assert first[0] == again[0] != other[0]
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(first[1][name], again[1][name])
    assert (first[1][name] != other[1][name]).any()
