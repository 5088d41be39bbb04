"""Stands in for Composer in tests: its callbacks and its description of data, as of version 0.32.1."""


class Callback:
    def init(self, state, logger):
        pass

    def batch_start(self, state, logger):
        pass


class DataSpec:
    def __init__(
        self,
        dataloader,
        num_samples=None,
        num_tokens=None,
        batch_transforms=None,
        microbatch_transforms=None,
        split_batch=None,
        get_num_samples_in_batch=None,
        get_num_tokens_in_batch=None,
    ):
        self.dataloader = dataloader
        self.split_batch = split_batch
        self.get_num_samples_in_batch = get_num_samples_in_batch
        self.get_num_tokens_in_batch = get_num_tokens_in_batch
