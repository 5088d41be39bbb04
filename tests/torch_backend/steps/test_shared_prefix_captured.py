"""Shared prefixes in fixed shapes: work lists made on the device, pairs of the loss, and a step as one CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from packing_core.errors import UnsupportedError
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import documents, error, patched, tiny
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.losses.next_tokens import NextTokens
from torch_backend.ops.attention import triton_work
from torch_backend.ops.attention.triton_work import key_parts, key_sums, key_tiles, query_parts, query_tiles
from torch_backend.segments import PackedMetadata
from torch_backend.steps.fixed_shapes import FixedShapes

# a prompt of 35 with an answer of 5 and a turn of 2; two answers to that, of 1 and 9; a document of 3 with an answer
LENGTHS, PARENTS = (35, 5, 2, 1, 9, 3, 4), (-1, 0, 0, 2, 2, -1, 5)
TOKENS = sum(LENGTHS)


def metadata(on_device: bool) -> PackedMetadata:
    packed = PackedMetadata.from_lengths(LENGTHS, parents=PARENTS, entries=12 if on_device else None)
    if on_device:
        packed.continue_segments(torch.tensor([*PARENTS, -1, -1]), 4)
        packed.hide_values()
    return packed


@pytest.mark.parametrize("shortest", [256, 7])
@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize(("tiles", "parts"), [(query_tiles, query_parts), (key_tiles, key_parts)])
def test_lists_made_on_the_device_are_those_of_the_host(tiles, parts, size, shortest, monkeypatch) -> None:
    monkeypatch.setattr(triton_work, "SHORTEST", shortest)  # of 7: walks of keys are cut
    monkeypatch.setattr(triton_work, "PROGRAMS", 24)

    def read(packed: PackedMetadata) -> list[Any]:
        """Each tile that has tokens, with its parts."""
        found = []
        for first, length, start, begin, end, *share in tiles(packed, size).tolist():
            if length:
                found.append((first, length, start, parts(packed)[begin:end].tolist(), share))
        return found

    on_host, on_device = read(metadata(False)), read(metadata(True))
    assert on_device == on_host and len(on_host) > len(LENGTHS)
    if tiles is key_tiles:
        sums, room = key_sums(metadata(False), size), key_sums(metadata(True), size)
        assert torch.equal(room[: len(sums)], sums) and not room[len(sums) :, 3].any()
        assert (shortest == 7) == bool(sums[:, 3].any())
    other = metadata(True)
    other.parent_index = torch.full_like(other.parent_index, -1)
    assert [x.shape for x in (tiles(other, size), parts(other))] == [
        x.shape for x in (tiles(metadata(True), size), parts(metadata(True)))
    ]


def test_positions_count_on_from_what_a_segment_continues() -> None:
    assert metadata(True).position_ids.tolist() == metadata(False).position_ids.tolist()


def tree(*prompts: tuple[int, ...], seed: int = 0, capacity: int = 96) -> dict[str, Tensor]:
    """A row of answers of such lengths to prompts, (prompt, answer, answer, ...) each."""
    features = []
    for number, (length, *answers) in enumerate(prompts):
        prompt, *ends = documents((length, *answers), seed=seed + number)
        features += [{"input_ids": torch.cat([prompt, end]).tolist(), "prompt_length": length} for end in ends]
    return PackedCollator(capacity=capacity, share_prefix=True)(features)


def test_the_loss_pairs_each_first_token_with_the_end_of_its_prompt() -> None:
    batch, shapes = tree((20, 3, 5), (17, 4, 1, 2)), FixedShapes()
    batch["labels"][0, 0] = 7  # nothing predicts the first token of a row, whatever its label
    shapes.forests = True
    fixed = shapes(batch)
    assert fixed["packed_parent_index"].shape == (len(fixed["cu_seq_lens_q"]) - 1,) and fixed["packed_depth"] == 1

    def pairs(batch: dict[str, Any], pairs: NextTokens) -> list[tuple[float, int]]:
        hidden = torch.arange(batch["labels"].numel(), dtype=torch.float64)[None, :, None]
        predicted, targets = pairs.hidden(hidden)[0, :, 0].tolist(), pairs.targets(batch["labels"])[0].tolist()
        return sorted(pair for pair in zip(predicted, targets, strict=True) if pair[1] != -100)

    right, found = NextTokens(batch), NextTokens(fixed)
    assert pairs(fixed, found) == pairs(batch, right) and len(pairs(batch, right)) == 15
    shape = batch["labels"].shape
    results = []
    for each, given in ((right, batch), (found, fixed)):
        of_targets = each.targets(given["labels"]).double()[..., None]
        results.append(each.at_labels(of_targets, shape)[..., 0])
    trained = batch["labels"] != -100
    trained[0, 0] = False
    assert torch.equal(results[0][trained], batch["labels"][trained].double())
    assert torch.equal(results[1][trained], results[0][trained])


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_step_with_shared_prefixes_is_recorded_and_replayed(graphs: SimpleNamespace) -> None:
    trees = [((20, 3, 5),), ((22, 9, 2, 1),), ((16, 2, 4), (17, 3, 5))]
    batches = [[tree(*trees[i % 3], seed=i, capacity=48)] for i in range(4)]
    batches += [[tree(*trees[0], capacity=48), tree(*trees[1], capacity=48)]]
    trained, losses = [], []
    for options in ({"capture": True}, {"capture": False, "compile": False}):
        implementation = "triton" if options["capture"] else "sdpa"
        model = patch(tiny("llama", num_hidden_layers=1), implementation=implementation, verify=False)
        graphs.model = model
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.5), max_grad_norm=1.0, **options)
        losses.append([float(step(given)["loss"]) for given in batches])
        trained.append(list(model.parameters()))
        if "compile" not in options:
            assert step.parts["graph"] == "CUDA graph"
    assert (graphs.recorded, graphs.replayed) == (2, 4)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for one, other in zip(*trained, strict=True):
        assert error(one.detach(), other.detach()) <= 1e-5


def test_recurrent_layers_with_shared_prefixes_are_not_recorded(graphs: SimpleNamespace) -> None:
    model = patched("qwen3_5_text")
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.5), capture=True)
    with pytest.raises(UnsupportedError, match="capture=True is not possible, because recurrent layers hand states on"):
        step([tree((20, 3, 5))])


@pytest.mark.gpu
def test_a_graph_on_a_gpu_trains_as_plain_layers_do() -> None:
    trees = [((40, 9, 15),), ((60, 9, 2, 1),), ((36, 2, 4), (47, 3, 5)), ((20, 90, 30), (16, 7, 7))]
    trained, losses = [], []
    for options in ({"capture": True}, {"capture": False, "compile": False}):
        model = patch(tiny("qwen2").cuda(), implementation="triton", verify=False)
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        found = [step([tree(*trees[i % 4], seed=i, capacity=256)])["loss"] for i in range(9)]
        found.append(step([tree(*trees[i], capacity=256) for i in range(4)])["loss"])
        losses.append([float(loss) for loss in found])
        trained.append([p.detach().cpu() for p in model.parameters()])
        if "compile" not in options:
            assert step.parts["graph"] == "CUDA graph", step.parts
            assert step.parts["layers"] == "compiled", step.parts
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for one, other in zip(*trained, strict=True):
        assert error(one, other) <= 1e-4
