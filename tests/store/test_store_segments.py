"""Every store passes these: the life of a segment, its fences, and the study's revision."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import sqlalchemy

from nas.messages import Failed, Failure, Finished, Measurement, Report, TrialState
from nas.store import InvalidValue, StorageError, Store, StudyInfo, TrialNotFound, TrialRow

Add = Callable[..., TrialRow]
Finish = Callable[..., bool]


def loss(step: int, value: float) -> Measurement:
    return Measurement(step=step, name="loss", value=value)


def values(store: Store, study: StudyInfo, number: int = 0) -> list[tuple[int, str, float]]:
    return [(row.step, row.name, row.value) for row in store.measurements(study.id, number)]


def test_a_segment_from_start_to_rung(store: Store, study: StudyInfo, add: Add, finish: Finish) -> None:
    add()
    assert store.start_segment(study.id, 0, rung=0) == 1
    running = store.trial(study.id, 0)
    assert (running.state, running.attempt, running.target_rung, running.rung) == (TrialState.RUNNING, 1, 0, -1)
    assert running.started_at is not None
    assert store.record(study.id, 0, 1, [loss(10, 5.0), loss(20, 4.0)])
    assert finish(0, 1, rung=0, recall=0.25, recall_nll=1.5, loss=3.5, tokens_per_second=9e4)
    paused = store.trial(study.id, 0)
    assert (paused.state, paused.rung, paused.step, paused.checkpoint) == (TrialState.PAUSED, 0, 100, "step-100")
    assert (paused.recall, paused.recall_nll, paused.loss, paused.seconds) == (0.25, 1.5, 3.5, 1.5)
    assert paused.finished_at is None
    assert values(store, study) == [
        (10, "loss", 5.0),
        (20, "loss", 4.0),
        (100, "loss", 3.5),
        (100, "recall", 0.25),
        (100, "recall_nll", 1.5),
        (100, "tokens_per_second", 9e4),
    ]


def test_a_promotion_adds_time_and_replaces_scores(store: Store, study: StudyInfo, add: Add, finish: Finish) -> None:
    add()
    finish(0, store.start_segment(study.id, 0, rung=0), rung=0, recall=0.25, loss=3.5)
    first = store.trial(study.id, 0)
    assert store.start_segment(study.id, 0, rung=1) == 2
    assert finish(0, 2, rung=1, state=TrialState.COMPLETE, recall=0.75)
    done = store.trial(study.id, 0)
    assert (done.state, done.rung, done.step, done.attempt, done.seconds) == (TrialState.COMPLETE, 1, 200, 2, 3.0)
    assert (done.recall, done.loss) == (0.75, None), "scores belong to the highest rung; a loss of rung 0 is not kept"
    assert done.started_at == first.started_at
    assert done.finished_at is not None


def test_the_score_of_the_last_step_counts(store: Store, study: StudyInfo, add: Add) -> None:
    add()
    batch = (loss(100, 2.0), loss(50, 3.0))
    finished = Finished(
        trial=0,
        attempt=store.start_segment(study.id, 0, rung=0),
        step=100,
        checkpoint="c",
        seconds=0.0,
        measurements=batch,
    )
    store.finish_segment(study.id, finished, state=TrialState.PAUSED, rung=0)
    assert store.trial(study.id, 0).loss == 2.0


def test_a_segment_that_runs_again_replaces_its_measurements(store: Store, study: StudyInfo, add: Add) -> None:
    add()
    first = store.start_segment(study.id, 0, rung=0)
    store.record(study.id, 0, first, [loss(10, 5.0), loss(20, 4.0)])
    lost = Failed(trial=0, attempt=first, kind=Failure.LOST, message="worker died")
    assert store.fail_segment(study.id, lost, state=TrialState.WAITING)
    second = store.start_segment(study.id, 0, rung=0)
    assert store.record(study.id, 0, second, [loss(10, 4.5), loss(10, 4.75), loss(30, 3.0)])
    assert values(store, study) == [(10, "loss", 4.75), (20, "loss", 4.0), (30, "loss", 3.0)]


def test_stale_messages_are_dropped(store: Store, study: StudyInfo, add: Add, finish: Finish) -> None:
    add()
    old = store.start_segment(study.id, 0, rung=0)
    store.fail_segment(
        study.id, Failed(trial=0, attempt=old, kind=Failure.LOST, message="gone"), state=TrialState.WAITING
    )

    def late() -> list[bool]:
        failed = Failed(trial=0, attempt=old, kind=Failure.ERROR, message="late", seconds=9.0)
        return [
            store.record(study.id, 0, old, [loss(10, 1.0)]),
            finish(0, old, rung=0, recall=1.0),
            store.fail_segment(study.id, failed, state=TrialState.FAILED),
        ]

    before = store.study("demo"), store.trial(study.id, 0)
    assert late() == [False, False, False], "the attempt is the trial's last, but it does not run any more"
    assert (store.study("demo"), store.trial(study.id, 0)) == before
    store.start_segment(study.id, 0, rung=0)
    before = store.study("demo"), store.trial(study.id, 0)
    assert late() == [False, False, False], "another attempt runs"
    assert (store.study("demo"), store.trial(study.id, 0)) == before
    assert values(store, study) == []


def test_a_batch_of_reports_drops_only_the_stale_ones(store: Store, study: StudyInfo, add: Add) -> None:
    for number in range(3):
        add()
        store.start_segment(study.id, number, rung=0)
    reports = [
        Report(trial=0, attempt=1, measurements=(loss(10, 1.0),)),
        Report(trial=1, attempt=7, measurements=(loss(10, 2.0),)),
        Report(trial=2, attempt=1, measurements=(loss(10, 3.0), loss(20, 2.0))),
        Report(trial=9, attempt=1, measurements=(loss(10, 4.0),)),
    ]
    revision = store.study("demo").revision
    assert store.record_many(study.id, reports) == 2
    assert store.study("demo").revision == revision + 1, "one transaction"
    found = [(row.trial, row.value) for row in store.measurements(study.id)]
    assert found == [(0, 1.0), (2, 3.0), (2, 2.0)]
    assert store.record_many(study.id, []) == 0


def test_a_failure_keeps_its_reason_until_the_trial_runs_again(store: Store, study: StudyInfo, add: Add) -> None:
    add()
    attempt = store.start_segment(study.id, 0, rung=0)
    failed = Failed(
        trial=0, attempt=attempt, kind=Failure.OOM, message="2 GiB\0 \ud800", traceback="Trace", step=40, seconds=2.0
    )
    assert store.fail_segment(study.id, failed, state=TrialState.WAITING)
    trial = store.trial(study.id, 0)
    assert (trial.state, trial.failure, trial.traceback) == (TrialState.WAITING, Failure.OOM, "Trace")
    assert trial.message == "2 GiB\\0 \\ud800"
    assert (trial.seconds, trial.step, trial.finished_at) == (2.0, 0, None), "step is that of the checkpoint"
    attempt = store.start_segment(study.id, 0, rung=0)
    assert store.trial(study.id, 0).failure is None
    error = Failed(trial=0, attempt=attempt, kind=Failure.DIVERGED, message="loss is nan")
    assert store.fail_segment(study.id, error, state=TrialState.FAILED)
    trial = store.trial(study.id, 0)
    assert (trial.state, trial.failure, trial.message) == (TrialState.FAILED, Failure.DIVERGED, "loss is nan")
    assert trial.finished_at is not None


def test_a_restart_continues_trials_to_their_rung(store: Store, study: StudyInfo, add: Add, finish: Finish) -> None:
    for _ in range(3):
        add()
    finish(0, store.start_segment(study.id, 0, rung=0), rung=0)
    store.start_segment(study.id, 0, rung=1)
    store.start_segment(study.id, 1, rung=0)
    assert store.recover(study.id) == [0, 1]
    promoted, fresh, untouched = store.trials(study.id)
    assert (promoted.state, promoted.rung, promoted.target_rung) == (TrialState.WAITING, 0, 1)
    assert promoted.checkpoint == "step-100"
    assert (fresh.state, fresh.rung, fresh.target_rung) == (TrialState.WAITING, -1, 0)
    assert (untouched.state, untouched.target_rung) == (TrialState.WAITING, -1)
    revision = store.study("demo").revision
    assert store.recover(study.id) == []
    assert store.study("demo").revision == revision
    assert store.start_segment(study.id, 0, rung=promoted.target_rung) == 3


def test_final_states_end_trials(store: Store, study: StudyInfo, add: Add) -> None:
    for _ in range(3):
        add()
    store.set_states(study.id, [0, 2], TrialState.PRUNED)
    assert [trial.finished_at is not None for trial in store.trials(study.id)] == [True, False, True]
    store.set_states(study.id, [0], TrialState.PAUSED)
    assert store.trial(study.id, 0).finished_at is None
    assert add(state=TrialState.INFEASIBLE).finished_at is not None


def test_only_start_segment_makes_a_trial_run(store: Store, study: StudyInfo, add: Add, finish: Finish) -> None:
    add(), add()
    with pytest.raises(InvalidValue, match="start_segment"):
        store.set_states(study.id, [0], TrialState.RUNNING)
    attempt = store.start_segment(study.id, 0, rung=0)
    with pytest.raises(InvalidValue, match="trial 0 is running"):
        store.start_segment(study.id, 0, rung=0)
    with pytest.raises(InvalidValue, match="start_segment"):
        finish(0, attempt, rung=0, state=TrialState.RUNNING)
    store.set_states(study.id, [1], TrialState.PRUNED)
    with pytest.raises(InvalidValue, match="trial 1 is pruned"):
        store.start_segment(study.id, 1, rung=0)
    with pytest.raises(TrialNotFound):
        store.start_segment(study.id, 2, rung=0)


def test_a_lost_checkpoint_means_step_zero(store: Store, study: StudyInfo, add: Add, finish: Finish) -> None:
    add()
    finish(0, store.start_segment(study.id, 0, rung=0), rung=0)
    store.forget_checkpoints(study.id, [0])
    trial = store.trial(study.id, 0)
    assert (trial.checkpoint, trial.step, trial.rung) == (None, 0, 0)


def test_measurements_are_filtered(store: Store, study: StudyInfo, add: Add) -> None:
    for number in range(2):
        add()
        attempt = store.start_segment(study.id, number, rung=0)
        batch = [Measurement(step=step, name=name, value=step) for step in (0, 10, 20) for name in ("loss", "recall")]
        store.record(study.id, number, attempt, batch)
    assert len(store.measurements(study.id)) == 12
    found = store.measurements(study.id, 1, names=["recall"], after_step=0)
    assert [(row.trial, row.step, row.name) for row in found] == [(1, 10, "recall"), (1, 20, "recall")]
    assert all(row.at.utcoffset() is not None for row in found)
    assert store.measurements(study.id, names=[]) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_enters_that_is_not_finite(store: Store, study: StudyInfo, add: Add, value: float) -> None:
    add()
    attempt = store.start_segment(study.id, 0, rung=0)
    broken = Measurement.model_construct(step=20, name="recall", value=value)
    before = store.study("demo"), store.trial(study.id, 0)
    report = Report.model_construct(trial=0, attempt=attempt, measurements=(loss(10, 1.0), broken))
    with pytest.raises(InvalidValue, match="recall="):
        store.record_many(study.id, [report])
    finished = Finished.model_construct(
        trial=0, attempt=attempt, step=100, checkpoint="c", seconds=1.0, measurements=(broken,)
    )
    with pytest.raises(InvalidValue, match="recall="):
        store.finish_segment(study.id, finished, state=TrialState.PAUSED, rung=0)
    slow = Failed.model_construct(trial=0, attempt=attempt, kind=Failure.ERROR, message="", traceback="", seconds=value)
    with pytest.raises(InvalidValue, match="seconds="):
        store.fail_segment(study.id, slow, state=TrialState.FAILED)
    assert (store.study("demo"), store.trial(study.id, 0), values(store, study)) == (*before, [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_database_itself_refuses_them(store: Store, study: StudyInfo, add: Add, value: float) -> None:
    add()
    store.record(study.id, 0, store.start_segment(study.id, 0, rung=0), [loss(10, 1.0)])
    columns = [("nas_measurements", "value"), ("nas_trials", "seconds")]
    if store.backend == "postgresql" or not math.isnan(value):  # SQLite stores NaN as NULL, which is no number
        columns += [("nas_trials", "recall"), ("nas_trials", "loss"), ("nas_trials", "recall_nll")]
    for table, column in columns:
        with pytest.raises(StorageError, match=r"(?i)constraint"), store._write() as connection:
            connection.execute(sqlalchemy.text(f"UPDATE {table} SET {column} = :value"), {"value": value})


def test_every_write_raises_the_revision(store: Store, study: StudyInfo, add: Add, finish: Finish) -> None:
    other = store.create_study("other", {}, "digest", seed=0)
    attempt = 0

    def start() -> None:
        nonlocal attempt
        attempt = store.start_segment(study.id, 0, rung=0)

    def fail() -> None:
        failed = Failed(trial=0, attempt=attempt, kind=Failure.LOST, message="gone")
        store.fail_segment(study.id, failed, state=TrialState.WAITING)

    writes: list[Callable[[], object]] = [
        add,
        start,
        lambda: store.record(study.id, 0, attempt, [loss(1, 1.0)]),
        fail,
        start,
        lambda: store.recover(study.id),
        start,
        lambda: finish(0, attempt, rung=0),
        lambda: store.set_states(study.id, [0], TrialState.PRUNED),
        lambda: store.forget_checkpoints(study.id, [0]),
        lambda: store.set_meta(study.id, "key", 1),
    ]
    for count, write in enumerate(writes, start=1):
        write()
        assert store.study("demo").revision == study.revision + count
    store.trials(study.id), store.measurements(study.id), store.get_meta(study.id, "key")
    assert store.study("demo").revision == study.revision + len(writes), "reading changes nothing"
    assert store.study("other") == other


def test_a_stop_on_the_way_keeps_the_scores_of_the_last_rung(
    store: Store, study: StudyInfo, add: Add, finish: Finish
) -> None:
    add()
    finish(0, store.start_segment(study.id, 0, rung=0), rung=0, recall=0.25, loss=3.5)
    attempt = store.start_segment(study.id, 0, rung=1)
    stopped = Finished(trial=0, attempt=attempt, step=150, checkpoint="c", seconds=1.0, measurements=())
    assert store.finish_segment(study.id, stopped, state=TrialState.WAITING, rung=0)
    row = store.trial(study.id, 0)
    assert (row.recall, row.loss, row.rung, row.step, row.target_rung) == (0.25, 3.5, 0, 150, 1)
