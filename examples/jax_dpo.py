"""DPO in JAX over a mesh: both answers of every pair in packed rows, and rows spread over devices.

Run it: python examples/jax_dpo.py
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

BETA, PAIRS, CAPACITY = 0.1, 8, 64


def rows_of(answers: list[np.ndarray], prompts: list[int], devices: int) -> dict[str, np.ndarray]:
    """Packs answers, each behind its prompt, into the same number of rows for every step, one pair after the other."""
    batch = jax_backend.to_batch(crosspack.pack(answers, CAPACITY, prompt_lengths=prompts, seed=None))
    more = 2 * devices - len(batch["input_ids"])
    return {
        name: np.pad(array, ((0, more), (0, 0)), constant_values=-1 if name == "document_ids" else 0)
        for name, array in batch.items()
    }


def dpo_loss(model: jax_backend.Decoder, batch: dict) -> tuple:
    """Sums ``-log sigmoid(beta margin)`` over pairs (Rafailov et al. 2023, equation 7), and counts the pairs."""
    documents = 2 * PAIRS
    found = jax_backend.token_logprobs(model, batch).logprobs
    gained = jax_backend.reduce(found - batch["reference"], batch, "sum", documents=documents)
    margins = gained[0::2] - gained[1::2]  # chosen and rejected stand side by side in source order
    right = (margins > 0).sum()
    return -jax.nn.log_sigmoid(BETA * margins).sum(), jnp.float32(PAIRS), {"accuracy": (right, PAIRS)}


def draw(rng: np.random.Generator) -> tuple[list[np.ndarray], list[int]]:
    """Pairs of answers to a prompt: the chosen one counts up, the rejected one is random."""
    answers, prompts = [], []
    for _ in range(PAIRS):
        start, prompt, *lengths = rng.integers(3, 12, 4)
        up = np.arange(start, start + prompt + lengths[0])
        answers += [up, np.concatenate([up[:prompt], rng.integers(0, 60, lengths[1])])]
        prompts += [int(prompt)] * 2
    return answers, prompts


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
    reference = jax_backend.Decoder(config, rngs=nnx.Rngs(0))  # stays as it is; so would jax_backend.load(folder)
    train_step = jax_backend.make_train_step(reference, optax.adam(3e-3), mesh, loss_fn=dpo_loss)
    logprobs_of = nnx.jit(lambda model, batch: jax_backend.token_logprobs(model, batch).logprobs)
    state, rng = train_step.init(), np.random.default_rng(0)
    for number in range(24):
        batch = rows_of(*draw(rng), devices=mesh.size)
        batch["reference"] = np.asarray(logprobs_of(reference, batch))
        state, metrics = train_step(state, batch)
        if number % 8 == 0 or number == 23:
            loss, accuracy = float(metrics["loss"]), float(metrics["accuracy"])
            print(f"step {number} on {mesh.size} devices: loss {loss:.3f}, accuracy {accuracy:.2f}")
