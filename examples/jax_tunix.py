"""Packed rows in Tunix: its Qwen3, adapters by qwix, its PeftTrainer, and an audit of the model.

Run it: python examples/jax_tunix.py
Needs: pip install 'crosspack[jax]' google-tunix qwix
"""

try:
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import crosspack
    import jax_backend
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[jax]' google-tunix qwix") from None


def packed_inputs(batch):
    """For ``PeftTrainer.with_gen_model_input_fn``; ``batch`` is what ``jax_backend.to_batch`` makes."""
    return {**mask_of(batch), "targets": batch["targets"], "weights": batch["loss_weights"]}


def mask_of(batch):
    """Makes the arguments of Tunix's models. The mask is dense, so time and memory grow with the square of the row."""
    ids = batch["segment_ids"]
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0)
    return {
        "input_tokens": batch["input_ids"],
        "positions": batch["position_ids"],
        "attention_mask": jnp.tril(same),
    }


def packed_loss(model, input_tokens, positions, attention_mask, targets, weights):
    """For ``PeftTrainer.with_loss_fn``; the mean over the trained tokens of one batch."""
    logits, _ = model(input_tokens, positions, None, attention_mask)
    total, weight = jax_backend.packed_cross_entropy(logits, targets, weights=weights)
    return total / weight


def logits_of(model, batch):
    """For ``audit(model, call=logits_of)``."""
    return model(**mask_of(batch), cache=None)[0]


if __name__ == "__main__":
    try:
        import qwix
        from tunix.models.qwen3 import model as qwen3
        from tunix.sft import peft_trainer
    except ImportError as error:
        raise SystemExit(f"{error}: pip install 'crosspack[jax]' google-tunix qwix") from None

    config = qwen3.ModelConfig(
        num_layers=1,
        vocab_size=64,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    rng = np.random.default_rng(0)
    documents = [np.arange(start, start + length) % 60 for start, length in rng.integers(4, 40, (200, 2))]
    rows = jax_backend.to_batch(crosspack.pack(documents, 128))
    batches = [{name: array[i : i + 2] for name, array in rows.items()} for i in range(0, 32, 2)]

    adapters = qwix.LoraProvider(module_path=".*(q_proj|k_proj|v_proj|o_proj|lm_head)", rank=8, alpha=16.0)
    example = {**mask_of(batches[0]), "cache": None}
    base = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    model = qwix.apply_lora_to_model(base, adapters, **example, rngs=nnx.Rngs(1))
    print(f"exact: {jax_backend.audit(model, call=logits_of).exact}")

    options = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=len(batches))
    trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-2), options)
    trainer = trainer.with_gen_model_input_fn(packed_inputs).with_loss_fn(packed_loss)
    before = float(packed_loss(trainer.model, **packed_inputs(batches[0])))
    trainer.train(batches)
    after = float(packed_loss(trainer.model, **packed_inputs(batches[0])))
    print(f"loss {before:.3f} to {after:.3f}")
