"""The trainer of ``stage: sft``."""

from torch.utils.data import SequentialSampler
from transformers import Seq2SeqTrainer


class CustomSeq2SeqTrainer(Seq2SeqTrainer):
    def __init__(self, finetuning_args, processor, model_args=None, gen_kwargs=None, ref_model=None, **kwargs):
        kwargs["processing_class"] = kwargs.pop("tokenizer")
        super().__init__(**kwargs)
        self.finetuning_args = finetuning_args

    def _get_train_sampler(self, *args, **kwargs):
        if self.finetuning_args.disable_shuffling:
            return SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)
