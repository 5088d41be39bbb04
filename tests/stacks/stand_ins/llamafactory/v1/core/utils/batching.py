"""Batches of v1: documents of a micro-batch one after the other, told apart by positions."""

import torch


class BatchGenerator:
    def __init__(
        self,
        dataset,
        renderer,
        micro_batch_size=1,
        global_batch_size=None,
        cutoff_len=2048,
        batching_workers=0,
        batching_strategy="normal",
        pin_memory=True,
        drop_last=True,
        seed=42,
    ):
        self.documents, self.micro_batch_size, self.done = dataset, micro_batch_size, False

    def _generate_batch(self):
        if self.done:
            return None
        self.done, batch = True, []
        for start in range(0, len(self.documents), self.micro_batch_size):
            documents = self.documents[start : start + self.micro_batch_size]
            labels = [label if i else -100 for ids, labels in documents for i, label in enumerate(labels)]
            row = {
                "input_ids": [token for ids, _ in documents for token in ids],
                "labels": labels,
                "loss_weights": [float(label != -100) for label in labels],
                "position_ids": [i for ids, _ in documents for i in range(len(ids))],
                "attention_mask": [1] * len(labels),
            }
            batch.append({name: torch.tensor([values]) for name, values in row.items()})
        return batch
