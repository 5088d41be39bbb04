"""sentence-transformers' trainer, padded and packed by ``crosspack.enable_packing``: same losses, how much faster.

    python -m benchmarks.embeddings           # on the GPU if there is one; --tiny: to see that everything runs
    python -m benchmarks.embeddings --shape modernbert --means 30 300 --batch 512 --bf16

Pairs are questions and answers of GSM8K, or with ``--means`` random words whose numbers are lognormal with these means;
MultipleNegativesRankingLoss compares them within a batch. Weights are random, without dropout, so that losses can be
compared. Of the rounds of each, in turn, the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

import crosspack
from benchmarks.gpu_workload import GSM8K

WARM_UP = 3
MINILM = {"hidden_size": 384, "intermediate_size": 1_536, "num_hidden_layers": 6}
MINILM |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPES = {"minilm": ("bert", MINILM), "modernbert": ("modernbert", {}), "tiny": ("bert", MINILM | {"hidden_size": 48})}
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


class Clock(transformers.TrainerCallback):
    """Times the steps after the first few."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == WARM_UP:
            self.started = now()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds = (now() - self.started) / (state.global_step - WARM_UP)


def now() -> float:
    """Returns seconds of the clock on a GPU, and those of the process on a CPU, which others may load."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def made_up(count: int, means: list[int]) -> list[tuple[str, ...]]:
    """Returns as many tuples of texts, one text for each mean number of words."""
    generator, words = np.random.default_rng(0), [f"w{number}" for number in range(8_000)]
    lengths = generator.lognormal(np.log(means) - 0.18, 0.6, (count, len(means))).astype(int).clip(2, 510)
    return [tuple(" ".join(generator.choice(words, length)) for length in row) for row in lengths]


def save(folder: str, shape: str, texts: list[str]) -> None:
    """Save a model with random weights and a tokenizer made from the texts."""
    backend, special = Tokenizer(models.BPE(unk_token="[UNK]")), list(SPECIAL.values())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=30_000, special_tokens=special))
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL).save_pretrained(folder)
    torch.manual_seed(0)
    family, sizes = SHAPES[shape]
    ids = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.AutoConfig.for_model(family, vocab_size=len(backend.get_vocab()), **sizes, **ids)
    transformers.AutoModel.from_config(config).save_pretrained(folder)


def train(folder: str, pairs: Dataset, chosen: argparse.Namespace, packed: bool) -> tuple[list[float], float, float]:
    """Returns the losses of the steps, the seconds of one, and the most GiB allocated."""
    model, clock, on_gpu = SentenceTransformer(folder), Clock(), torch.cuda.is_available()  # it takes means
    loss = MultipleNegativesRankingLoss(model)
    options = {"max_steps": chosen.steps + WARM_UP, "learning_rate": 1e-4, "bf16": chosen.bf16, "logging_steps": 1}
    options |= {"per_device_train_batch_size": chosen.batch, "save_strategy": "no", "disable_tqdm": True}
    args = SentenceTransformerTrainingArguments(folder, report_to=[], **options)
    trainer = SentenceTransformerTrainer(model, args, pairs, loss=loss, callbacks=[clock])
    trainer.remove_callback(transformers.PrinterCallback)
    if packed:
        crosspack.enable_packing(trainer)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    print("packed" if packed else "padded", f"{chosen.batch / clock.seconds:.1f} pairs/s", flush=True)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, clock.seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=GSM8K)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    for name, default in (("batch", 32), ("steps", 12), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--means", type=int, nargs=2, help="words of made-up pairs, in the mean")
    for name in ("bf16", "tiny"):
        parser.add_argument(f"--{name}", action="store_true")
    chosen = parser.parse_args()
    if chosen.tiny:
        chosen.shape, chosen.batch, chosen.steps, chosen.rounds = "tiny", 4, 3, 1
    if chosen.means:
        texts = made_up(chosen.batch * (chosen.steps + WARM_UP), chosen.means)
    else:
        records = map(json.loads, chosen.data.read_text().splitlines())
        texts = [(record["prompt"], record["completion"]) for record in records]
    pairs = Dataset.from_list([dict(zip(("anchor", "positive"), pair, strict=True)) for pair in texts])
    with TemporaryDirectory() as folder:
        save(folder, chosen.shape, [text for pair in texts for text in pair])
        rounds = [[train(folder, pairs, chosen, packed) for packed in (False, True)] for _ in range(chosen.rounds)]
    best = [min(runs, key=lambda run: run[1]) for runs in zip(*rounds, strict=True)]
    (losses, padded, *_), (others, packed, *_) = best
    for name, (_, seconds, memory) in zip(("padded", "packed"), best, strict=True):
        print(f"{name}: {chosen.batch / seconds:.1f} pairs/s, {memory:.2f} GiB")
    apart = max(abs(a - b) / abs(a) for a, b in zip(losses, others, strict=True))
    print(f"{padded / packed:.2f} times as fast; the losses of {len(losses)} steps differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
