"""Transformers' Trainer on packed documents: one line packs the whole data set and makes the steps fast.

Run it: python examples/trainer.py
Needs: pip install 'crosspack[hf]'
"""

from tempfile import TemporaryDirectory

try:
    import accelerate  # noqa: F401, which Trainer needs
    import numpy as np
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

rng = np.random.default_rng(0)
documents = Dataset.from_dict({"input_ids": [rng.integers(1, 500, n).tolist() for n in rng.integers(5, 200, 256)]})
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
)

with TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=1, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=documents)
    print(f"padded: {len(trainer.get_train_dataloader())} batches of 2 documents")

    crosspack.enable_packing(trainer, capacity=1024)  # the line
    print(f"packed: {len(trainer.get_train_dataloader())} batches of 2 rows of 1,024 tokens")
    print(f"audit:  {crosspack.audit(trainer).verdict}")  # losses and gradients of every document alone
    trainer.train()
    print(crosspack.explain(trainer))  # which attention runs, and what of the step is fast here
