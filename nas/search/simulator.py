"""A Pool without workers: segments end in virtual time and learn along a formula. For tests and sampler studies."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nas.architecture import Architecture, Candidate, Recipe, derive_seed
from nas.messages import Event, Failed, Failure, Finished, Measurement, Report, Segment

Curve = Callable[[Candidate, int, int], dict[str, float]]
"""(candidate, seed, step) -> measurements by name."""

BEST_LR = {"adamw": 3e-3, "muon": 1.5e-2}


def learning_curve(candidate: Candidate, seed: int, step: int, answers: float = 16) -> dict[str, float]:
    """Plausible scores after `step` steps: `recall`, `recall_nll` (nats) and `loss` (nats per token).

    Recall is a phase transition: its middle comes earlier with full-attention layers and delta-rule layers, later
    away from the optimiser's best learning rate; pure stacks without a delta rule saturate low. `recall_nll` is that
    of a model which knows the answer with probability p and guesses otherwise; recall, an arg-max, is a steeper
    function of the same p, so that both are at chance together. Noise depends on the candidate, seed and step only.
    """
    architecture, recipe = candidate.architecture, candidate.recipe
    noise = random.Random(derive_seed(int(candidate.digest, 16), seed))
    middle = _transition(architecture, recipe) + noise.gauss(0, 0.03)
    time = step / recipe.total_steps
    known = _ceiling(architecture) / (1 + math.exp((middle - time) / 0.04))
    jitter = random.Random(derive_seed(int(candidate.digest, 16), seed, step))
    known = min(1.0, max(0.0, known + 0.01 * jitter.gauss(0, 1) * known))
    picked = known**2 / (known**2 + (1 - known) ** 2)
    chance = 1 / answers
    loss = 2.0 + 3.5 * math.exp(-6 * time) + 0.2 * _lr_distance(recipe) ** 2 - 0.1 * known + jitter.gauss(0, 0.005)
    return {
        "recall": chance + (1 - chance) * picked,
        "recall_nll": abs(math.log(chance + (1 - chance) * known)),
        "loss": loss,
    }


def _lr_distance(recipe: Recipe) -> float:
    """Factors of ten between a learning rate and the optimiser's best."""
    return abs(math.log10(recipe.lr / BEST_LR[recipe.optimizer]))


def _transition(architecture: Architecture, recipe: Recipe) -> float:
    """When recall appears, as a share of all steps."""
    depth = len(architecture.layers)
    full = len(architecture.full_attention_layers) / depth
    delta = sum(layer.entry.delta_rule for layer in architecture.layers) / depth
    only_softmax = 0.2 if full == 1 else 0.0  # nothing mixes neighbours before the first lookup
    late = min(1.0, 0.6 * _lr_distance(recipe) ** 2)
    return 0.75 - 0.4 * min(1.0, 2 * full) - 0.2 * delta + only_softmax + late


def _ceiling(architecture: Architecture) -> float:
    """The largest p: what the state can hold."""
    if not architecture.full_attention_layers:
        return 0.9 if any(layer.entry.delta_rule for layer in architecture.layers) else 0.3
    softmax = next(layer for layer in architecture.layers if layer.is_full_attention)
    return 1 - 0.02 * math.log2(softmax.heads / (softmax.kv_heads or softmax.heads))


@dataclass
class _Job:
    segment: Segment
    pace: float
    started: float
    ends: float
    events: list[Event]


