"""Classification of documents on packed rows: a Trainer with a sequence classifier, and one line.

Run it: python examples/classification.py
Needs: pip install 'crosspack[hf]'
"""

from tempfile import TemporaryDirectory

try:
    import accelerate  # noqa: F401, which Trainer needs
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import ModernBertConfig, ModernBertForSequenceClassification, Trainer, TrainingArguments

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

PAD, FIRST, WORDS, CLASSES = 0, 10, 64, 3
rng = np.random.default_rng(0)


def documents(count: int) -> Dataset:
    """Documents of 4 to 100 tokens; a document's class is that of the marker which it holds, somewhere."""
    lengths = np.clip(rng.lognormal(2.8, 0.7, count), 4, 100).astype(int)
    tokens = [rng.integers(FIRST, WORDS, length) for length in lengths]
    classes = rng.integers(0, CLASSES, count)
    for document, label in zip(tokens, classes, strict=True):
        document[rng.integers(len(document))] = label + 1
    return Dataset.from_dict({"input_ids": [x.tolist() for x in tokens], "label": classes.tolist()})


def padded(features: list[dict]) -> dict[str, torch.Tensor]:
    """Collates a batch without packing."""
    longest = max(len(x["input_ids"]) for x in features)
    ids = torch.tensor([x["input_ids"] + [PAD] * (longest - len(x["input_ids"])) for x in features])
    labels = torch.tensor([x["label"] for x in features])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
tokens = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 4, "eos_token_id": 5}
tokens |= {"cls_token_id": 4, "sep_token_id": 5}
config = ModernBertConfig(
    **sizes, **tokens, num_labels=CLASSES, classifier_pooling="mean", global_attn_every_n_layers=2
)
with TemporaryDirectory() as folder:
    trainer = Trainer(
        ModernBertForSequenceClassification(config),
        TrainingArguments(
            folder,
            per_device_train_batch_size=2,  # rows of 256 tokens, about 24 documents
            per_device_eval_batch_size=32,
            num_train_epochs=6,
            learning_rate=3e-3,
            logging_steps=50,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        data_collator=padded,
        train_dataset=documents(600),
        eval_dataset=documents(100),
        compute_metrics=accuracy,
    )
    crosspack.enable_packing(trainer, capacity=256)  # the line
    trainer.train()
    figures = trainer.evaluate()
print(f"accuracy {figures['eval_accuracy']:.2f}, loss {figures['eval_loss']:.3f}")
assert figures["eval_accuracy"] > 0.9
