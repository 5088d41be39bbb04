"""The audit of a stack that is not ours: two trainers that pack by other collators, as they are, before they train.

Run it: python examples/audit_other_stack.py
Needs: pip install 'crosspack[hf]'
"""

import logging
from tempfile import TemporaryDirectory

try:
    import accelerate  # noqa: F401, which Trainer needs
    import torch
    from datasets import Dataset
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

logging.disable(logging.WARNING)
torch.manual_seed(0)
documents = Dataset.from_dict({"input_ids": [torch.randint(1, 500, (n,)).tolist() for n in range(5, 21)]})


def by_hand(features: list[dict]) -> dict[str, torch.Tensor]:
    """Concatenates documents and restarts their positions: what many scripts do."""
    ids = torch.cat([torch.tensor(feature["input_ids"]) for feature in features])[None]
    positions = torch.cat([torch.arange(len(feature["input_ids"])) for feature in features])[None]
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


collators = {
    "by hand": by_hand,
    "DataCollatorWithFlattening": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
}
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
for name, collator in collators.items():
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))
        report = crosspack.audit(Trainer(model, arguments, train_dataset=documents, data_collator=collator))
    print(f"{name}: {report.verdict}; gradient cosine {report.cosine:.3f}, leak {report.leak:.1e}")
    print(f"  trained tokens {report.targets}, divided by {report.counted}")
