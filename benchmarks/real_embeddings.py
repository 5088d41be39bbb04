"""Measures the embeddings of a trained encoder, and what contamination does to its fine-tuning.

    python -m benchmarks.real_embeddings FOLDER gsm8k_train.jsonl        # all-MiniLM-L6-v2: some minutes

The model embeds a text as the mean of its hidden states. Its texts are run padded; as stock packing runs them, in one
row whose ``position_ids`` start anew in every text; and by ``crosspack.patch`` in the same row. Printed is how far
embeddings are from those of each text alone. Then a short fine-tuning by pairs, a question and the first line of its
answer, with the other answers of a batch as negatives: every way takes the same batches, and the held-out metric, how
often a question is nearest to its own answer among all held-out ones, is always of texts that were run padded. Float32,
SDPA, without dropout.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import crosspack
from benchmarks._report import machine, table, versions
from torch_backend.job.embeddings import contrastive_loss, mean_of_tokens

Text = list[int]
WAYS = ("padded", "contaminated", "exact")
LONGEST = 128  # tokens of a text
SENTENCE = re.compile(r"(?<=[.?!])\s+")  # between two of them


def pairs_of(data: Path, tokenizer: Any, count: int) -> list[tuple[Text, Text]]:
    """Returns the last sentence of a prompt and the first line of its completion, of the first ``count`` records."""
    with data.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in islice(lines, count)]
    texts = [[SENTENCE.split(r["prompt"].strip())[-1], r["completion"].partition("\n")[0]] for r in records]
    found = [tokenizer(both, truncation=True, max_length=LONGEST)["input_ids"] for both in texts]
    return [(question, answer) for question, answer in found]


def embeddings(model: Any, texts: Sequence[Text], way: str) -> Tensor:
    """Embeds texts; returns [texts, D]. The model is patched for ``exact`` and not for the other ways."""
    if way == "padded":
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        lengths = torch.tensor([[len(text)] for text in texts])
        mask = (torch.arange(longest) < lengths).long()
        return mean_of_tokens(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
    if way == "exact":
        batch = crosspack.PackedCollator()([{"input_ids": text} for text in texts])
        return crosspack.reduce(model(**batch).last_hidden_state, batch, "mean")
    ids = torch.tensor([list(chain(*texts))])
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    hidden = model(input_ids=ids, position_ids=positions, token_type_ids=torch.zeros_like(ids)).last_hidden_state
    return torch.stack([part.mean(0) for part in hidden[0].split([len(text) for text in texts])])


@torch.no_grad()
def found_first(model: Any, pairs: Sequence[tuple[Text, Text]]) -> float:
    """Returns the share of questions whose own answer is the nearest of all."""
    sides = [torch.cat([embeddings(model, side[i : i + 32], "padded") for i in range(0, len(side), 32)])
             for side in zip(*pairs, strict=True)]  # fmt: skip
    questions, answers = (F.normalize(side, dim=-1) for side in sides)
    return float(((questions @ answers.T).argmax(1) == torch.arange(len(pairs))).float().mean())


def apart(model: Any, texts: Sequence[Text]) -> list[list[str]]:
    """Returns how far each way's embeddings are from those of each text alone: 1 - cosine, mean and largest."""
    rows = []
    with torch.no_grad():
        alone = torch.cat([embeddings(model, [text], "padded") for text in texts])
        for way in WAYS:
            if way == "exact":
                crosspack.patch(model, verify=False)
            distance = 1 - F.cosine_similarity(embeddings(model, texts, way).double(), alone.double())
            rows.append([way, f"{float(distance.mean()):.2e}", f"{float(distance.max()):.2e}"])
    crosspack.unpatch(model)
    return rows


def fine_tuned(
    folder: str, way: str, pairs: Sequence[tuple[Text, Text]], given: argparse.Namespace, seed: int
) -> tuple[Any, list[float]]:
    """Trains the model in one way; returns it, not patched, and the loss of each step."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()  # no dropout
    if way == "exact":
        crosspack.patch(model, verify=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    order, losses = np.random.default_rng(seed), []
    for _ in range(given.steps):
        chosen = [pairs[i] for i in order.choice(len(pairs), given.pairs, replace=False)]
        texts = [*chain(*zip(*chosen, strict=True))]  # all questions, then all answers
        loss = contrastive_loss(embeddings(model, texts, way), 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if way == "exact":
        crosspack.unpatch(model)
    return model, losses


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a folder or a hub name of an encoder")
    options.add_argument("data", type=Path, help="a .jsonl file with prompt and completion")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--pairs", type=int, default=16, help="of a step")
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--held-out", type=int, default=512, help="pairs of the held-out metric")
    options.add_argument("--train", type=int, default=4096, help="pairs that batches are drawn from")
    options.add_argument("--rate", type=float, default=5e-5, help="learning rate")
    given = options.parse_args(arguments)
    pairs = pairs_of(given.data, AutoTokenizer.from_pretrained(given.model), given.held_out + given.train)
    held_out, pairs = pairs[: given.held_out], pairs[given.held_out :]
    model = AutoModel.from_pretrained(given.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    print(machine(), versions("torch", "transformers"), sep="\n")
    print(f"{given.model}: {given.steps} steps of {given.pairs} pairs, {len(held_out)} held-out pairs\n")
    print(table(["1 - cosine to each text alone", "mean", "largest"], apart(model, list(chain(*held_out[:16])))))
    found: dict[str, list[float]] = {"before": [found_first(model, held_out)]}
    print(f"\nbefore training: {found['before'][0]:.4f}", flush=True)
    for seed in range(given.seeds):
        for way in WAYS:
            trained, losses = fine_tuned(given.model, way, pairs, given, seed)
            found.setdefault(way, []).append(found_first(trained, held_out))
            print(f"seed {seed}, {way}: {found[way][-1]:.4f}, loss {losses[0]:.6f} to {losses[-1]:.6f}", flush=True)
    print(table(["own answer first", "share"], [[w, ", ".join(f"{x:.4f}" for x in s)] for w, s in found.items()]))
    return found


if __name__ == "__main__":
    main()
