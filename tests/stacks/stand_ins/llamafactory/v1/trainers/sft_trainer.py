"""v1's trainer, which weighs the loss of each micro-batch by its targets."""

import torch

ran = []


class SFTTrainer:
    def __init__(self, args, model, renderer, train_dataset, callbacks=None):
        self.args, self.model, self.renderer, self.train_dataset = args, model, renderer, train_dataset
        self.device = torch.device("cpu")
        self._create_batch_generator()

    def _create_batch_generator(self):
        raise ValueError("`padding_free` requires `flash_attn: flash_attention_2`.")

    def compute_log_probs(self, model, batch):
        raise NotImplementedError

    def compute_loss(self, batch):
        weights = batch["loss_weights"][..., 1:]
        return (-self.compute_log_probs(self.model, batch) * weights).sum() / weights.sum()

    def fit(self):
        micro_batches = self.train_batch_generator._generate_batch()
        targets = [int((each["labels"] != -100).sum()) for each in micro_batches]
        for micro_batch, count in zip(micro_batches, targets, strict=True):
            (self.compute_loss(micro_batch) * count / sum(targets)).backward()


def run_sft(args=None):
    ran.append((SFTTrainer, args))
