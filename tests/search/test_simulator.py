"""The simulated pool: virtual time, the life of a segment, and curves that a search can learn from."""

import math
from typing import Any

import pytest

from nas.architecture import Architecture, Candidate, LayerSpec, Recipe
from nas.messages import Event, Failed, Failure, Finished, Pool, Report, Segment
from nas.search.simulator import SimulatedPool, learning_curve


def candidate(mixers: str = "ddds", lr: float = 3e-3, kv_heads: int = 2, seed: int = 0) -> Candidate:
    """Four layers: d is Gated DeltaNet, h HGRN-2, s softmax."""
    specs = {
        "d": LayerSpec(mixer="gated_deltanet", heads=2, head_dim=32, conv_size=4),
        "h": LayerSpec(mixer="hgrn2", heads=2, head_dim=32),
        "s": LayerSpec(mixer="softmax", heads=2, head_dim=32, kv_heads=kv_heads),
    }
    layers = tuple(specs[letter] for letter in mixers)
    return Candidate(
        architecture=Architecture(vocab_size=288, hidden_size=64, intermediate_size=128, layers=layers),
        recipe=Recipe(optimizer="adamw", lr=lr, warmup_steps=40, total_steps=300, batch_size=4, sequence_length=64),
        seed=seed,
    )


def segment(trial: int = 0, start: int = 0, stop: int = 100, **more: Any) -> Segment:
    fields: dict[str, Any] = {
        "study": "s",
        "trial": trial,
        "attempt": 0,
        "rung": 0,
        "start_step": start,
        "stop_step": stop,
        "top": stop == 300,
        "candidate": candidate(),
        "seed": 1,
        "workload": {},
        "checkpoints": f"sim://{trial}",
        "checkpoint": f"sim://{trial}/{start}" if start else None,
    }
    return Segment.model_validate(fields | more)


def last(events: list[Event]) -> Finished | Failed:
    end = events[-1]
    assert isinstance(end, Finished | Failed)
    return end


def test_is_a_pool() -> None:
    pool: Pool = SimulatedPool(slots=3)
    assert pool.slots == 3


def test_a_segment_reports_and_finishes_in_virtual_time() -> None:
    pool = SimulatedPool(slots=1, seconds_per_step=0.5, reports=3)
    pool.submit(segment(7, start=100, stop=200, attempt=2))
    *reports, finished = pool.poll(timeout=0)
    assert all(isinstance(report, Report) for report in reports)
    assert [report.measurements[0].step for report in reports if isinstance(report, Report)] == [125, 150, 175]
    assert isinstance(finished, Finished)
    assert (finished.trial, finished.attempt, finished.step, finished.seconds) == (7, 2, 200, 50.0)
    assert finished.checkpoint == "sim://7/200"
    assert {m.name for m in finished.measurements} == {"recall", "recall_nll", "loss"}
    assert pool.now == pool.busy_seconds == 50
    assert pool.poll(timeout=100) == []
    assert pool.now == 50


def test_slots_run_side_by_side_and_the_rest_queues() -> None:
    pool = SimulatedPool(slots=2, seconds_per_step=1)
    for trial, stop in [(0, 100), (1, 30), (2, 50), (3, 10)]:
        pool.submit(segment(trial, stop=stop))
    order = []
    while events := pool.poll(1):
        order.append((last(events).trial, pool.now))
    assert order == [(1, 30), (2, 80), (3, 90), (0, 100)]
    assert pool.busy_seconds == 190


def test_segments_that_end_together_come_in_order_of_submission() -> None:
    pool = SimulatedPool(slots=4)
    for trial in (3, 1, 2, 0):
        pool.submit(segment(trial))
    assert [last(pool.poll(1)).trial for _ in range(4)] == [3, 1, 2, 0]


def test_pace_may_depend_on_the_candidate() -> None:
    pool = SimulatedPool(slots=1, seconds_per_step=lambda c: float(len(c.architecture.layers)))
    pool.submit(segment())
    pool.poll(1)
    assert pool.now == 400


def test_cancel_ends_running_and_queued_segments() -> None:
    pool = SimulatedPool(slots=2, seconds_per_step=1)
    for trial, stop in [(0, 10), (1, 100), (2, 20), (3, 30)]:
        pool.submit(segment(trial, stop=stop))
    pool.poll(1)  # trial 0, at 10; 2 starts
    pool.cancel(1)  # after 10 s; 3 starts
    pool.cancel(9)  # unknown: nothing happens
    assert [last(pool.poll(1)).trial for _ in range(2)] == [2, 3]
    assert pool.poll(1) == []
    assert (pool.now, pool.busy_seconds) == (40, 10 + 10 + 20 + 30)


def test_a_cancelled_trial_may_be_submitted_again() -> None:
    pool = SimulatedPool(slots=1, seconds_per_step=1)
    pool.submit(segment(0))
    pool.cancel(0)
    pool.submit(segment(0, stop=150, attempt=1))
    end = last(pool.poll(1))
    assert isinstance(end, Finished)
    assert end.attempt == 1
    assert pool.poll(1) == []


