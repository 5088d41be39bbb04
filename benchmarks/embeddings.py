r"""sentence-transformers' trainers, padded and packed by ``crosspack.enable_packing``: same losses, how much faster.

    python -m benchmarks.embeddings           # on the GPU if there is one; --tiny: to see that everything runs
    python -m benchmarks.embeddings --shape modernbert --means 30 300 --batch 512 --bf16 --contenders flash \
        packed packed/selective
    python -m benchmarks.embeddings --task late --batch 32                # MultiVectorEncoder: MaxSim over tokens
    python -m benchmarks.embeddings --shape xlmr-large --task rerank --means 10 150 --batch 8 --bf16

Pairs are questions and answers of GSM8K, or with ``--means`` random words whose numbers are lognormal with these means;
MultipleNegativesRankingLoss compares them within a batch. Rerankers score made-up lists of 16 documents under
LambdaLoss, and a batch is as many lists. Weights are random, or those of ``--model``, without dropout, so that losses
can be compared; those of rerankers in float32 alone, because LambdaLoss weighs documents by their ranks, which bfloat16
changes where scores are close, in the library's own mini-batches too. Of the rounds of each contender, in turn, the
fastest counts; "padded/32" pads mini-batches of 32, "flash" is FlashAttention without padding where the library has it,
"packed/selective" names a level of memory. Losses are read after the last step, and logged as seldom as the library
does. One that runs out of memory is named.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from sentence_transformers import cross_encoder, multi_vector_encoder, sentence_transformer
from sentence_transformers.multi_vector_encoder import losses as late_losses
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

import crosspack
from benchmarks import _board_flash
from benchmarks.clock import StepClock
from benchmarks.harness import free
from benchmarks.report import machine, versions
from benchmarks.workload import GSM8K

WARM_UP = 3  # steps
MINILM: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1_536, "num_hidden_layers": 6}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MINILM |= WITHOUT_DROPOUT
LARGE: dict[str, Any] = {
    "hidden_size": 1_024,
    "intermediate_size": 4_096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
LARGE |= {"max_position_embeddings": 514} | WITHOUT_DROPOUT
SHAPES = {"minilm": ("bert", MINILM), "modernbert": ("modernbert", {}), "tiny": ("bert", MINILM | {"hidden_size": 48})}
SHAPES |= {"xlmr-large": ("xlm-roberta", LARGE)}
LONGEST = 512  # tokens of a text, or of a query with its document
LISTED = 16  # documents of a query
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def made_up(count: int, means: list[int]) -> list[tuple[str, ...]]:
    """Returns as many tuples of texts, one text for each mean number of words."""
    generator, words = np.random.default_rng(0), [f"w{number}" for number in range(8_000)]
    lengths = generator.lognormal(np.log(means) - 0.18, 0.6, (count, len(means))).astype(int).clip(2, 510)
    return [tuple(" ".join(generator.choice(words, length)) for length in row) for row in lengths]


def lists(count: int, means: list[int]) -> list[dict[str, Any]]:
    """Returns as many queries, each with its documents, of which the first is relevant."""
    texts = made_up(count, [means[0]] + [means[1]] * LISTED)
    return [{"query": query, "docs": docs, "labels": [1.0] + [0.0] * (LISTED - 1)} for query, *docs in texts]


def save(folder: str, shape: str, task: str, texts: list[str]) -> None:
    """Save a model with random weights and a tokenizer made from the texts."""
    backend, special = Tokenizer(models.BPE(unk_token="[UNK]")), list(SPECIAL.values())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=30_000, special_tokens=special))
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=LONGEST, **SPECIAL)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    family, sizes = SHAPES[shape]
    ids = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.AutoConfig.for_model(family, vocab_size=len(backend.get_vocab()), **sizes, **ids)
    if task != "rerank":
        transformers.AutoModel.from_config(config).save_pretrained(folder)
    else:
        config.num_labels = 1
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def parts(folder: str, chosen: argparse.Namespace, contender: str) -> tuple[Any, Any, Any, Any]:
    """Returns a model, its loss, and the classes of its trainer and of the trainer's arguments."""
    name, _, more = contender.partition("/")
    size = int(more) if more.isdigit() else 0  # of mini-batches
    options = {"attn_implementation": _board_flash.NAME if name == "flash" else "sdpa"}
    if chosen.task == "rerank":
        reranker = cross_encoder.CrossEncoder(folder, num_labels=1, model_kwargs=options)
        loss = cross_encoder.losses.LambdaLoss(reranker, mini_batch_size=size or -1)
        return reranker, loss, cross_encoder.CrossEncoderTrainer, cross_encoder.CrossEncoderTrainingArguments
    late = chosen.task == "late"
    library: Any = multi_vector_encoder if late else sentence_transformer
    kind = "MultiVectorEncoder" if late else "SentenceTransformer"
    torch.manual_seed(0)  # of late interaction's projection
    model = getattr(library, kind)(folder, model_kwargs=options)
    name = "Cached" * bool(size) + "MultiVector" * late + "MultipleNegativesRankingLoss"
    sizes = {"mini_batch_size": size} if size else {}
    loss = getattr(late_losses if late else library.losses, name)(model, **sizes)
    return model, loss, getattr(library, f"{kind}Trainer"), getattr(library, f"{kind}TrainingArguments")


