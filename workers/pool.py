"""RayPool: the worker slots of a study, one Ray actor each. Implements nas.messages.Pool."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from nas.messages import Event, Failed, Failure, Report, Segment
from workers.cluster import connect, count_workers, total_cpus
from workers.worker import DEFAULT_RUNNER, Worker, failed

START_SECONDS = 120.0
"""How long the first workers may take to start."""


class Slot:
    """One worker and the segment it runs; `pending` is the one outstanding call for that segment's next events."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.segment: Segment | None = None
        self.pending: Any = None
        self.began = 0.0

    def start(self, segment: Segment) -> None:
        self.segment, self.began = segment, time.monotonic()
        self.pending = self.actor.start.remote(segment)

    def clear(self) -> None:
        self.segment = self.pending = None


class RayPool:
    """A fixed number of Ray actors, one process each, warm from trial to trial.

    A worker that dies (its segment is reported LOST), or whose segment failed for another reason than divergence, is
    replaced: after an error or OOM neither its memory nor its CUDA context is to be trusted.

    Args:
        slots: workers; None takes as many as there are GPUs for, or CPU cores where gpus_per_worker is 0.
        gpus_per_worker: GPUs of each worker; a fraction shares one GPU between workers.
        address: of a running Ray cluster ("auto" or "host:port"), whose machines have our packages installed or on
            the driver's paths; None uses the Ray this process is connected to, or else starts one on this machine.
        temp_dir: folder for the sockets and logs of a Ray of our own, at most 43 bytes long.
        runner: dotted path of what runs a segment (workers.worker.Runner).

    Raises:
        ValueError: slots, temp_dir or address out of bounds, or more workers than the cluster can hold.
        ConnectionError: no cluster at `address`.
        RuntimeError: the workers do not start.
    """

    def __init__(
        self,
        slots: int | None = None,
        *,
        gpus_per_worker: float = 0,
        address: str | None = None,
        temp_dir: str | Path | None = None,
        runner: str = DEFAULT_RUNNER,
    ) -> None:
        if slots is not None and slots < 1:
            raise ValueError(f"workers={slots} must be at least 1")
        self._session = connect(address, temp_dir)
        self._slots: list[Slot] = []
        self._ready: list[Event] = []
        try:
            num_cpus = 0 if self._session.is_local else 1  # on our own Ray more workers than cores are allowed
            count = count_workers(slots, num_cpus, gpus_per_worker)
            self._actor = ray.remote(Worker).options(
                num_cpus=num_cpus,
                num_gpus=gpus_per_worker,
                max_concurrency=3,  # start or take, stop, pid
                max_restarts=0,
                runtime_env=self._session.runtime_env,
            )
            self._arguments = (runner, max(1, total_cpus() // count), gpus_per_worker > 0)
            self._slots = [Slot(self._new_actor()) for _ in range(count)]
            self.pids()
        except BaseException:  # nothing is handled: whatever ends the start, no worker is left behind
            self.close()
            raise

    @property
    def slots(self) -> int:
        """Segments that can run at once."""
        return len(self._slots)

    def pids(self) -> list[int]:
        """Process ids of the workers, by slot, on whatever machine each runs; waits until all are up.

        Raises:
            RuntimeError: a worker died or did not start within START_SECONDS.
        """
        try:
            pids: list[int] = ray.get([slot.actor.pid.remote() for slot in self._slots], timeout=START_SECONDS)
        except GetTimeoutError:
            raise RuntimeError(
                f"not all of workers={self.slots} started in {START_SECONDS:.0f} s; free on this Ray: "
                f"{ray.available_resources()}"
            ) from None
        except RayError as error:
            raise RuntimeError(f"a worker did not start: {error}") from error
        return pids

    def submit(self, segment: Segment) -> None:
        """Starts a segment on a free slot.

        Raises:
            RuntimeError: no slot is free.
        """
        free = next((slot for slot in self._slots if slot.segment is None), None)
        if free is None:
            raise RuntimeError(f"trial={segment.trial}: all {self.slots} slots are busy")
        free.start(segment)

    def poll(self, timeout: float) -> list[Event]:
        """Events since the last call, in order per trial; waits up to `timeout` seconds for the first one."""
        self._gather(0 if self._ready else timeout)
        events, self._ready = self._ready, []
        return events

    def cancel(self, trial: int) -> None:
        """Ends a trial's running segment by ending its worker, and starts another in its place."""
        for slot in self._slots:
            if slot.segment is not None and slot.segment.trial == trial:
                self._replace(slot)

    def stop(self, timeout: float = 0.0) -> bool:
        """Asks all running segments to write a checkpoint and return early; waits up to `timeout` seconds for it.

        Their last events come from `poll` as ever, a Finished with step below stop_step among them.

        Returns:
            True if no segment runs any more; if not, `poll` on, or `stop` again.
        """
        deadline = time.monotonic() + timeout
        for slot in self._slots:
            if slot.segment is not None:
                slot.actor.stop.remote(slot.segment.trial, slot.segment.attempt)
        while self._running() and (left := deadline - time.monotonic()) > 0:
            self._gather(left)
        return not self._running()

    def close(self) -> None:
        """Ends all workers at once, and Ray if we started it; running segments go no further than their checkpoint."""
        slots, self._slots = self._slots, []
        for slot in slots:
            ray.kill(slot.actor)
        self._session.close()

    def _running(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.segment is not None]

    def _gather(self, timeout: float) -> None:
        """Waits up to `timeout` seconds until a worker has events, then collects those of all that have."""
        pending = {slot.pending: slot for slot in self._running()}
        if not pending:
            time.sleep(timeout)
            return
        ray.wait(list(pending), num_returns=1, timeout=timeout)
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for call in done:
            self._collect(pending[call])

    def _collect(self, slot: Slot) -> None:
        """Takes a slot's events, and asks its worker for more or frees the slot."""
        segment = slot.segment
        assert segment is not None
        try:
            events: list[Event] = ray.get(slot.pending)
        except RayTaskError as error:
            events = [failed(segment, error, time.monotonic() - slot.began)]
        except RayError as error:  # the worker or its machine is gone
            events = [_lost(segment, error, time.monotonic() - slot.began)]
        self._ready += events
        end = events[-1]
        if isinstance(end, Report):
            slot.pending = slot.actor.take.remote()
        elif isinstance(end, Failed) and end.kind is not Failure.DIVERGED:
            self._replace(slot)
        else:
            slot.clear()

    def _replace(self, slot: Slot) -> None:
        slot.clear()
        ray.kill(slot.actor)
        slot.actor = self._new_actor()

    def _new_actor(self) -> Any:
        return self._actor.remote(*self._arguments)


def _lost(segment: Segment, error: RayError, seconds: float) -> Failed:
    return Failed(
        trial=segment.trial,
        attempt=segment.attempt,
        kind=Failure.LOST,
        message=f"worker lost: {str(error).strip().splitlines()[0]}",
        traceback=str(error),
        step=segment.start_step,
        seconds=seconds,
    )