def test_stop_returns_running_segments_where_they_stand() -> None:
    pool = SimulatedPool(slots=2, seconds_per_step=1, reports=4)
    for trial, stop in [(0, 30), (1, 100), (2, 100)]:
        pool.submit(segment(trial, stop=stop))
    pool.poll(1)
    pool.stop()
    first, second = pool.poll(1), pool.poll(1)
    assert pool.now == 30
    for events, trial, step, reports in [(first, 1, 30, 1), (second, 2, 0, 0)]:
        end = last(events)
        assert isinstance(end, Finished)
        assert (end.trial, end.step, end.seconds, end.measurements) == (trial, step, float(step), ())
        assert len(events) == reports + 1
        pool.submit(segment(trial, start=step, stop=100, attempt=1, checkpoint=end.checkpoint))
    assert [last(pool.poll(1)).seconds for _ in range(2)] == [70, 100]


def test_close_ends_all() -> None:
    pool = SimulatedPool(slots=1)
    pool.submit(segment(0))
    pool.submit(segment(1))
    pool.close()
    assert pool.poll(1) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(segment(2))


def test_refuses_a_trial_twice_and_a_wrong_checkpoint() -> None:
    pool = SimulatedPool(slots=1)
    pool.submit(segment(0))
    with pytest.raises(ValueError, match="trial=0"):
        pool.submit(segment(0))
    for wrong in (segment(1, start=100, stop=200, checkpoint=None), segment(1, checkpoint="sim://0/100")):
        with pytest.raises(ValueError, match="checkpoint="):
            pool.submit(wrong)
    with pytest.raises(ValueError, match="slots=0"):
        SimulatedPool(slots=0)


def test_failures_replace_the_end() -> None:
    oom = Failed(trial=0, attempt=0, kind=Failure.OOM, message="out of memory", seconds=3)
    pool = SimulatedPool(slots=1, failures=lambda s: oom if s.trial == 0 else None)
    pool.submit(segment(0))
    pool.submit(segment(1))
    assert pool.poll(1) == [oom]
    assert pool.now == 3
    assert isinstance(last(pool.poll(1)), Finished)


def test_a_lost_worker_ends_half_way_and_the_retry_gives_the_same_scores() -> None:
    pool = SimulatedPool(slots=1, seconds_per_step=1, lose=lambda s: s.trial == 1 and s.attempt == 0)
    pool.submit(segment(1, start=100, stop=200))
    [lost] = pool.poll(1)
    assert isinstance(lost, Failed)
    assert (lost.kind, lost.step, lost.seconds, pool.now) == (Failure.LOST, 150, 50, 50)
    pool.submit(segment(1, start=100, stop=200, attempt=1))
    undisturbed = SimulatedPool(slots=1)
    undisturbed.submit(segment(1, start=100, stop=200))
    retried, expected = last(pool.poll(1)), last(undisturbed.poll(1))
    assert isinstance(retried, Finished)
    assert isinstance(expected, Finished)
    assert retried.measurements == expected.measurements


@pytest.mark.parametrize(("breaks", "step", "events"), [(40, 50, 1), (80, 100, 2)])
def test_values_that_are_not_finite_diverge(breaks: int, step: int, events: int) -> None:
    pool = SimulatedPool(
        slots=1, curve=lambda _, __, step: {"loss": math.nan if step > breaks else 3.0}, seconds_per_step=1
    )
    pool.submit(segment())
    found = pool.poll(1)
    assert len(found) == events
    end = found[-1]
    assert isinstance(end, Failed)
    assert (end.kind, end.message, end.step) == (Failure.DIVERGED, f"loss is nan at step {step}", step)
    assert pool.now == step


def test_chance_is_that_of_the_workload() -> None:
    pool = SimulatedPool(slots=1)
    pool.submit(segment(stop=1, workload={"recall": [{"values": 4}]}))
    end = last(pool.poll(1))
    assert isinstance(end, Finished)
    scores = {m.name: m.value for m in end.measurements}
    assert scores["recall"] == pytest.approx(1 / 4, abs=1e-3)
    assert scores["recall_nll"] == pytest.approx(math.log(4), abs=1e-3)


def test_curves_are_deterministic_and_seeds_differ() -> None:
    assert learning_curve(candidate(), 1, 200) == learning_curve(candidate(), 1, 200)
    assert learning_curve(candidate(), 1, 200) != learning_curve(candidate(), 2, 200)


def scores(c: Candidate, step: int, name: str = "recall") -> float:
    return sum(learning_curve(c, seed, step)[name] for seed in range(8)) / 8


def test_curves_tell_designs_and_learning_rates_apart() -> None:
    assert scores(candidate("ddds"), 300) > 0.95
    assert scores(candidate("hhhh"), 300) < 0.3
    assert scores(candidate("ddds"), 150) > scores(candidate("dddd"), 150) + 0.2
    assert scores(candidate("ddds", lr=3e-5), 300) < 0.1
    assert scores(candidate("ddds"), 300, "loss") < scores(candidate("ddds"), 100, "loss")


@pytest.mark.parametrize("mixers", ["dddd", "ddds", "hhhh", "hshs", "ssss"])
def test_nll_goes_with_recall(mixers: str) -> None:
    points = [learning_curve(candidate(mixers), 1, step) for step in range(0, 301, 20)]
    for point in points:
        assert 1 / 16 <= point["recall"] <= 1
        assert 0 <= point["recall_nll"] <= math.log(16)
    by_recall = sorted(points, key=lambda point: point["recall"])
    assert by_recall == sorted(points, key=lambda point: -point["recall_nll"])
    assert points[0]["recall_nll"] == pytest.approx(math.log(16), abs=0.02)
