"""Log-probabilities without logits are those of the model's logits, with gradients, in any number of chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_backend import reduce, to_batch, token_logprobs
from jax_backend.model import weights
from packing_core import LayoutError, PackingError
from packing_core.reference import token_logprobs as reference
from tests.jax_backend.models import documents, packed, saved


def loaded(family, folder):
    saved(family, folder)
    return weights.load(folder, implementation="xla")  # the quickest to compile


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded("qwen2-window-tied", tmp_path_factory.mktemp("model"))


@nnx.jit
def of_batch(model, batch):
    return token_logprobs(model, batch).logprobs


@pytest.fixture(scope="module")
def batch():
    return {name: jnp.asarray(x) for name, x in to_batch(packed()).items()}


def of_logits(model, batch, temperature):
    logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"]) / temperature
    log_p = jax.nn.log_softmax(logits)
    trained = batch["loss_weights"] > 0
    picked = jnp.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    return jnp.where(trained, picked, 0), jnp.where(trained, -(jnp.exp(log_p) * log_p).sum(-1), 0)


@pytest.mark.parametrize(("family", "temperature", "tokens"), [("llama", 1.0, 48), ("qwen2-window-tied", 0.6, 7)])
def test_they_are_those_of_the_logits(family, batch, temperature, tokens, tmp_path):
    model = loaded(family, tmp_path)
    cotangents = jax.random.normal(jax.random.key(0), (2, *batch["targets"].shape))
    rows, words = len(batch["targets"]), model.config.vocab_size

    def combined(model, chunked):
        if not chunked:
            pair = of_logits(model, batch, temperature)
        else:
            found = token_logprobs(
                model, batch, temperature=temperature, entropy=True, chunk_bytes=4 * rows * words * tokens
            )
            pair = found.logprobs, found.entropy
        return (jnp.stack(pair) * cotangents).sum(), pair

    (_, found), gradients = nnx.jit(nnx.value_and_grad(lambda m: combined(m, True), has_aux=True))(model)
    (_, wanted), expected = nnx.jit(nnx.value_and_grad(lambda m: combined(m, False), has_aux=True))(model)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * float(jnp.abs(y).max()))


@pytest.mark.slow
def test_each_document_gets_what_it_gets_alone(model, batch):
    found = reduce(of_batch(model, batch), batch, "sum", documents=9)
    forward = nnx.jit(lambda model, *inputs: model(*inputs))
    for document, ids in enumerate(documents(9)):
        padded = np.pad(ids, (0, 30 - len(ids)))  # one shape
        alone = forward(model, padded[None], np.int32(np.arange(30) < len(ids))[None], np.arange(30)[None])
        logprobs, _ = reference(np.asarray(alone[0, : len(ids)]), np.append(ids[1:], -100))
        assert float(found[document]) == pytest.approx(logprobs.sum(), rel=1e-4)


def test_candidates_are_the_most_likely_ids_or_those_that_are_named(model, batch):
    chosen = nnx.jit(lambda m: token_logprobs(m, batch, top_k=3))(model)
    trained = batch["loss_weights"] > 0
    masked = batch | {"loss_weights": trained}
    again = nnx.jit(lambda m, ids: token_logprobs(m, masked, candidates=ids))(model, chosen.candidates)
    np.testing.assert_allclose(chosen.candidate_logprobs, again.candidate_logprobs, atol=1e-6)
    best = chosen.candidate_logprobs[trained]
    assert (best[:, :-1] >= best[:, 1:]).all() and (best[:, 0] >= chosen.logprobs[trained] - 1e-5).all()
    assert not chosen.candidate_logprobs[~trained].any()


def test_a_target_that_is_no_class_has_nan(model, batch):
    assert model.config.vocab_size == 64
    places = np.argwhere(batch["loss_weights"] > 0)[[3, 7]]
    targets = batch["targets"].at[tuple(places.T)].set(jnp.asarray([64, -3]))
    np.testing.assert_array_equal(np.argwhere(np.isnan(of_batch(model, dict(batch, targets=targets)))), places)


class Bare:
    """A model of one's own: ``hidden`` and ``logits`` and nothing else."""

    def hidden(self, input_ids, segment_ids, position_ids):
        return jax.nn.one_hot(input_ids, 8)

    def logits(self, hidden):
        return hidden @ jnp.arange(64.0).reshape(8, 8)


def test_a_model_needs_hidden_and_logits_alone_and_rows_may_be_empty():
    ids, targets = jnp.asarray([[1, 2, 3, 4]]), jnp.asarray([[2, 3, 4, 0]], jnp.uint8)
    batch = {"input_ids": ids, "segment_ids": ids, "position_ids": ids, "targets": targets, "loss_weights": ids}
    found = token_logprobs(Bare(), batch, chunk_bytes=64)
    np.testing.assert_allclose(found.logprobs[0], jax.nn.log_softmax(jnp.arange(8.0))[targets[0]], rtol=1e-5)
    empty = token_logprobs(Bare(), {name: x[:, :0] for name, x in batch.items()}, entropy=True)
    assert empty.logprobs.shape == empty.entropy.shape == (1, 0)


class Masked(nnx.Module):
    """A head with a class that is never drawn, and a first document whose numbers are not finite."""

    def __init__(self):
        self.embed, self.head = nnx.Embed(64, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 65, rngs=nnx.Rngs(1))

    def hidden(self, input_ids, segment_ids, position_ids):
        return jnp.where((segment_ids == 1)[..., None], jnp.nan, self.embed(input_ids))

    def logits(self, hidden):
        return jnp.where((jnp.arange(65) < 64)[None, None], self.head(hidden), -jnp.inf)


def test_what_is_not_finite_outside_of_trained_tokens_and_drawn_classes_reaches_nothing(batch):
    batch = batch | {"loss_weights": jnp.where(batch["segment_ids"] == 1, 0, batch["loss_weights"])}

    def total(model):
        result = token_logprobs(model, batch, entropy=True)
        return result.logprobs.sum() + result.entropy.sum()

    loss, gradients = nnx.value_and_grad(total)(Masked())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((loss, gradients)))
    wide = Masked()
    narrow = jax.nn.log_softmax(wide.head(wide.embed(batch["input_ids"]))[..., :64])
    trained = batch["loss_weights"] > 0
    picked = jnp.take_along_axis(narrow, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, (picked - (jnp.exp(narrow) * narrow).sum(-1)).sum(where=trained), rtol=1e-5)


def test_what_cannot_be_done_is_refused(model, batch):
    with pytest.raises(LayoutError, match="the batch lacks targets"):
        token_logprobs(model, {name: x for name, x in batch.items() if name != "targets"})
    with pytest.raises(PackingError, match="temperature must be above 0"):
        token_logprobs(model, batch, temperature=0.0)
    with pytest.raises(PackingError, match="pass one of them"):
        token_logprobs(model, batch, top_k=1, candidates=batch["targets"][..., None])
    with pytest.raises(PackingError, match="top_k must be at least 1"):
        token_logprobs(model, batch, top_k=0)
    with pytest.raises(LayoutError, match="candidates must be"):
        token_logprobs(model, batch, candidates=batch["targets"])
