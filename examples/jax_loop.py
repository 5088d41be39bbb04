"""A JAX training loop on packed rows: a flax decoder, optax, and a step that compiles once for every segmentation.

Run it: python examples/jax_loop.py
Needs: pip install 'crosspack[jax]'
"""

try:
    import numpy as np
    import optax
    from flax import nnx

    import crosspack
    import jax_backend
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[jax]'") from None

rng = np.random.default_rng(0)
documents = [np.arange(start, start + length) % 60 for start, length in rng.integers(4, 40, (200, 2))]  # they count
config = jax_backend.DecoderConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
)
model = jax_backend.Decoder(config, rngs=nnx.Rngs(0))  # or jax_backend.load(folder), from safetensors

train_step = jax_backend.make_train_step(model, optax.adamw(1e-2))
state = train_step.init()
rows = crosspack.PackedDataset(documents, 256)
losses = []
for epoch in range(3):
    for first in range(0, len(rows) - 3, 4):  # four rows a step; fixed shapes, so nothing compiles again
        state, metrics = train_step(state, jax_backend.to_batch(rows[first : first + 4]))
        losses.append(float(metrics["loss"]))
    print(f"epoch {epoch}: loss {losses[-1]:.3f}")
