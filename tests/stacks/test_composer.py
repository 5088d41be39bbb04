"""The callback for Composer on a stand-in; ``python -m tests.stacks composer`` trains in a release."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import crosspack
from packing_core.errors import UnsupportedError, UnsupportedModelError
from tests.stacks.test_lightning import packed
from tests.torch_backend.trainers.test_trainer import llama


class Wrapper(torch.nn.Module):
    """Hands on the keys that the signature of the model's forward has, as ``HuggingFaceModel`` does."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model
        self.model_forward_args = {"input_ids", "labels", "position_ids", "attention_mask"}

    def forward(self, batch):
        return self.model(**{name: value for name, value in batch.items() if name in self.model_forward_args})


def test_the_wrapper_hands_the_segments_on(plugin) -> None:
    callback, model = plugin.ComposerPacking(verify=False), llama()
    state = SimpleNamespace(model=Wrapper(model), batch=packed(model))
    with pytest.raises(UnsupportedModelError, match="a packed batch reached a model that is not patched"):
        state.model(state.batch)  # the wrapper drops the segments, and the tokens know them
    callback.init(state, None)
    state.model(state.batch).loss.backward()  # a patched model without segments raises here


def test_a_batch_that_the_loss_of_a_model_cannot_count_is_refused(plugin) -> None:
    callback, model = plugin.ComposerPacking(verify=False), llama()
    wrapper = Wrapper(model)
    callback.init(SimpleNamespace(model=wrapper), None)
    rows = crosspack.PackedDataset([[*range(4, 20)], [5, 6, 7]], 40, weighting="document")
    with pytest.raises(UnsupportedModelError, match=r"loss_weights \(weighting=.document.\), which the loss of Llama"):
        wrapper(crosspack.PackedCollator(model)([rows[0]]))
    prompt = [*range(4, 30)]
    documents = [{"input_ids": [*prompt, 40 + i, 50], "labels": [-100] * 26 + [40 + i, 50]} for i in range(3)]
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot run shared prefixes: its own loss"):
        wrapper(crosspack.PackedCollator(model, share_prefix=True)(documents))


def test_a_batch_counts_rows_and_targets_and_is_cut_by_nothing(plugin) -> None:
    batch, loader = packed(llama()), object()
    spec, rows = plugin.packed_spec(loader), len(batch["input_ids"])
    assert spec.dataloader is loader and rows > 1
    assert spec.get_num_samples_in_batch(batch) == rows
    counted = {"total": 40 * rows, "loss_generating": sum(label != -100 for label in batch["labels"].view(-1).tolist())}
    assert spec.get_num_tokens_in_batch(batch) == counted
    assert spec.split_batch(batch, rows) == [batch]
    with pytest.raises(UnsupportedError, match="device_train_microbatch_size=1 cuts a packed batch of . rows"):
        spec.split_batch(batch, 1)