def train(folder: str, pairs: Dataset, chosen: argparse.Namespace, contender: str) -> tuple[list[float], float, float]:
    """Returns the losses of the steps, the seconds of one, and the most GiB allocated."""
    model, loss, kind, arguments = parts(folder, chosen, contender)
    clock = StepClock(WARM_UP, chosen.steps)
    options = {"max_steps": chosen.steps + WARM_UP, "learning_rate": 1e-4, "bf16": chosen.bf16}
    options |= {"per_device_train_batch_size": chosen.batch, "save_strategy": "no", "disable_tqdm": True}
    trainer = kind(model, arguments(folder, report_to=[], **options), pairs, loss=loss, callbacks=[clock.callback()])
    trainer.remove_callback(transformers.PrinterCallback)
    name, _, level = contender.partition("/")
    memory: Any = level or None
    if name == "packed":
        crosspack.enable_packing(trainer, verify=False, memory=memory)  # the losses are compared
    losses, step = list[Any](), trainer.training_step

    def recorded(*arguments: Any, **options: Any) -> Any:
        losses.append(step(*arguments, **options))
        return losses[-1]

    trainer.training_step = recorded
    trainer.train()
    print(contender, f"{chosen.batch / clock.ms * 1e3:.1f} {chosen.unit}/s", flush=True)
    return [float(loss) for loss in losses], clock.ms / 1e3, clock.peak


def rounds_of(folder: str, pairs: Dataset, chosen: argparse.Namespace) -> dict[str, tuple[list[float], float, float]]:
    """Returns the fastest round of each contender that has memory enough."""
    _board_flash.register()
    best: dict[str, tuple[list[float], float, float]] = {}
    for _ in range(chosen.rounds):
        for contender in list(chosen.contenders):
            free()  # of the models before it
            try:
                run = train(folder, pairs, chosen, contender)
            except torch.OutOfMemoryError:
                print(f"{contender}: out of memory", flush=True)
                chosen.contenders.remove(contender)
                continue
            best[contender] = min(best.get(contender, run), run, key=lambda run: run[1])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=GSM8K)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--model", help="a folder with trained weights, in place of random ones")
    parser.add_argument("--task", choices=("embed", "late", "rerank"), default="embed")
    for name, default in (("batch", 32), ("steps", 12), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--means", type=int, nargs=2, help="words of made-up pairs, in the mean")
    parser.add_argument("--contenders", nargs="+", default=["padded", "packed"], help="packed among them")
    for name in ("bf16", "tiny"):
        parser.add_argument(f"--{name}", action="store_true")
    chosen = parser.parse_args()
    if chosen.tiny:
        chosen.shape, chosen.batch, chosen.steps, chosen.rounds = "tiny", 4, 3, 1
    chosen.unit, needed = "lists" if chosen.task == "rerank" else "pairs", chosen.batch * (chosen.steps + WARM_UP)
    if chosen.task == "rerank":
        records = lists(needed, chosen.means or [10, 150])
        texts = [text for record in records for text in (record["query"], *record["docs"])]
    else:
        lines = map(json.loads, [] if chosen.means else chosen.data.read_text().rstrip().split("\n"))
        pairs = [(line["prompt"], line["completion"]) for line in lines] or made_up(needed, chosen.means)
        records = [{"anchor": anchor, "positive": positive} for anchor, positive in pairs]
        texts = [text for pair in pairs for text in pair]
    print(machine(), versions("torch", "transformers", "sentence-transformers", "crosspack"), sep="\n")
    with TemporaryDirectory() as folder:
        if chosen.model is None:
            save(folder, chosen.shape, chosen.task, texts)
        else:
            shutil.copytree(chosen.model, folder, dirs_exist_ok=True)
            transformers.AutoConfig.from_pretrained(folder, **WITHOUT_DROPOUT).save_pretrained(folder)
        best = rounds_of(folder, Dataset.from_list(records), chosen)
    for name, (_, seconds, memory) in best.items():
        print(f"{name}: {chosen.batch / seconds:.1f} {chosen.unit}/s, {memory:.2f} GiB")
    for packed in [name for name in best if name.startswith("packed")]:
        losses, fastest, _ = best.pop(packed)
        for name, (others, seconds, _) in best.items():
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))
            print(f"{packed}: {seconds / fastest:.2f} times {name}; {len(losses)} losses differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
