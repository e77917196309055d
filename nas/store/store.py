"""The Store: the only truth about studies and trials (design.md 1). Here: the life of a segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Update, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from nas.messages import Failed, Finished, Measurement, Report, TrialState
from nas.store.errors import InvalidValue
from nas.store.rows import finite, measurement_values, plain
from nas.store.tables import UtcNow, measurements, trials
from nas.store.trials import Trials, check_resting, get_trial, set_state


class Store(Trials):
    """Studies, trials and measurements in SQLite or PostgreSQL; `Store.open(url)` makes one.

    One process per study, the holder of `lock(study)`, adds trials and writes segments. Every write is one
    transaction and raises the study's revision. What a segment reports is written only while its trial is RUNNING
    in the same attempt: messages of a segment that was lost, cancelled or recovered meanwhile are dropped.
    Every method raises StorageError when the database fails.
    """

    def start_segment(self, study_id: int, number: int, rung: int) -> int:
        """Makes a WAITING or PAUSED trial RUNNING, on its way to `rung`; returns the number of the attempt, from 1."""
        with self._change(study_id) as connection:
            trial = get_trial(connection, study_id, number)
            if trial.state not in (TrialState.WAITING, TrialState.PAUSED):
                raise InvalidValue(f"trial {number} is {trial.state}: only a waiting or paused trial can start")
            attempt = trial.attempt + 1
            statement = _update(study_id, number).values(state=TrialState.RUNNING, attempt=attempt, target_rung=rung)
            statement = statement.values(failure=None, message=None, traceback=None)
            connection.execute(statement.values(started_at=func.coalesce(trials.c.started_at, UtcNow())))
        return attempt

    def record(self, study_id: int, number: int, attempt: int, measurements: Sequence[Measurement]) -> bool:
        """Writes measurements, replacing those of the same step and name; False, and nothing written, if stale."""
        report = Report(trial=number, attempt=attempt, measurements=tuple(measurements))
        return self.record_many(study_id, [report]) == 1

    def record_many(self, study_id: int, reports: Sequence[Report]) -> int:
        """Writes the reports of several trials in one transaction; returns how many were not stale."""
        if not reports:
            return 0
        running = select(trials.c.number, trials.c.attempt).where(
            trials.c.study_id == study_id,
            trials.c.state == TrialState.RUNNING,
            trials.c.number.in_({report.trial for report in reports}),
        )
        rows = [(report, measurement_values(study_id, report.trial, report.measurements)) for report in reports]
        with self._change(study_id) as connection:
            current = {(number, attempt) for number, attempt in connection.execute(running)}
            accepted = [batch for report, batch in rows if (report.trial, report.attempt) in current]
            _replace(connection, [row for batch in accepted for row in batch])
            if not accepted:
                connection.rollback()  # the revision too
        return len(accepted)

    def finish_segment(self, study_id: int, finished: Finished, *, state: TrialState, rung: int) -> bool:
        """The segment reached `rung`: scores, checkpoint and new state; False, and nothing written, if stale.

        The columns recall, recall_nll and loss take the measurements of that name at the last step that has one, and
        are None where there is none. A segment that was stopped on its way brings no measurements at all: then those
        of the last rung stay.
        """
        check_resting(state)
        rows = measurement_values(study_id, finished.trial, finished.measurements)
        scores = {item.name: item.value for item in sorted(finished.measurements, key=lambda item: item.step)}
        statement = _update(study_id, finished.trial).values(
            rung=rung,
            step=finished.step,
            checkpoint=finished.checkpoint,
            seconds=trials.c.seconds + finite("seconds", finished.seconds),
        )
        if scores:
            statement = statement.values({name: scores.get(name) for name in ("recall", "recall_nll", "loss")})
        with self._change(study_id) as connection:
            if not _apply(connection, set_state(statement, state), finished.attempt):
                return False
            _replace(connection, rows)
        return True

    def fail_segment(self, study_id: int, failed: Failed, *, state: TrialState) -> bool:
        """The segment ended early: WAITING to run again from the last checkpoint, or FAILED; False if stale."""
        check_resting(state)
        statement = _update(study_id, failed.trial).values(
            failure=failed.kind,
            message=plain(failed.message),
            traceback=plain(failed.traceback) or None,
            seconds=trials.c.seconds + finite("seconds", failed.seconds),
        )
        if state.is_final:
            statement = statement.values(step=failed.step)  # nothing starts from its checkpoint any more
        with self._change(study_id) as connection:
            return _apply(connection, set_state(statement, state), failed.attempt)

    def recover(self, study_id: int) -> list[int]:
        """Makes the RUNNING trials of a dead dispatcher WAITING and returns their numbers. Call it under the lock.

        A trial killed on its way to a rung keeps `target_rung`: it is to be continued to it, not judged again.
        """
        running = (trials.c.study_id == study_id, trials.c.state == TrialState.RUNNING)
        with self._change(study_id) as connection:
            query = select(trials.c.number).where(*running).order_by(trials.c.number)
            numbers = list(connection.scalars(query))
            connection.execute(update(trials).where(*running).values(state=TrialState.WAITING))
            if not numbers:
                connection.rollback()  # the revision too
        return numbers

    def forget_checkpoints(self, study_id: int, numbers: Iterable[int]) -> None:
        """The checkpoints of these trials are gone; one of them that runs again starts at step 0."""
        with self._change(study_id) as connection:
            for number in sorted(set(numbers)):
                get_trial(connection, study_id, number)
                connection.execute(_update(study_id, number).values(checkpoint=None, step=0))


def _update(study_id: int, number: int) -> Update:
    return update(trials).where(trials.c.study_id == study_id, trials.c.number == number)


def _apply(connection: Connection, statement: Update, attempt: int) -> bool:
    """Fences: applies an update to a trial that is RUNNING in this attempt, or rolls the transaction back."""
    fenced = statement.where(trials.c.state == TrialState.RUNNING, trials.c.attempt == attempt)
    if connection.execute(fenced).rowcount == 1:
        return True
    connection.rollback()
    return False


def _replace(connection: Connection, rows: list[dict[str, Any]]) -> None:
    """Inserts measurements, over those that are there already."""
    if not rows:
        return
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(measurements).values(at=UtcNow())
    key = ["study_id", "trial", "step", "name"]
    changed = {"value": statement.excluded.value, "at": statement.excluded.at}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=changed), rows)
