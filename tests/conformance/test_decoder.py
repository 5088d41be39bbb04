"""The decoder's hand-written gradients are those of its forward pass, and its parts are what they say."""

from dataclasses import replace

import numpy as np
import pytest

from conformance import decoder as numpy_decoder
from conformance.draws import DecoderCase, documents
from packing_core.protocol import ADAMW_EPSILON, DecoderConfig

CONFIGS = {
    "plain": DecoderConfig(vocab_size=11, hidden_size=6, intermediate_size=8, head_dim=4, num_attention_heads=2),
    "window": DecoderConfig(vocab_size=11, hidden_size=6, intermediate_size=8, head_dim=4, sliding_window=2),
    "dynamic rope": DecoderConfig(
        vocab_size=11,
        hidden_size=6,
        intermediate_size=8,
        head_dim=4,
        max_position_embeddings=4,
        dynamic_rope_factor=3.0,
    ),
}


def loss(decoder, document):
    return numpy_decoder.one_document(decoder, document)[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_gradients_by_finite_differences(config):
    decoder = DecoderCase(config).decoder()
    decoder = replace(decoder, weights={name: w.astype(np.float64) for name, w in decoder.weights.items()})
    document = documents(7, words=11, prompt=0.3)[0]
    gradients = numpy_decoder.one_document(decoder, document)[2]
    draw = np.random.default_rng(0)
    for name, weight in decoder.weights.items():
        direction = draw.standard_normal(weight.shape)
        direction /= np.linalg.norm(direction)

        def along(steps, name=name, direction=direction):
            moved = decoder.weights[name] + 1e-3 * steps * direction
            return loss(replace(decoder, weights={**decoder.weights, name: moved}), document)

        slope = (8 * (along(1) - along(-1)) - (along(2) - along(-2))) / 12e-3  # exact to the fourth order
        assert slope == pytest.approx((gradients[name] * direction).sum(), rel=1e-7, abs=1e-7), name


def test_a_window_changes_logits_only_beyond_it():
    plain, windowed = (DecoderCase(DecoderConfig(sliding_window=w)).decoder() for w in (None, 4))
    document = documents(9)[0]
    without, within = (numpy_decoder.alone(decoder, document.input_ids)[0] for decoder in (plain, windowed))
    np.testing.assert_array_equal(without[:4], within[:4])
    assert (without[4:] != within[4:]).any(axis=1).all()


def test_frequencies_change_only_beyond_the_original_context():
    config = DecoderConfig(max_position_embeddings=16, dynamic_rope_factor=4.0)
    np.testing.assert_array_equal(numpy_decoder.inv_freq(config, 16), numpy_decoder.inv_freq(DecoderConfig(), 16))
    assert (numpy_decoder.inv_freq(config, 17)[1:] < numpy_decoder.inv_freq(config, 16)[1:]).all()


def mean_gradients(decoder, documents):
    """Mean loss over all trained labels, and its gradients."""
    return numpy_decoder.mean(numpy_decoder.summed(numpy_decoder.one_document(decoder, each) for each in documents))


def test_adamw_takes_the_first_step_along_the_sign_of_large_gradients():
    decoder = DecoderCase().decoder()
    _, gradients = mean_gradients(decoder, documents(9))
    after = numpy_decoder.updated(decoder, gradients, {}, step=1, learning_rate=0.01, optimizer="adamw")
    name = "model.layers.0.mlp.up_proj.weight"
    moved = after.weights[name] - decoder.weights[name]
    np.testing.assert_allclose(moved, -0.01 * gradients[name] / (np.abs(gradients[name]) + ADAMW_EPSILON), rtol=1e-9)


def test_documents_without_targets_have_no_loss_and_no_gradient():
    mean, gradients = mean_gradients(DecoderCase().decoder(), documents(9, prompt=1.0))
    assert mean == 0.0
    assert not any(gradient.any() for gradient in gradients.values())
