"""The dispatcher's picture of a study: every trial by number, by state and by rung, and who may go on."""

from __future__ import annotations

import math
from collections.abc import Iterable

from nas.messages import Measurement, TrialState
from nas.search.halving import Standing, promotable
from nas.store import MeasurementRow, TrialRow
from search_spaces.schema import SearchSpace

PROTECTED = ("baseline", "repeat")
"""Trials that always go on: they are there to compare with, not to win."""


class Board:
    """Mirrors the store's trials of one study and answers what halving asks (design.md 5)."""

    def __init__(self, space: SearchSpace) -> None:
        self.rows: dict[int, TrialRow] = {}
        self._steps = space.rungs.steps
        self._reduction = space.rungs.reduction
        self._grid = space.grid
        self._answers = round(1 / space.workload.chance)
        self._by_state: dict[TrialState, set[int]] = {state: set() for state in TrialState}
        self._nll: list[dict[int, float]] = [{} for _ in self._steps]
        self._promoted: list[set[int]] = [set() for _ in self._steps]
        self._ready: dict[tuple[int, bool], list[int]] = {}

    @property
    def top(self) -> int:
        return len(self._steps) - 1

    def put(self, row: TrialRow) -> TrialRow:
        """Adds a trial, or replaces what is known of it."""
        old = self.rows.get(row.number)
        if old is not None:
            self._by_state[old.state].discard(row.number)
        self._by_state[row.state].add(row.number)
        self.rows[row.number] = row
        for rung in range(max(row.rung, row.target_rung)):
            self._promoted[rung].add(row.number)
        self._ready.clear()
        return row

    def note(self, number: int, measurements: Iterable[Measurement | MeasurementRow]) -> None:
        """Remembers `recall_nll` at the rungs: what trials are compared by."""
        for measurement in measurements:
            if measurement.name == "recall_nll" and measurement.step in self._steps:
                self._nll[self._steps.index(measurement.step)][number] = measurement.value

    def numbers(self, state: TrialState) -> set[int]:
        return self._by_state[state]

    def next_waiting(self) -> int | None:
        """The waiting trial that has come furthest, then the oldest."""
        waiting = self._by_state[TrialState.WAITING]
        return min(waiting, key=lambda n: (-self.rows[n].target_rung, n), default=None)

    def next_promotion(self, *, final: bool) -> tuple[int, int] | None:
        """(trial, rung it finished) that may go on, from the highest rung down.

        `final`: no more trials will be asked for. Then from the lowest rung up: what stays paused below will not come
        any more, so a rung that no trial is on its way to is complete, and at least one of it goes on.
        """
        for rung in range(self.top) if final else reversed(range(self.top)):
            if final and self._is_awaited(rung):
                return None  # and so are the rungs above
            ready = self._promotable(rung, final)
            if ready:
                return ready[0], rung
        return None

    def _is_awaited(self, rung: int) -> bool:
        on_the_way = (TrialState.WAITING, TrialState.RUNNING)
        return any(self.rows[n].rung < rung for state in on_the_way for n in self._by_state[state])

    def _promotable(self, rung: int, final: bool) -> list[int]:
        key = (rung, final)
        if key not in self._ready:
            paused = {n for n in self._by_state[TrialState.PAUSED] if self.rows[n].rung == rung}
            if not paused:
                self._ready[key] = []
            elif self._grid:
                self._ready[key] = sorted(paused)
            else:
                ready = promotable(
                    self.standings(rung), self._promoted[rung], self._reduction, self._answers, final=final
                )
                self._ready[key] = [number for number in ready if number in paused]
        return self._ready[key]

    def standings(self, rung: int) -> list[Standing]:
        """All trials that finished a rung, as they stood there."""
        return [
            Standing(
                trial=number,
                nll=nll,
                log2_ratio=math.log2(self.rows[number].facts["kv_cache_ratio"]),
                protected=self.rows[number].prior in PROTECTED,
            )
            for number, nll in self._nll[rung].items()
            if self.rows[number].rung >= rung
        ]
