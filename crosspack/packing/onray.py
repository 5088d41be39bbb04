"""``--engine ray``: the same jobs on a Ray cluster, through Ray Data, which streams them over its machines.

Jobs and results are small: workers read the input themselves, and write to the output folder, which all machines must
see. ``RAY_ADDRESS`` names the cluster; without it Ray starts one on this machine.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from typing import Any

from crosspack.packing.workers import Job, Pool, Work, results_of
from packing_core.errors import PackingError, first_line
from packing_core.extras import require


class RayPool(Pool):
    """Runs jobs as a Ray data set. Those that Ray has already cannot be dropped.

    Args:
        count: how many workers; by default one for each processor of the cluster.

    Raises:
        PackingError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, work: Work, count: int | None) -> None:
        super().__init__()
        ray = require("ray", extra="ray")
        self._data = require("ray.data", extra="ray")
        try:
            ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PackingError(
                f"--engine ray: {first_line(error)}: check RAY_ADDRESS, and set RAY_AUTH_MODE=token for a cluster that "
                "asks for a token, as those of `ray start` in Ray 2.60 do"
            ) from error
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        self._data.DataContext.get_current().enable_progress_bars = False
        self.count = count or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._pickled = pickle.dumps(work)

    def results(self) -> Iterator[tuple[Job, Any]]:
        while self._jobs:
            jobs = [{"job": pickle.dumps(job)} for job in self._jobs]
            self._jobs.clear()
            rows = self._data.from_items(jobs, override_num_blocks=len(jobs)).map_batches(
                _Worker,
                fn_constructor_args=(self._pickled,),
                batch_size=1,
                compute=self._data.ActorPoolStrategy(min_size=1, max_size=min(self.count, len(jobs))),
                num_cpus=1,
            )
            for row in rows.iter_rows():
                yield pickle.loads(row["job"]), pickle.loads(row["result"])


class _Worker:
    """One of Ray's actors."""

    def __init__(self, pickled: bytes) -> None:
        self._work: Work = pickle.loads(pickled)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        for job in batch["job"]:
            for result in results_of(self._work, pickle.loads(job)):
                yield {"job": [job], "result": [pickle.dumps(result)]}
