"""Packed rows in flax's own layers, nnx and linen: attention with rotation, a loss without logits, grain in, orbax out.

Run it: python examples/jax_other_models.py
Needs: pip install 'crosspack[jax]'
"""

from pathlib import Path
from tempfile import TemporaryDirectory

try:
    import grain
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen, nnx

    import crosspack
    import jax_backend
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[jax]'") from None

WORDS, WIDTH, HEADS = 64, 32, 4
INV_FREQ = jnp.asarray(10_000.0 ** -(np.arange(0, WIDTH // HEADS, 2, dtype=np.float32) / (WIDTH // HEADS)))


def packed(query, key, value, *unused, mask, dropout_rate=0.0, **options):
    """For ``attention_fn`` of nnx and linen, which hand ``mask`` on as it is: here the segment ids [B, S]."""
    if dropout_rate:
        raise ValueError("segment_attention has no dropout")
    positions = jax_backend.segment_positions(mask)  # they begin again in every segment
    query, key = (jax_backend.apply_rope(x, positions, INV_FREQ) for x in (query, key))
    return jax_backend.segment_attention(query, key, value, mask)


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.norm, self.last = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=packed, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def hidden(self, input_ids, segment_ids):
        x = self.embed(input_ids)
        return self.last(x + self.attend(self.norm(x), mask=segment_ids))

    def __call__(self, input_ids, segment_ids, position_ids):
        return self.head(self.hidden(input_ids, segment_ids))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, input_ids, segment_ids, position_ids):
        x = linen.Embed(WORDS, WIDTH)(input_ids)
        attend = linen.MultiHeadDotProductAttention(HEADS, attention_fn=packed)
        x = x + attend(linen.RMSNorm()(x), mask=segment_ids)
        return linen.Dense(WORDS, use_bias=False)(linen.RMSNorm()(x))


def without_logits(model: Model, batch: dict):
    """The head and the loss a chunk of tokens at a time, of rows as grain names them."""
    hidden = model.hidden(batch["inputs"], batch["inputs_segment_ids"])
    weights = batch["loss_weights"]
    return jax_backend.linear_cross_entropy(hidden, model.head.kernel[...], batch["targets"], weights=weights)


def of_linen(model: nnx.Module, batch: dict):
    logits = model(batch["inputs"], batch["inputs_segment_ids"], batch["inputs_positions"])
    return jax_backend.packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])


rng = np.random.default_rng(0)
documents = [np.arange(start, start + length) % 60 for start, length in rng.integers(4, 40, (100, 2))]
rows = grain.MapDataset.source(jax_backend.GrainSource(crosspack.PackedDataset(documents, 128)))
rows = rows.shuffle(seed=0).repeat().batch(4)

ids = jnp.ones((1, 8), jnp.int32)
module = Linen()
weights = module.init(jax.random.key(0), ids, ids, ids)
wrapped = nnx.bridge.lazy_init(nnx.bridge.ToNNX(Linen(), rngs=nnx.Rngs(0)), ids, ids, ids)
audits = {
    "nnx": jax_backend.audit(Model(rngs=nnx.Rngs(0))),
    "linen": jax_backend.audit(weights, call=lambda weights, batch: module.apply(weights, **batch)),
}
for name, model, loss_fn in (("nnx", Model(rngs=nnx.Rngs(0)), without_logits), ("linen", wrapped, of_linen)):
    train_step = jax_backend.make_train_step(model, optax.adamw(1e-2), loss_fn=loss_fn, microbatched=False)
    state, losses = train_step.init(), []
    for number in range(24):
        state, metrics = train_step(state, rows[number])
        losses.append(float(metrics["loss"]))
    with TemporaryDirectory() as folder:
        jax_backend.save_state(Path(folder) / "state", state)
        restored = jax_backend.restore_state(Path(folder) / "state", train_step)
    again, there = (train_step(each, rows[24])[1]["loss"] for each in (restored, state))
    print(
        f"{name}: exact {audits[name].exact}, loss {losses[0]:.3f} to {losses[-1]:.3f}, resumed {bool(again == there)}"
    )
