"""The hooks of a callback that Crosspack uses."""


class Callback:
    def setup(self, trainer, pl_module, stage):
        pass

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pass
