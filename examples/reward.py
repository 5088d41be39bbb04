"""A reward model trained on packed rows: TRL's RewardTrainer as you build it, and one line.

Run it: python examples/reward.py
Needs: pip install 'crosspack[hf]'
"""

from tempfile import TemporaryDirectory

try:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
    from trl import RewardConfig, RewardTrainer

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

torch.manual_seed(0)
words = ["<pad>", "<end>", "good", "bad", *(f"word{i}" for i in range(60))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def answer(quality: str) -> str:
    drawn = torch.randint(4, len(words), (int(torch.randint(3, 40, ())),))
    return f"{quality} " + " ".join(words[i] for i in drawn) + " <end>"


pairs = [{"chosen": answer("good"), "rejected": answer("bad")} for _ in range(128)]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
with TemporaryDirectory() as folder:
    trainer = RewardTrainer(
        LlamaForSequenceClassification(LlamaConfig(vocab_size=len(words), num_labels=1, pad_token_id=0, **sizes)),
        args=RewardConfig(
            folder,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            logging_steps=4,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    crosspack.enable_packing(trainer)  # the line
    print("packed:", crosspack.audit(trainer))
    trainer.train()

for entry in trainer.state.log_history:
    if "accuracy" in entry:
        print(f"loss {float(entry['loss']):.3f}, accuracy {float(entry['accuracy']):.2f}")
