"""The loaders that a trainer iterates over and checkpoints."""

from dataclasses import dataclass

from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.config import Configurable


class BaseDataLoader(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataset: str = ""
        dataset_path: str | None = None


class ParallelAwareDataloader(StatefulDataLoader, BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_workers: int = 0
        persistent_workers: bool = False
        pin_memory: bool = False
        prefetch_factor: int | None = None

    def __init__(self, dataset, dp_rank, dp_world_size, **kwargs):
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        super().__init__(dataset, **kwargs)
