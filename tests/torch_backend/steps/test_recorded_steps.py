"""CUDA graphs and compiled layers of a step, with stand-ins on the CPU: the steps stay those without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

import torch_backend
from tests.torch_backend.graphs import compiled as compiled
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import collate, documents
from tests.torch_backend.training_steps import batches, distance, patched, steps
from torch_backend import make_train_step


def test_graphs_train_as_plain_steps_do_for_any_number_of_microbatches(graphs: SimpleNamespace) -> None:
    model, right = patched(), patched()
    graphs.model = model
    rows = [slice(0, 3), slice(3, 5), slice(5, 8)]  # 57, 47, 21 tokens in a row of 64
    given = [batches([rows[i % 3] for i in range(n)], capacity=64) for n in (1, 1, 1, 2, 3, 1, 3)]
    found, wanted = steps(model, given), steps(right, given, capture=False, compile=False)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)
    assert distance(model, right) < 1e-6
    assert graphs.recorded == 2  # one writes gradients, one adds to them
    assert graphs.replayed == 10


def test_hooks_that_read_gradients_forbid_a_graph(graphs: SimpleNamespace) -> None:
    """A replay would not call them."""
    model = patched()
    graphs.model, seen = model, []
    next(model.parameters()).register_post_accumulate_grad_hook(seen.append)
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        step(batches([slice(0, 3)], capacity=64))
    assert step.parts["graph"] == "no CUDA graph: hooks of its parameters read gradients"
    assert (len(seen), graphs.recorded) == (4, 0)


def test_a_batch_of_another_form_runs_as_usual_and_the_graph_stays(graphs: SimpleNamespace) -> None:
    model, right = patched(), patched()
    graphs.model = model
    sizes = (64, 64, 64, 64, 80, 64, 64)
    given = [batches([slice(0, 3)], capacity=size) for size in sizes]
    found, wanted = steps(model, given), steps(right, given, capture=False, compile=False)
    torch.testing.assert_close(found, wanted)
    assert distance(model, right) < 1e-6
    assert (graphs.recorded, graphs.replayed) == (1, 4)


def test_shared_prefixes_after_other_batches_run_as_usual_and_the_graph_stays(graphs: SimpleNamespace) -> None:
    model, right = patched(), patched()
    graphs.model = model
    prompt, *ends = documents((40, 11, 13), seed=3)
    answers = [{"input_ids": torch.cat([prompt, end]).tolist(), "prompt_length": 40} for end in ends]
    tree = torch_backend.PackedCollator(model, share_prefix=True)(answers)  # a row of 64, as the others
    assert tree["packed_parents"] is not None
    plain = batches([slice(0, 3)], capacity=64)
    given = [plain, plain, plain, [tree], plain]
    found, wanted = steps(model, given), steps(right, given, capture=False, compile=False)
    torch.testing.assert_close(found, wanted)
    assert distance(model, right) < 1e-6
    assert (graphs.recorded, graphs.replayed) == (1, 2)  # the first one compiles


def test_frozen_weights_are_recorded_again(graphs: SimpleNamespace) -> None:
    model, right = patched(), patched()
    graphs.model = model
    given = [batches([slice(0, 3)], capacity=64)] * 5
    for trained, options in ((model, {}), (right, {"capture": False, "compile": False})):
        step = make_train_step(trained, torch.optim.SGD(trained.parameters(), lr=0.1), **options)
        for number, batch in enumerate(given):
            trained.model.embed_tokens.requires_grad_(number < 4)
            step(batch)
    assert distance(model, right) < 1e-6


def stepped_as_usual(model: Any, right: Any, given: list[Any]) -> Any:
    """A step of a model after batches that change its weights as plain steps change those of another one."""
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in given:
        step(batch)
    steps(right, given, capture=False, compile=False)
    assert distance(model, right) < 1e-6
    return step


def test_a_recording_that_fails_leaves_the_step_as_usual_and_says_why(graphs: SimpleNamespace, caplog: Any) -> None:
    model, right = patched(), patched()
    graphs.model, graphs.fails = model, "always"
    held: list[bool] = []  # whether what the recording made is there while a step runs
    model.register_forward_pre_hook(lambda *_: held.append(graphs.made() is not None))
    given = [batches([slice(0, 3)], capacity=64)] * 5
    step = stepped_as_usual(model, right, given)
    assert graphs.made is not None and len(held) == 7 and not any(held)
    assert step.parts["graph"] == "none: recording it failed, operation not permitted when stream is capturing"
    assert "runs without a CUDA graph" in caplog.text
    model = graphs.model = patched()
    with pytest.raises(RuntimeError, match="not permitted"):
        steps(model, given, capture=True)


def test_a_recording_that_fails_loses_no_gradient_of_microbatches_before(graphs: SimpleNamespace) -> None:
    model, right = patched(), patched()
    graphs.model, graphs.fails = model, "adding"
    given = [batches([slice(0, 3)], capacity=64) * 3] * 5
    steps(model, given)
    steps(right, given, capture=False, compile=False)
    assert graphs.recorded == 2 and distance(model, right) < 1e-6


def test_every_step_of_as_many_tokens_runs_through_compiled_layers(compiled: SimpleNamespace) -> None:
    """Also the first one, and those whose longer documents make another form, so that none takes more memory."""
    model, right = patched(), patched()
    compiled.model = model
    calls: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    lengths = [(8, 8, 20), (8, 20), (40, 20), (64,), (3, 3), (64,)]
    given = [[collate(documents(each), capacity=64)] for each in lengths]
    found, wanted = steps(model, given), steps(right, given, capture=False, compile=False)
    torch.testing.assert_close(found, wanted)
    assert distance(model, right) < 1e-6
    modules = len(model.model.layers) + 1  # and the last norm
    assert compiled.calls == sum(calls) * modules
    assert len(calls) == len(given) + 1  # the first batch chooses kernels in a forward without gradients
    steps(model, [[collate(documents((8, 8, 20)), capacity=64)], [collate(documents((60, 20)), capacity=80)]])
    assert compiled.calls == (6 + 1) * modules  # rows of another length run as usual


def test_layers_that_do_not_compile_run_as_usual_and_the_step_says_so(compiled: SimpleNamespace, caplog: Any) -> None:
    model, right = patched(), patched()
    compiled.model, compiled.error = model, TorchDynamoException("no kernel for this\nmore")
    given = [batches([slice(0, 3)], capacity=64)] * 5
    step = stepped_as_usual(model, right, given)
    assert compiled.calls == 1 and compiled.replayed
    assert step.parts["layers"] == "not compiled: it failed, no kernel for this"
    assert "layers that are not compiled" in caplog.text
    with pytest.raises(TorchDynamoException):
        steps(patched(), given, compile=True)
