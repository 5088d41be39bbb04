"""The trainer of language models, with the methods that axolotl replaces for its multipack."""

from transformers import Trainer


class AxolotlTrainer(Trainer):
    def __init__(self, *_args, bench_data_collator=None, eval_data_collator=None, dataset_tags=None, **kwargs):
        self.eval_data_collator = eval_data_collator
        super().__init__(*_args, **kwargs)
        self.model_accepts_loss_kwargs = False  # as axolotl finds for most models, in whose decoder it looks

    def _get_train_sampler(self, train_dataset=None):
        return super()._get_train_sampler(train_dataset)

    def _get_eval_sampler(self, eval_dataset=None):
        return super()._get_eval_sampler(eval_dataset)

    def _get_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None
    ):
        collator, self.data_collator = (
            self.data_collator,
            self.data_collator if is_training else self.eval_data_collator,
        )
        try:
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        finally:
            self.data_collator = collator

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
