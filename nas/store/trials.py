"""Trials and measurements: added, listed, moved between states."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Update, bindparam, func, insert, select, update

from nas.messages import TrialState
from nas.store.errors import DuplicateCandidate, InvalidValue, TrialNotFound
from nas.store.rows import (
    MEASUREMENT_COLUMNS,
    TRIAL_COLUMNS,
    MeasurementRow,
    TrialRow,
    measurement_row,
    to_json,
    trial_row,
)
from nas.store.studies import Studies
from nas.store.tables import UtcNow, measurements, studies, trials


class Trials(Studies):
    """Part of Store."""

    def add_trial(
        self,
        study_id: int,
        *,
        candidate: dict[str, Any],
        candidate_digest: str,
        architecture_digest: str,
        params: dict[str, Any],
        sampler_state: dict[str, Any],
        facts: dict[str, Any],
        prior: str,
        state: TrialState = TrialState.WAITING,
    ) -> TrialRow:
        """Adds the study's next trial. Raises DuplicateCandidate, and InvalidValue for JSON with NaN or infinity."""
        documents = {"candidate": candidate, "params": params, "sampler_state": sampler_state, "facts": facts}
        values = {name: to_json(name, value) for name, value in documents.items()}
        values |= {"candidate_digest": candidate_digest, "architecture_digest": architecture_digest, "prior": prior}
        with self._change(study_id) as connection:
            same = connection.scalar(
                select(trials.c.number).where(
                    trials.c.study_id == study_id, trials.c.candidate_digest == candidate_digest
                )
            )
            if same is not None:
                raise DuplicateCandidate(candidate_digest, same)
            number = _count(connection, study_id)
            started = {"rung": -1, "target_rung": -1, "step": 0, "attempt": 0, "seconds": 0.0}
            finished_at = UtcNow() if state.is_final else None
            connection.execute(
                insert(trials).values(
                    study_id=study_id,
                    number=number,
                    state=state,
                    created_at=UtcNow(),
                    finished_at=finished_at,
                    **started,
                    **values,
                )
            )
            return get_trial(connection, study_id, number)

    def trials(self, study_id: int, states: Collection[TrialState] | None = None) -> list[TrialRow]:
        """The trials in the order of their numbers, of all states or of those given."""
        query = select(*TRIAL_COLUMNS).where(trials.c.study_id == study_id).order_by(trials.c.number)
        if states is not None:
            query = query.where(trials.c.state.in_(list(states)))
        with self._read() as connection:
            rows = connection.execute(query).all()
        return [trial_row(row) for row in rows]

    def trial(self, study_id: int, number: int) -> TrialRow:
        """Raises TrialNotFound."""
        with self._read() as connection:
            return get_trial(connection, study_id, number)

    def set_states(self, study_id: int, numbers: Collection[int], state: TrialState) -> None:
        """Moves trials to a state other than RUNNING, all or none; a final state sets `finished_at`."""
        check_resting(state)
        wanted = sorted(set(numbers))
        if not wanted:
            return
        with self._change(study_id) as connection:
            for number in (wanted[0], wanted[-1]):  # numbers have no gaps
                if not 0 <= number < _count(connection, study_id):
                    raise _not_found(connection, study_id, number)
            statement = update(trials).where(trials.c.study_id == study_id, trials.c.number == bindparam("wanted"))
            statement = set_state(statement, state)
            connection.execute(statement, [{"wanted": number} for number in wanted])

    def measurements(
        self,
        study_id: int,
        number: int | None = None,
        names: Collection[str] | None = None,
        after_step: int = -1,
    ) -> list[MeasurementRow]:
        """Measurements of one trial or of all, by default of every name, ordered by trial, step and name."""
        key = (measurements.c.trial, measurements.c.step, measurements.c.name)
        query = select(*MEASUREMENT_COLUMNS).where(measurements.c.study_id == study_id).order_by(*key)
        if number is not None:
            query = query.where(measurements.c.trial == number)
        if names is not None:
            query = query.where(measurements.c.name.in_(list(names)))
        if after_step >= 0:
            query = query.where(measurements.c.step > after_step)
        with self._read() as connection:
            rows = connection.execute(query).all()
        return [measurement_row(row) for row in rows]


def check_resting(state: TrialState) -> None:
    """Only start_segment makes a trial RUNNING: it gives the attempt its number."""
    if state is TrialState.RUNNING:
        raise InvalidValue("state='running' is set by start_segment only")


def set_state(statement: Update, state: TrialState) -> Update:
    return statement.values(state=state, finished_at=UtcNow() if state.is_final else None)


def get_trial(connection: Connection, study_id: int, number: int) -> TrialRow:
    query = select(*TRIAL_COLUMNS).where(trials.c.study_id == study_id, trials.c.number == number)
    row = connection.execute(query).first()
    if row is None:
        raise _not_found(connection, study_id, number)
    return trial_row(row)


def _not_found(connection: Connection, study_id: int, number: int) -> TrialNotFound:
    name = connection.scalar(select(studies.c.name).where(studies.c.id == study_id))
    return TrialNotFound(str(name or study_id), number, _count(connection, study_id))


def _count(connection: Connection, study_id: int) -> int:
    last = connection.scalar(select(func.max(trials.c.number)).where(trials.c.study_id == study_id))
    return 0 if last is None else last + 1
