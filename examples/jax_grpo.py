"""GRPO in JAX over a mesh: groups of completions in packed rows, and rows spread over devices.

Run it: python examples/jax_grpo.py
Needs: pip install 'crosspack[jax]'
"""

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=4"
)  # four devices of a CPU; GPUs as they are

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import crosspack
    import jax_backend
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[jax]'") from None

CLIP, GROUPS, SAMPLES, CAPACITY, LONGEST = 0.2, 4, 8, 64, 12
PROMPT = np.array([62, 63])


def rows_of(completions: list[np.ndarray], rewards: np.ndarray, devices: int) -> dict[str, np.ndarray]:
    """Packs completions behind their prompts, each token with its document's advantage over its group."""
    documents = [np.concatenate([PROMPT, completion]) for completion in completions]
    packed = crosspack.pack(documents, CAPACITY, prompt_lengths=[len(PROMPT)] * len(documents))
    batch = jax_backend.to_batch(packed)
    by_group = rewards.reshape(GROUPS, SAMPLES)
    spread = by_group.std(axis=1, ddof=1, keepdims=True) + 1e-4
    advantages = ((by_group - by_group.mean(axis=1, keepdims=True)) / spread).ravel().astype(np.float32)
    batch["advantages"] = np.where(batch["document_ids"] >= 0, advantages[batch["document_ids"]], 0)
    more = 2 * devices - len(batch["input_ids"])
    return {
        name: np.pad(array, ((0, more), (0, 0)), constant_values=-1 if name == "document_ids" else 0)
        for name, array in batch.items()
    }


def grpo_loss(model: jax_backend.Decoder, batch: dict) -> tuple:
    """Sums the documents' means of the clipped surrogate (Shao et al. 2024, equation 3), and counts the documents."""
    documents = GROUPS * SAMPLES
    found = jax_backend.token_logprobs(model, batch).logprobs
    ratio = jnp.exp(found - batch["old"])
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    losses = -jnp.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
    trained = batch["loss_weights"] > 0
    means = jax_backend.reduce(losses, batch, "mean", documents=documents, where=trained)
    cut = (trained & (ratio != clipped)).sum()
    return means.sum(), jnp.float32(documents), {"clipped": (cut, trained.sum())}


@nnx.jit
def next_logits(model: jax_backend.Decoder, tokens: jax.Array, column: jax.Array) -> jax.Array:
    ids = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, ids, positions)[:, column]


def sample(model: jax_backend.Decoder, rng: np.random.Generator) -> list[np.ndarray]:
    """Draws completions of random lengths, token by token."""
    tokens = np.zeros((GROUPS * SAMPLES, len(PROMPT) + LONGEST), np.int32)
    tokens[:, : len(PROMPT)] = PROMPT
    for column in range(len(PROMPT), tokens.shape[1]):
        logits = np.asarray(next_logits(model, tokens, jnp.int32(column - 1)))
        tokens[:, column] = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    ends = len(PROMPT) + rng.integers(3, LONGEST + 1, len(tokens))
    return [row[len(PROMPT) : end] for row, end in zip(tokens, ends, strict=True)]


if __name__ == "__main__":
    config = jax_backend.DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    model = jax_backend.Decoder(config, rngs=nnx.Rngs(0))
    train_step = jax_backend.make_train_step(model, optax.adam(1e-2), mesh, loss_fn=grpo_loss)
    logprobs_of = nnx.jit(lambda model, batch: jax_backend.token_logprobs(model, batch).logprobs)
    state, rng = train_step.init(), np.random.default_rng(0)
    for number in range(12):
        completions = sample(model, rng)
        rewards = np.array([(completion % 2 == 0).mean() for completion in completions])  # even tokens are rewarded
        batch = rows_of(completions, rewards, devices=mesh.size)
        batch["old"] = np.asarray(logprobs_of(model, batch))
        for _ in range(2):  # the second update is off the policy that sampled, and clipped
            state, metrics = train_step(state, batch)
        nnx.update(model, jax.device_get(state.params))
        if number % 4 == 0 or number == 11:
            print(
                f"step {number} on {mesh.size} devices: reward {rewards.mean():.3f}, clipped {metrics['clipped']:.2f}"
            )
