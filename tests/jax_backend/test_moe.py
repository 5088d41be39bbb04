"""Experts without dropped tokens, whatever the router says, and the auxiliary loss over real tokens alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from jax_backend import audit, make_train_step
from jax_backend.batches import to_batch
from jax_backend.model import weights
from jax_backend.model.decoder_config import DecoderConfig, MixtureConfig
from jax_backend.model.layers import Maker
from jax_backend.model.moe import Balance, Experts, Router, Routing, run_experts, sort_by_expert
from packing_core.errors import UnsupportedModelError
from tests.jax_backend.models import CONFIGS, documents, on_disk, packed, saved

E, K, M, F = 5, 2, 6, 8
MIXTURE = MixtureConfig(E, K, F, (True,))


def maker(dtype=jnp.float32):
    return Maker(DecoderConfig.from_hf(CONFIGS["llama"]().to_dict()), nnx.Rngs(0), dtype, jnp.float32)


def relative(found, wanted) -> float:
    return float(np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max())


def one_by_one(x, chosen, factors, gate, up, down):
    """Every token through every expert, in float64; those that were not chosen count 0."""
    hidden = np.einsum("bsm,emf->bsef", x, gate)
    hidden = hidden / (1 + np.exp(-hidden)) * np.einsum("bsm,emf->bsef", x, up)
    share = np.einsum("bske,bsk->bse", np.eye(E)[chosen], factors)
    return np.einsum("bsef,efm,bse->bsm", hidden, down, share)


@pytest.mark.parametrize("choose", ["at random", "one expert for all", "none the last"])
def test_no_token_is_dropped_whatever_the_router_says(choose) -> None:
    rng = np.random.default_rng(0)
    x, factors = rng.standard_normal((2, 37, M)), rng.random((2, 37, K))
    chosen = np.argsort(rng.random((2, 37, E)), axis=-1)[..., :K]
    if choose == "one expert for all":
        chosen = np.broadcast_to([3, 1], chosen.shape)
    elif choose == "none the last":
        chosen = np.minimum(chosen, E - 2)
    experts = Experts(M, MIXTURE, jax.nn.silu, maker())
    for name in experts.names:
        kernel = getattr(experts, name).kernel
        kernel.set_value(jnp.asarray(rng.standard_normal(kernel.shape), jnp.float32))
    tensors = [np.asarray(tensor, np.float64) for tensor in experts.tensors()]
    dout = rng.standard_normal(x.shape)

    def total(experts, x, factors):
        routing = Routing(jnp.asarray(chosen), factors, jnp.zeros((2, 37, E)))
        return jnp.sum(run_experts(experts, x, routing) * dout)

    run = jax.jit(lambda x: run_experts(experts, x, Routing(jnp.asarray(chosen), jnp.asarray(factors), jnp.zeros(()))))
    wanted = one_by_one(x, chosen, factors, *tensors)
    assert relative(run(jnp.asarray(x, jnp.float32)), wanted) < 2e-6
    grads = nnx.jit(nnx.grad(total, argnums=(0, 1, 2)))(
        experts, jnp.asarray(x, jnp.float32), jnp.asarray(factors, jnp.float32)
    )
    inputs = [torch.tensor(array, requires_grad=True) for array in (*tensors, x, factors)]
    gate, up, down, tx, tf = inputs
    hidden = torch.nn.functional.silu(torch.einsum("bsm,emf->bsef", tx, gate)) * torch.einsum("bsm,emf->bsef", tx, up)
    share = torch.einsum("bske,bsk->bse", torch.eye(E, dtype=torch.float64)[torch.tensor(chosen.copy())], tf)
    torch.einsum("bsef,efm,bse,bsm->", hidden, down, share, torch.tensor(dout)).backward()
    found = [getattr(grads[0], name).kernel for name in experts.names]
    for gradient, tensor in zip([*found, *grads[1:]], inputs, strict=True):
        assert relative(gradient, tensor.grad.numpy()) < 5e-6


def test_blocks_hold_one_expert_each_and_every_choice_once() -> None:
    # choices   2 0 2 1 2 ...   ->   | 0 0 . . | 1 . . . | 2 2 2 2 | 2 ...
    choices = jnp.asarray(np.random.default_rng(1).choice([0, 1, 2, 4], 100, p=[0.1, 0.05, 0.8, 0.05]))
    blocks = sort_by_expert(choices, E)
    there = np.asarray(blocks.choice) < 100
    assert sorted(np.asarray(blocks.choice)[there].tolist()) == list(range(100))
    for block, expert in zip(np.asarray(blocks.choice), np.asarray(blocks.expert), strict=True):
        assert (np.asarray(choices)[block[block < 100]] == expert).all()
    assert (np.asarray(blocks.choice).ravel()[np.asarray(blocks.place)] == np.arange(100)).all()


def test_the_router_decides_in_float32_in_a_bfloat16_model() -> None:
    router = Router(M, MIXTURE, maker(jnp.bfloat16))
    router.kernel.set_value(jax.random.normal(jax.random.key(0), (M, E)))
    x = jax.random.normal(jax.random.key(1), (1, 50, M)).astype(jnp.bfloat16)
    wanted = jax.nn.softmax(np.asarray(x, np.float64) @ np.asarray(router.kernel[...], np.float64))
    found = router(x)
    assert found.probabilities.dtype == jnp.float32 and relative(found.probabilities, np.asarray(wanted)) < 1e-6
    np.testing.assert_allclose(found.weights.sum(-1), 1.0, rtol=1e-6)


def test_padding_is_not_counted_and_an_even_router_costs_k() -> None:
    even = Routing(
        jnp.asarray([[[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]]), jnp.ones((1, 5, 2)), jnp.full((1, 5, E), 0.2)
    )
    real = jnp.ones((1, 5), bool)
    assert float(Balance.of(even, real).loss()) == pytest.approx(K)
    padded = Routing(*(jnp.concatenate([part, 7 * jnp.ones_like(part)], axis=1) for part in even))
    balance = Balance.of(padded, jnp.concatenate([real, ~real], axis=1))
    assert float(balance.loss()) == pytest.approx(K) and float(balance.tokens) == 5
    assert float(Balance.zero(E).loss()) == 0.0


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_the_auxiliary_loss_and_its_gradients_are_those_of_the_real_tokens_in_torch(name, tmp_path) -> None:
    reference = saved(name, tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"output_router_logits": false', '"output_router_logits": true')
    )
    coefficient = 0.001
    model = weights.load(tmp_path, implementation="xla", scan_layers=True)
    assert model.config.mixture.coefficient == coefficient
    object.__setattr__(model.config.mixture, "coefficient", 1.0)  # so that it shows

    total, count, logits = torch.zeros(()), 0, []
    for ids in documents(9):
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        out = reference(tokens, use_cache=False, output_router_logits=True)
        logits += [layer.flatten(0, -2) for layer in out.router_logits]
        total = total + torch.nn.functional.cross_entropy(out.logits[0, :-1], tokens[0, 1:], reduction="sum")
        count += len(ids) - 1
    probabilities = torch.cat(logits).softmax(-1)
    top = probabilities.topk(reference.config.num_experts_per_tok).indices
    chosen = torch.zeros_like(probabilities).scatter(-1, top, 1.0)
    auxiliary = probabilities.shape[-1] * (chosen.mean(0) * probabilities.mean(0)).sum()
    loss = total / count + auxiliary
    loss.backward()

    batch = {name: jnp.asarray(array) for name, array in to_batch(packed()).items()}

    def mean(model):
        loss_sum, weight = model.loss(batch)
        return loss_sum / weight

    found, grads = nnx.jit(nnx.value_and_grad(mean))(model)
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-6)
    exported = weights.export(grads)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in on_disk(reference, gradients).items():
        assert relative(exported[name], gradient) < 1e-5, name


@pytest.mark.slow
def test_rows_spread_over_devices_train_as_on_one(tmp_path) -> None:
    saved("qwen2-moe", tmp_path)
    batch = to_batch(packed(12))
    batch = {name: array[: len(array) // 4 * 4] for name, array in batch.items()}
    losses = []
    for axes in ({}, {"data": 2, "fsdp": 2}):
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes)) if axes else None
        step = make_train_step(weights.load(tmp_path, mesh=mesh, implementation="xla"), optax.sgd(0.5), mesh)
        state = step.init(donate=True)
        state, first = step(state, batch)
        _, second = step(state, batch)
        losses.append((float(first["loss"]), float(second["loss"])))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    assert losses[0][1] < losses[0][0]


@pytest.mark.slow
def test_no_document_moves_another_through_the_experts(tmp_path) -> None:
    saved("mixtral", tmp_path)
    verdict = audit(weights.load(tmp_path, implementation="xla"))
    assert verdict.exact, verdict.line


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1 and the flax decoder's router has no noise"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"the weights are quantised \(mxfp4\): write them with"),
    ],
)
def test_what_routers_and_experts_do_not_compute_is_refused(change, reason) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        DecoderConfig.from_hf(CONFIGS["mixtral"]().to_dict() | change)