class SimulatedPool:
    """`nas.messages.Pool` in virtual time: deterministic, never sleeps, writes no checkpoint.

    Args:
        slots: segments that run at once; further ones queue.
        curve: (candidate, seed, step) -> measurements by name; a value that is not finite makes the segment
            Failed/diverged. Default: `learning_curve` with chance as in the segment's workload.
        seconds_per_step: virtual seconds, or a function of the candidate.
        reports: Reports of a segment before its end, at even distances.
        failures: asked when a segment starts; the Failed it returns comes after its `seconds`, instead of Finished.
        lose: asked when a segment starts; True loses its worker half-way.
    """

    def __init__(
        self,
        slots: int,
        curve: Curve | None = None,
        seconds_per_step: float | Callable[[Candidate], float] = 0.1,
        reports: int = 1,
        failures: Callable[[Segment], Failed | None] | None = None,
        lose: Callable[[Segment], bool] | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1")
        self._slots = slots
        self._curve = curve
        self._seconds_per_step = seconds_per_step
        self._reports = reports
        self._failures = failures
        self._lose = lose
        self._queue: deque[Segment] = deque()
        self._running: dict[int, _Job] = {}
        self._ends: list[tuple[float, int, _Job]] = []  # a heap; the number of the start breaks ties
        self._starts = 0
        self._closed = False
        self._now = 0.0
        self._busy = 0.0

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def now(self) -> float:
        """Virtual seconds since the pool was made."""
        return self._now

    @property
    def busy_seconds(self) -> float:
        """Virtual seconds of all slots in use so far; at most slots * now."""
        return self._busy + sum(self._now - job.started for job in self._running.values())

    def submit(self, segment: Segment) -> None:
        """Starts a segment, or queues it behind those that fill the slots.

        Raises:
            ValueError: the trial is running already, or its checkpoint is not the one of `start_step`.
            RuntimeError: the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        trial = segment.trial
        if trial in self._running or any(queued.trial == trial for queued in self._queue):
            raise ValueError(f"trial={trial} has a segment here already")
        expected = _checkpoint(trial, segment.start_step)
        if segment.checkpoint != expected and (segment.start_step or segment.checkpoint):
            raise ValueError(f"checkpoint={segment.checkpoint!r} at step {segment.start_step}; expected {expected!r}")
        self._queue.append(segment)
        self._fill()

    def poll(self, timeout: float) -> list[Event]:
        """Moves virtual time to the end of the next segment, whatever the timeout; its events, or [] when idle."""
        while self._ends:
            ends, _, job = heapq.heappop(self._ends)
            if self._running.get(job.segment.trial) is job:  # not cancelled meanwhile
                self._now = ends
                self._release(job)
                return job.events
        return []

    def cancel(self, trial: int) -> None:
        self._queue = deque(segment for segment in self._queue if segment.trial != trial)
        if job := self._running.get(trial):
            self._release(job)

    def stop(self) -> bool:
        """Ends all running segments now: Finished at the step they have come to, without scores; drops the queue."""
        self._queue.clear()
        for job in self._running.values():
            segment, seconds = job.segment, self._now - job.started
            step = min(segment.stop_step - 1, segment.start_step + int(seconds / job.pace))
            reports = [e for e in job.events if isinstance(e, Report) and e.measurements[0].step <= step]
            job.events = [*reports, _finished(segment, step, seconds, ())]
            job.ends = self._now
        self._ends = [(self._now, start, job) for _, start, job in self._ends]
        heapq.heapify(self._ends)
        return not self._running

    def close(self) -> None:
        self._closed = True
        self._queue.clear()
        for job in list(self._running.values()):
            self._release(job)

    def _fill(self) -> None:
        while self._queue and len(self._running) < self._slots:
            segment = self._queue.popleft()
            job = self._start(segment)
            self._running[segment.trial] = job
            heapq.heappush(self._ends, (job.ends, self._starts, job))
            self._starts += 1

    def _release(self, job: _Job) -> None:
        del self._running[job.segment.trial]
        self._busy += self._now - job.started
        self._fill()

    def _start(self, segment: Segment) -> _Job:
        """The segment's whole life: what it will say, and when it will end."""
        speed = self._seconds_per_step
        pace = speed if isinstance(speed, (int, float)) else speed(segment.candidate)
        failed = self._failures(segment) if self._failures else None
        if failed is None and self._lose and self._lose(segment):
            failed = _failed(segment, Failure.LOST, "worker lost", (segment.start_step + segment.stop_step) // 2, pace)
        events: list[Event] = [] if failed else self._train(segment, pace)
        if failed:
            events.append(failed)
        end = events[-1]
        assert isinstance(end, Finished | Failed)
        return _Job(segment, pace, self._now, self._now + end.seconds, events)

    def _train(self, segment: Segment, pace: float) -> list[Event]:
        """Reports on the way and Finished, or Failed/diverged at the first value that is not finite."""
        steps, events = segment.stop_step - segment.start_step, list[Event]()
        on_the_way = {segment.start_step + steps * i // (self._reports + 1) for i in range(1, self._reports + 1)}
        for step in sorted(on_the_way - {segment.start_step}):
            values = self._scores(segment, step)
            if bad := _not_finite(values):
                return [*events, _failed(segment, Failure.DIVERGED, f"{bad} at step {step}", step, pace)]
            events.append(
                Report(trial=segment.trial, attempt=segment.attempt, measurements=_measurements(values, step))
            )
        step, values = segment.stop_step, self._scores(segment, segment.stop_step)
        if bad := _not_finite(values):
            return [*events, _failed(segment, Failure.DIVERGED, f"{bad} at step {step}", step, pace)]
        return [*events, _finished(segment, step, steps * pace, _measurements(values, step))]

    def _scores(self, segment: Segment, step: int) -> dict[str, float]:
        if self._curve is not None:
            return self._curve(segment.candidate, segment.seed, step)
        return learning_curve(segment.candidate, segment.seed, step, answers=1 / segment.workload.chance)


def _checkpoint(trial: int, step: int) -> str:
    return f"sim://{trial}/{step}"


def _measurements(values: dict[str, float], step: int) -> tuple[Measurement, ...]:
    return tuple(Measurement(step=step, name=name, value=value) for name, value in values.items())


def _not_finite(values: dict[str, float]) -> str:
    """The first value that is not finite, as "name is value"; empty if all are."""
    return next((f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)), "")


def _finished(segment: Segment, step: int, seconds: float, measurements: tuple[Measurement, ...]) -> Finished:
    return Finished(
        trial=segment.trial,
        attempt=segment.attempt,
        step=step,
        checkpoint=_checkpoint(segment.trial, step),
        seconds=seconds,
        measurements=measurements,
    )


def _failed(segment: Segment, kind: Failure, message: str, step: int, pace: float) -> Failed:
    seconds = (step - segment.start_step) * pace
    return Failed(trial=segment.trial, attempt=segment.attempt, kind=kind, message=message, step=step, seconds=seconds)
