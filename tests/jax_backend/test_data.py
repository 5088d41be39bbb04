"""grain's own pipelines over packed rows: random access and streams, shuffled, sharded, resumed."""

from __future__ import annotations

import grain
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl import flags
from flax import nnx

import packing_core
from jax_backend.batches import renamed, to_batch
from jax_backend.data import GrainSource, GrainStream
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.training.train_step import make_train_step
from packing_core.errors import PackingError
from tests.processes import limited
from tests.training_jobs import LLAMA

DOCUMENTS = [np.arange(3 + n % 17, dtype=np.int32) + 100 * n for n in range(1, 61)]


def dataset() -> packing_core.PackedDataset:
    return packing_core.PackedDataset(DOCUMENTS, 24, seed=0)


def documents_of(rows) -> list[tuple[int, ...]]:
    """The tokens of every segment, read from the arrays alone."""
    found = []
    for row in rows:
        ids = row["inputs_segment_ids"] if "inputs_segment_ids" in row else row["inputs_segmentation"]
        found += [tuple(row["inputs"][ids == segment].tolist()) for segment in range(1, ids.max() + 1)]
    return sorted(found)


EVERYTHING = sorted(tuple(document.tolist()) for document in DOCUMENTS)


def test_rows_are_a_random_access_source() -> None:
    source = GrainSource(dataset())
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    assert documents_of(source[i] for i in range(len(source))) == EVERYTHING
    assert set(source[0]) == {
        "inputs",
        "inputs_segment_ids",
        "inputs_positions",
        "targets",
        "targets_segment_ids",
        "targets_positions",
        "loss_weights",
    }


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_grains_pipeline_shuffles_shards_and_batches_the_rows(hosts) -> None:
    rows = grain.MapDataset.source(GrainSource(dataset(), "maxtext")).shuffle(seed=4)
    shares = [list(rows[host::hosts]) for host in range(hosts)]
    assert documents_of(row for share in shares for row in share) == EVERYTHING
    assert not np.array_equal(shares[0][0]["inputs"], GrainSource(dataset(), "maxtext")[0]["inputs"])
    batch = next(iter(rows.batch(4, drop_remainder=True).to_iter_dataset()))
    assert batch["inputs"].shape == batch["targets_segmentation"].shape == (4, 24)


def assert_resumes(iterator) -> None:
    """An iterator that takes the state of one that stopped after a batch goes on with the batches of that one."""
    stopped = iterator()
    next(stopped)
    state = stopped.get_state()
    wanted = [batch["inputs"].tolist() for batch in stopped]
    continued = iterator()
    continued.set_state(state)
    assert [batch["inputs"].tolist() for batch in continued] == wanted and wanted


def test_a_grain_iterator_over_rows_resumes_where_it_stopped() -> None:
    def iterator():
        return iter(grain.MapDataset.source(GrainSource(dataset())).shuffle(seed=4).batch(2).to_iter_dataset())

    assert_resumes(iterator)


def test_grains_loader_checkpoints_belong_to_their_source() -> None:
    assert repr(GrainSource(dataset())) != repr(GrainSource(packing_core.PackedDataset(DOCUMENTS, 32, seed=0)))
    other = packing_core.PackedDataset(DOCUMENTS, 24, seed=1)
    assert len(other) == len(dataset()) and repr(GrainSource(other)) != repr(GrainSource(dataset()))


@limited()
def test_rows_travel_to_grains_worker_processes() -> None:
    flags.FLAGS.mark_as_parsed()  # what absl's own main does in a grain program
    rows = grain.MapDataset.source(GrainSource(dataset())).to_iter_dataset()
    rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    assert documents_of(rows) == EVERYTHING


def opened(host: int, hosts: int):
    return lambda: packing_core.stream(DOCUMENTS, 24, buffer=16, seed=1, shard=(host, hosts))


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_stream_gives_every_host_equally_many_rows_and_every_document_once(hosts) -> None:
    shares = [list(GrainStream(opened(host, hosts))) for host in range(hosts)]
    assert len({len(share) for share in shares}) == 1
    assert documents_of(row for share in shares for row in share) == EVERYTHING


def test_a_stream_behind_grains_batching_resumes_where_it_stopped() -> None:
    def iterator():
        return iter(GrainStream(opened(0, 2), "maxtext").batch(2))

    assert_resumes(iterator)


def test_grains_workers_share_the_rows_of_a_host() -> None:
    shares = []
    for worker in range(3):
        rows = GrainStream(opened(1, 2))
        rows.set_slice(slice(worker, None, 3))  # what mp_prefetch does in each of its processes
        shares.append(list(rows))
    host = documents_of(GrainStream(opened(1, 2)))
    assert documents_of(row for share in shares for row in share) == host and all(shares)
    with pytest.raises(PackingError, match="does not know how many rows it has"):
        rows.set_slice(slice(0, 1), sequential_slice=True)


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_model_and_data_resume_from_one_checkpoint_of_orbax(kind, tmp_path) -> None:
    def iterator():
        if kind == "stream":
            return iter(GrainStream(opened(0, 1)).batch(2, drop_remainder=True))
        rows = grain.MapDataset.source(GrainSource(dataset())).shuffle(seed=4).batch(2, drop_remainder=True)
        return iter(rows.to_iter_dataset())

    def run(state, batches, steps):
        losses = []
        for _ in range(steps):
            state, metrics = step(state, next(batches))
            losses.append(float(metrics["loss"]))
        return state, losses

    config = {**LLAMA, "vocab_size": 8192}
    step = make_train_step(
        Decoder(DecoderConfig.from_hf(config), rngs=nnx.Rngs(0), implementation="xla"), optax.sgd(0.1)
    )
    batches = iterator()
    state, _ = run(step.init(), batches, 2)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), data=grain.checkpoint.CheckpointSave(batches))
        manager.save(2, args=saved)
    _, wanted = run(state, batches, 3)

    batches = iterator()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(
            2,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(step.shapes), data=grain.checkpoint.CheckpointRestore(batches)
            ),
        )
    _, found = run(restored["state"], restored["data"], 3)
    assert found == wanted


def test_the_train_steps_batch_is_shifted_inside_segments() -> None:
    batch = to_batch(packing_core.pack([[5, 6, 7], [8, 9]], 6, seed=None))
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0]]
    assert batch["targets"].tolist() == [[6, 7, 0, 9, 0, 0]]
    assert batch["loss_weights"].tolist() == [[1, 1, 0, 1, 0, 0]]


@pytest.mark.parametrize("convention", ["grain", "maxtext"])
def test_the_train_step_reads_rows_under_the_names_of_a_pipeline(convention) -> None:
    packed = packing_core.pack([[5, 6, 7], [8, 9], [3, 4]], 6, prompt_lengths=[2, 0, 0], seed=None)
    rows = renamed(packed.to_dict(convention))
    for name in ("input_ids", "segment_ids", "position_ids", "targets", "loss_weights"):
        np.testing.assert_array_equal(rows[name], to_batch(packed)[name], strict=True)
    assert renamed(to_batch(packed)).keys() == to_batch(packed).keys()


def test_other_conventions_are_refused() -> None:
    with pytest.raises(PackingError, match="convention is 'hf': grain pipelines carry grain or maxtext"):
        GrainSource(dataset(), "hf")
    with pytest.raises(PackingError, match="convention is 'trl'"):
        GrainStream(opened(0, 1), "trl")
