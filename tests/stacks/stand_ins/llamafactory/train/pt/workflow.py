"""The trainer of ``stage: pt``."""

from transformers import Trainer


class CustomTrainer(Trainer):
    def __init__(self, finetuning_args, processor, model_args=None, **kwargs):
        kwargs["processing_class"] = kwargs.pop("tokenizer")
        super().__init__(**kwargs)
        self.finetuning_args = finetuning_args

    def _get_train_sampler(self, *args, **kwargs):
        return super()._get_train_sampler(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)
