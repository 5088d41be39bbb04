"""DPO on packed rows: TRL's DPOTrainer as you build it, and one line; both answers of every pair share a row.

Run it: python examples/dpo.py
Needs: pip install 'crosspack[hf]'
"""

from tempfile import TemporaryDirectory

try:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

torch.manual_seed(0)
words = ["<pad>", "<end>", "good", "bad", *(f"word{i}" for i in range(60))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def text(longest: int, more: str = "") -> str:
    drawn = torch.randint(4, len(words), (int(torch.randint(3, longest, ())),))
    return " ".join([words[i] for i in drawn] + ([more] if more else []))


def answers(quality: str) -> str:  # a few long answers among many short ones, as in real data
    return f" {quality} {text(120 if torch.rand(()) < 0.2 else 20)} <end>"


pairs = [{"prompt": text(12), "chosen": answers("good"), "rejected": answers("bad")} for _ in range(96)]


def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes))


with TemporaryDirectory() as folder:
    trainer = DPOTrainer(
        model(),
        model(),  # the reference
        args=DPOConfig(
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
    print("as it is:", crosspack.audit(trainer))
    crosspack.enable_packing(trainer)  # the line: no padding in any forward, the loss and its metrics as they were
    print("packed:  ", crosspack.audit(trainer))
    trainer.train()

for entry in trainer.state.log_history:
    if "rewards/margins" in entry:
        margin, accuracy = float(entry["rewards/margins"]), float(entry["rewards/accuracies"])
        print(f"loss {float(entry['loss']):.3f}, margin {margin:.3f}, accuracy {accuracy:.2f}")
