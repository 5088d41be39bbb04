"""Packed rows in an Equinox model: attention between tokens of one document, positions that restart, the packed loss.

Run it: python examples/jax_equinox.py
Needs: pip install 'crosspack[jax]' equinox
"""

try:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import crosspack
    import jax_backend
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[jax]' equinox") from None

WORDS, WIDTH, HEADS = 64, 32, 4
INV_FREQ = 10_000.0 ** -(np.arange(0, WIDTH // HEADS, 2, dtype=np.float32) / (WIDTH // HEADS))


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    norm: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        embed, qkv, out, head = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(WORDS, WIDTH, key=embed)
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, use_bias=False, key=qkv)
        self.out = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=out)
        self.head = eqx.nn.Linear(WIDTH, WORDS, use_bias=False, key=head)

    def __call__(self, input_ids, segment_ids, position_ids):
        """Logits [B, S, V] of whole rows: Equinox's layers take one token, segment_attention takes the rows."""
        x = over_tokens(self.embed)(input_ids)
        qkv = over_tokens(lambda token: self.qkv(self.norm(token)))(x)
        q, k, v = jnp.moveaxis(qkv.reshape(*input_ids.shape, 3, HEADS, -1), 2, 0)
        q, k = (jax_backend.apply_rope(part, position_ids, INV_FREQ) for part in (q, k))  # positions restart
        mixed = jax_backend.segment_attention(q, k, v, segment_ids)  # the call that keeps documents apart
        x = x + over_tokens(self.out)(mixed.reshape(x.shape))
        return over_tokens(self.head)(x)


def over_tokens(layer):
    return jax.vmap(jax.vmap(layer))


def loss_fn(model: Model, batch: dict) -> jax.Array:
    logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    losses, weights = jax_backend.packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])
    return losses / weights  # sums: over several devices or microbatches, add up both before dividing


@eqx.filter_jit
def train_step(model: Model, state: optax.OptState, batch: dict):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


rng = np.random.default_rng(0)
documents = [np.arange(start, start + length) % 60 for start, length in rng.integers(4, 40, (100, 2))]
model = Model(key=jax.random.key(0))
audit = jax_backend.audit(model, call=lambda model, batch: model(**batch))  # packed rows against each document alone
print(f"exact: {audit.exact}; {audit.line}")
optimizer = optax.adamw(1e-2)
state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
rows = crosspack.PackedDataset(documents, 256)
for number in range(24):
    batch = jax_backend.to_batch(rows[[2 * number % 8, 2 * number % 8 + 1]])
    model, state, loss = train_step(model, state, batch)
    if number % 8 == 0 or number == 23:
        print(f"step {number}: loss {float(loss):.3f}")
