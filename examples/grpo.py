"""GRPO on packed rows: generation as in stock TRL, and every forward that scores completions without padding.

Run it: python examples/grpo.py
Needs: pip install 'crosspack[hf]'
"""

from tempfile import TemporaryDirectory

try:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

torch.manual_seed(0)
words = ["<pad>", "<end>", *(f"word{i}" for i in range(14))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
prompts = [
    {"prompt": " ".join(words[i] for i in torch.randint(2, len(words), (int(torch.randint(2, 9, ())),)))}
    for _ in range(64)
]


def even_words(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The share of words of a completion whose number is even."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
with TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **special, **sizes)),
        even_words,
        args=GRPOConfig(
            folder,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=24,
            max_steps=16,
            learning_rate=3e-3,
            logging_steps=4,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
    )
    crosspack.enable_packing(trainer)  # the line
    print("packed:", crosspack.audit(trainer))
    trainer.train()

for entry in trainer.state.log_history:
    if "reward" in entry:
        print(f"reward {float(entry['reward']):.3f}, mean length {float(entry['completions/mean_length']):.1f}")
