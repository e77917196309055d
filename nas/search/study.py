"""The dispatcher: asks, dispatches segments, judges rungs, and is the only writer of a study's trials (design.md 2)."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nas.architecture import Candidate, derive_seed
from nas.messages import Failed, Failure, Finished, Pool, Report, Segment, TrialState
from nas.search.board import Board
from nas.search.records import facts, progress_line, record
from nas.search.sampler import WORST, NoProposal, Sampler, Told, complete_params, objective_values
from nas.store import DuplicateCandidate, Store, StoreError, StudyInfo, TrialRow
from search_spaces.designs import Value, grid, labelled_baselines
from search_spaces.schema import SearchSpace

RETRIED = (Failure.LOST, Failure.CHECKPOINT)
"""Not the design's fault: the segment is started again, from step 0 where its checkpoint is damaged."""
MAX_RETRIES = 3
"""Times that segments of one trial are started again."""
MAX_ERRORS = 5
"""Trials in a row that may end in a code error before the study stops: it is not the designs' fault."""
POLL_SECONDS = 1.0
STOP_SECONDS = 30.0


class Outcome(StrEnum):
    """Why `Dispatcher.run` returned."""

    FINISHED = "finished"
    EXHAUSTED = "exhausted"
    """The space holds no new design within the budget; all that there were have been tried."""
    STOPPED = "stopped"
    TIMEOUT = "timeout"


class StudyAborted(RuntimeError):
    """Trials keep failing, or checkpoints cannot be kept; the message names the last trial. Nothing is lost."""


@dataclass
class Limits:
    """When to stop asking: `trials` that trained in the whole study, or seconds of this run."""

    trials: int
    timeout: float | None = None


