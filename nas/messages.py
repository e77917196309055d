"""What the dispatcher and its workers say to each other. Plain data, no torch, no Ray: any Pool can carry it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Protocol

from pydantic import NonNegativeInt, PositiveInt

from nas.architecture import Candidate, Frozen
from nas.workload import Workload


class TrialState(StrEnum):
    """The life of a trial. PAUSED waits at a rung for promotion; the last four are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    INFEASIBLE = "infeasible"

    @property
    def is_final(self) -> bool:
        return self not in (TrialState.WAITING, TrialState.RUNNING, TrialState.PAUSED)


class Failure(StrEnum):
    """Why a segment ended early.

    Through no fault of the design: LOST (the worker died) and CHECKPOINT (damaged or gone) are retried, STORAGE (a
    checkpoint cannot be written, for instance on a full disk) stops the study with the trial waiting. The others end
    the trial.
    """

    LOST = "lost"
    CHECKPOINT = "checkpoint"
    STORAGE = "storage"
    OOM = "oom"
    DIVERGED = "diverged"
    ERROR = "error"


class Measurement(Frozen):
    """One finite number about a trial at a training step.

    Names: `loss` (validation nats per token on text), `bits_per_byte`, `train_loss`, `recall` (mean over the
    evaluation sizes), `recall/<task>/<size>`, `recall_nll` (mean negative log-likelihood at the labelled positions,
    nats), `tokens_per_second`, `peak_memory_bytes`.
    """

    step: NonNegativeInt
    name: str
    value: float


class Segment(Frozen):
    """The unit of work: one trial from its last checkpoint to the next rung. Idempotent, numbered by attempt."""

    study: str
    trial: NonNegativeInt
    attempt: NonNegativeInt
    rung: NonNegativeInt
    start_step: NonNegativeInt
    stop_step: PositiveInt
    top: bool
    """True at the highest rung: scored on the raw weights, not their moving average (design.md 4)."""
    candidate: Candidate
    seed: int
    workload: Workload
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoints: str
    """Folder (or fsspec URL) of this trial's checkpoints."""
    checkpoint: str | None = None
    """The checkpoint to start from; None at step 0."""


class Report(Frozen):
    """Measurements on the way. Reports of an attempt that is no longer current are dropped."""

    trial: int
    attempt: int
    measurements: tuple[Measurement, ...]


class Finished(Frozen):
    """A segment reached its rung; `measurements` hold the rung's scores."""

    trial: int
    attempt: int
    step: int
    checkpoint: str
    seconds: float
    measurements: tuple[Measurement, ...]


class Failed(Frozen):
    """A segment ended early. `message` is one line; `traceback` is empty where there is none."""

    trial: int
    attempt: int
    kind: Failure
    message: str
    traceback: str = ""
    step: int = 0
    seconds: float = 0.0


Event = Report | Finished | Failed


class Pool(Protocol):
    """A set of worker slots. nas.search drives it and knows no more; workers.pool makes it of Ray actors."""

    @property
    def slots(self) -> int:
        """Segments that can run at once."""
        ...

    def submit(self, segment: Segment) -> None:
        """Starts a segment on a free slot; the caller never submits more than `slots` at once."""
        ...

    def poll(self, timeout: float) -> list[Event]:
        """Events since the last call, in order per trial; waits up to `timeout` seconds for the first one."""
        ...

    def cancel(self, trial: int) -> None:
        """Ends a trial's running segment; events of it may still come and are to be ignored."""
        ...

    def stop(self) -> bool:
        """Asks all running segments to checkpoint and return early; their events come through `poll`.

        Returns:
            True if no segment runs any more.
        """
        ...

    def close(self) -> None:
        """Ends all workers and releases their devices."""
        ...
