"""Packed attention in an nnx model of your own: `segment_attention` takes the segment ids, and the step any module.

Run it: python examples/jax_own_model.py
Needs: pip install 'crosspack[jax]'
"""

try:
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import crosspack
    import jax_backend
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[jax]'") from None


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.norm, self.norm_mlp = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.LinearGeneral(width, (3, heads, width // heads), rngs=rngs)
        self.out = nnx.LinearGeneral((heads, width // heads), width, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x, segments, positions, inv_freq):
        q, k, v = jnp.moveaxis(self.qkv(self.norm(x)), 2, 0)
        q, k = (jax_backend.apply_rope(part, positions, inv_freq) for part in (q, k))  # positions restart
        x = x + self.out(jax_backend.segment_attention(q, k, v, segments))  # the call that keeps documents apart
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class Model(nnx.Module):
    def __init__(self, words: int, width: int, heads: int, layers: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(words, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, words, rngs=rngs)
        channels = width // heads
        self.inv_freq = nnx.Variable(10_000.0 ** -(np.arange(0, channels, 2, dtype=np.float32) / channels))

    def __call__(self, input_ids, segment_ids, position_ids):
        x = self.embed(input_ids)
        segments = jax_backend.find_segments(segment_ids)  # once, for all layers
        for block in self.blocks:
            x = block(x, segments, position_ids, self.inv_freq[...])
        return self.head(x)


def loss_fn(model: Model, batch: dict):
    logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    return jax_backend.packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])


rng = np.random.default_rng(0)
documents = [np.arange(start, start + length) % 60 for start, length in rng.integers(4, 40, (100, 2))]
model = Model(64, 32, 4, 1, rngs=nnx.Rngs(0))
audit = jax_backend.audit(model)  # packed rows against each document alone
print(f"exact: {audit.exact}; {audit.line}")
train_step = jax_backend.make_train_step(model, optax.adamw(1e-2), loss_fn=loss_fn, trainable=nnx.Param)
state = train_step.init()
rows = crosspack.PackedDataset(documents, 256)
for number in range(24):
    state, metrics = train_step(state, jax_backend.to_batch(rows[[2 * number % 8, 2 * number % 8 + 1]]))
    if number % 8 == 0 or number == 23:
        print(f"step {number}: loss {float(metrics['loss']):.3f}")