@dataclass
class Dispatcher:
    """Runs one study on one pool until its trials are done, it is stopped, or time is up.

    Args:
        store: open for writing, with the study's lock held by the caller.
        info: the study.
        space: its space, as stored.
        pool: where segments run.
        checkpoints: folder or fsspec URL; each trial writes below `<checkpoints>/<study>-<stamp>/<trial>`. The stamp
            is the study's own: a new study never meets what an earlier one of its name has left.
        limits: how far to go.
        device: passed on to the segments.
        notify: called after every change, for a live view.
        log: called with one line for every event worth telling.
    """

    store: Store
    info: StudyInfo
    space: SearchSpace
    pool: Pool
    checkpoints: str
    limits: Limits
    device: str = "auto"
    notify: Callable[[Dispatcher], None] = lambda _: None
    log: Callable[[str], None] = lambda _: None

    running: set[int] = field(default_factory=set, init=False)
    stopping: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.board = Board(self.space)
        self._folder = f"{self.checkpoints.rstrip('/')}/{self.info.name}-{self._stamp()}"
        self._lost: Counter[int] = Counter()
        self._errors = 0
        self._exhausted = False
        self._load()

    # --- the loop

    def run(self) -> Outcome:
        """Runs to the end.

        Raises:
            StudyAborted: `MAX_ERRORS` trials in a row ended in a code error.
        """
        try:
            return self._run()
        except BaseException:  # a second Ctrl-C, a full disk: whatever ends us, no trial stays RUNNING
            with suppress(StoreError):
                self.store.recover(self.info.id)
            raise

    def _run(self) -> Outcome:
        self.enqueue_baselines()
        self._reopen_rungs()
        deadline = math.inf if self.limits.timeout is None else time.monotonic() + self.limits.timeout
        while not self.stopping and time.monotonic() < deadline:
            while len(self.running) < self.pool.slots and self._start_next():
                pass
            self.notify(self)
            if not self.running:
                break
            self._handle(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        if self.running:
            self._stop_running()
            return Outcome.STOPPED if self.stopping else Outcome.TIMEOUT
        if self.stopping:
            return Outcome.STOPPED
        if time.monotonic() >= deadline and self.unfinished():
            return Outcome.TIMEOUT
        self._prune_paused()
        self.notify(self)
        return Outcome.EXHAUSTED if self._exhausted else Outcome.FINISHED

    def stop(self) -> None:
        """Asks `run` to end soon with checkpoints kept; safe in a signal handler."""
        self.stopping = True

    def enqueue(self, candidate: Candidate, prior: str, params: dict[str, Value] | None = None) -> TrialRow | None:
        """Adds a trial for a given Candidate; None if the study has it already. Over the budget it is INFEASIBLE."""
        known = facts(self.space, candidate)
        over = prior == "enqueued" and not known["within_budget"]
        return self._add(
            candidate, known, prior, params or {}, state=TrialState.INFEASIBLE if over else TrialState.WAITING
        )

    # --- starting work

    def _stamp(self) -> str:
        stamp = self.store.get_meta(self.info.id, "stamp")
        if stamp is None:
            stamp = secrets.token_hex(4)
            self.store.set_meta(self.info.id, "stamp", stamp)
        return str(stamp)

    def _load(self) -> None:
        self.store.recover(self.info.id)
        for row in self.store.trials(self.info.id):
            self.board.put(row)
        for measurement in self.store.measurements(self.info.id, names=["recall_nll"]):
            self.board.note(measurement.trial, [measurement])
        rows = self.board.rows
        past = {
            number: Told(row.params, row.sampler_state, objective_values(self.space, row))
            for number, row in rows.items()
            if row.params and row.state is not TrialState.INFEASIBLE
        }
        self._sampler = Sampler(self.space, self.info.seed, past, (row.candidate_digest for row in rows.values()))
        self._grid = [(p, c) for p, c in (grid(self.space) if self.space.grid else ()) if not self._sampler.knows(c)]

    def enqueue_baselines(self) -> None:
        """Adds full attention and each pure backbone; those that the study has stay as they are (design.md 12).

        Of full attention one design is enough: the baseline of older studies had as many KV heads as query heads.
        """
        stored = (
            Candidate.model_validate(row.candidate) for row in self.board.rows.values() if row.prior == "baseline"
        )
        full = {found.architecture.digest for found in stored if found.architecture.placement == "full"}
        for params, candidate in labelled_baselines(self.space):
            design = candidate.architecture
            if full and design.placement == "full" and design.digest not in full:
                continue
            self.enqueue(candidate, "baseline", complete_params(self.space, params) if params else {})

    def _start_next(self) -> bool:
        """Starts the most urgent work on a free slot: waiting trials, then promotions, then a new trial."""
        if (number := self.board.next_waiting()) is not None:
            self._start(number, max(0, self.board.rows[number].target_rung))
            return True
        more = self.trained() < self.limits.trials and not self._exhausted
        promotion = self.board.next_promotion(final=False)
        if promotion is None and more and self._ask():
            return self._start_next()
        promotion = promotion or self.board.next_promotion(final=True)
        if promotion is None:
            return False
        self._start(promotion[0], promotion[1] + 1)
        return True

    def _start(self, number: int, rung: int) -> None:
        attempt = self.store.start_segment(self.info.id, number, rung)
        row = self.refresh(number)
        self.running.add(number)
        self.pool.submit(
            Segment.model_validate(
                {
                    "study": self.info.name,
                    "trial": number,
                    "attempt": attempt,
                    "rung": rung,
                    "start_step": row.step,
                    "stop_step": self.space.rungs.steps[rung],
                    "top": rung == self.board.top,
                    "candidate": row.candidate,
                    "seed": derive_seed(self.info.seed, number),
                    "workload": self.space.workload,
                    "device": self.device,
                    "checkpoints": f"{self._folder}/{number}",
                    "checkpoint": row.checkpoint,
                }
            )
        )

    def _ask(self) -> bool:
        """Adds the next trial: of the grid, or proposed by Optuna. False when there is none."""
        if self.space.grid:
            self._exhausted = not self._grid
            if self._exhausted:
                return False
            params, found = self._grid.pop(0)
            return self._add(found, None, "grid", params) is not None or self._ask()
        number = len(self.board.rows)
        try:
            proposal = self._sampler.ask(number)
        except NoProposal:
            self._exhausted = True
            self.log("no new design within the budget is left to try")
            return False
        row = self._add(proposal.candidate, None, "sampled", proposal.params, proposal.state)
        assert row is not None  # the sampler never repeats a Candidate
        assert row.number == number
        return True

    def _add(
        self,
        candidate: Candidate,
        known: dict[str, Any] | None,
        prior: str,
        params: dict[str, Value],
        sampler_state: dict[str, Any] | None = None,
        state: TrialState = TrialState.WAITING,
    ) -> TrialRow | None:
        known = known or facts(self.space, candidate)
        try:
            row = self.store.add_trial(
                self.info.id,
                candidate=candidate.canonical(),
                candidate_digest=candidate.digest,
                architecture_digest=candidate.architecture.digest,
                params=params,
                sampler_state=sampler_state or {},
                facts=known,
                prior=prior,
                state=state,
            )
        except DuplicateCandidate:
            return None
        self.board.put(row)
        if prior not in ("sampled", "grid") and params and state is TrialState.WAITING:
            self._sampler.add(row.number, params, candidate.digest)
        return row

    # --- events

    def _handle(self, timeout: float) -> None:
        events = self.pool.poll(timeout)
        reports = [event for event in events if isinstance(event, Report)]
        if reports:
            self.store.record_many(self.info.id, reports)
        for event in events:
            if isinstance(event, Finished):
                self._finished(event)
            elif isinstance(event, Failed):
                self._failed(event)

    def _finished(self, event: Finished) -> None:
        row = self.board.rows[event.trial]
        target = row.target_rung
        reached = event.step >= self.space.rungs.steps[target]
        if not reached:
            state = TrialState.WAITING  # stopped on the way, with a checkpoint
        elif target == self.board.top:
            state = TrialState.COMPLETE
        else:
            state = TrialState.PAUSED
        rung = target if reached else row.rung
        if not self.store.finish_segment(self.info.id, event, state=state, rung=rung):
            return  # a late result of an attempt that is no longer current
        self.running.discard(event.trial)
        self.board.note(event.trial, event.measurements)
        row = self.refresh(event.trial)
        if not reached:
            return
        self._errors = 0
        self._tell(row)
        self.log(progress_line(self.info.name, row))

    def _failed(self, event: Failed) -> None:
        retry = event.kind is Failure.STORAGE or (event.kind in RETRIED and self._lost[event.trial] < MAX_RETRIES)
        state = TrialState.WAITING if retry else TrialState.FAILED
        if not self.store.fail_segment(self.info.id, event, state=state):
            return
        self.running.discard(event.trial)
        self._lost[event.trial] += event.kind in RETRIED
        if event.kind is Failure.CHECKPOINT:
            self.store.forget_checkpoints(self.info.id, [event.trial])
        row = self.refresh(event.trial)
        self.log(f"{self.info.name}/{row.number} {'retry' if retry else 'failed'}: {event.kind.value}: {event.message}")
        if event.kind is Failure.STORAGE:
            self._abort(f"{self.info.name}/{row.number} cannot keep its checkpoints: {event.message}")
        if retry:
            return
        self._tell(row)
        self._errors = 0 if event.kind in WORST else self._errors + 1
        if self._errors >= MAX_ERRORS:
            self._abort(
                f"{self._errors} trials in a row failed; the last, {self.info.name}/{row.number}: {event.message}"
            )

    def _abort(self, message: str) -> None:
        if not self.stopping:
            self.stopping = True
            self._stop_running()
            raise StudyAborted(message)

    def _tell(self, row: TrialRow) -> None:
        values = objective_values(self.space, row)
        if values is not None:
            self._sampler.tell(row.number, values)

    # --- the rest

    def _reopen_rungs(self) -> None:
        """A study that grows compares its pruned trials with the new ones again, as if it had never ended."""
        pruned = sorted(self.board.numbers(TrialState.PRUNED))
        if pruned and self.trained() < self.limits.trials:
            self.store.set_states(self.info.id, pruned, TrialState.PAUSED)
            for number in pruned:
                self.refresh(number)

    def _prune_paused(self) -> None:
        paused = sorted(self.board.numbers(TrialState.PAUSED))
        if paused:
            self.store.set_states(self.info.id, paused, TrialState.PRUNED)
            self.log(f"{len(paused)} trials that did not go on from their rung are pruned")
            for number in paused:
                self.refresh(number)

    def _stop_running(self) -> None:
        """Has running segments checkpoint and return; what does not return in time starts again at a resume."""
        self.pool.stop()
        deadline = time.monotonic() + STOP_SECONDS
        while self.running and time.monotonic() < deadline:
            self.notify(self)
            self._handle(POLL_SECONDS)
        self.store.recover(self.info.id)
        for number in list(self.running):
            self.refresh(number)
        self.running.clear()
        self.notify(self)

    def unfinished(self) -> bool:
        """True while there is something to train: in the study, or to be asked for."""
        return self.trained() < self.limits.trials or any(not row.state.is_final for row in self.board.rows.values())

    def trained(self) -> int:
        """Trials that count towards the limit: not infeasible ones, nor those that broke through no fault of theirs."""
        broken = [n for n in self.board.numbers(TrialState.FAILED) if self.board.rows[n].failure not in WORST]
        return len(self.board.rows) - len(self.board.numbers(TrialState.INFEASIBLE)) - len(broken)

    def refresh(self, number: int) -> TrialRow:
        return self.board.put(self.store.trial(self.info.id, number))

    def records(self) -> list[dict[str, Any]]:
        """Records of all trials, as `nas.search.records.load` gives them, without reading the store."""
        return [record(self.info.name, row) for _, row in sorted(self.board.rows.items())]
