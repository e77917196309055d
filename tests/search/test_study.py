"""The dispatcher on a simulated pool: halving, resuming, failures, budgets; nothing lost, nothing twice."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nas.architecture import Candidate
from nas.messages import Event, Failed, Failure, Segment
from nas.search.front import front
from nas.search.simulator import SimulatedPool
from nas.search.study import StudyAborted
from nas.service import LaunchError, Request, launch
from nas.store import Store, StudyBusy
from search_spaces import SearchSpace
from search_spaces.designs import baselines, labelled_baselines
from tests.search.conftest import Launch


class Spy(SimulatedPool):
    """Remembers what was submitted; dies after `die_after` segments, as a killed dispatcher would."""

    def __init__(self, slots: int = 2, die_after: int | None = None, **options: Any) -> None:
        super().__init__(slots, **options)
        self.submitted: list[Segment] = []
        self.die_after = die_after

    def submit(self, segment: Segment) -> None:
        if self.die_after is not None and len(self.submitted) >= self.die_after:
            raise KeyboardInterrupt
        self.submitted.append(segment)
        super().submit(segment)


def states(records: list[dict[str, Any]]) -> Counter[str]:
    return Counter(record["state"] for record in records)


def test_a_search_trains_prunes_and_completes(simulate: Launch, space: SearchSpace) -> None:
    spy = Spy()
    result = simulate(spy)
    records = result.records
    assert result.outcome == "finished"
    assert len(records) == 24
    assert set(states(records)) == {"complete", "pruned"}
    assert states(records)["pruned"] >= 8
    assert len({record["candidate_digest"] for record in records}) == 24
    for record in records:
        assert record["step"] == space.rungs.steps[record["rung"]]
        assert (record["rung"] == 2) == (record["state"] == "complete")
    assert len(spy.submitted) == len({(s.trial, s.rung) for s in spy.submitted}), "a segment ran twice"
    assert front(records)


def test_baselines_come_first_and_are_trained_to_the_top(simulate: Launch, space: SearchSpace) -> None:
    records = simulate().records
    expected = baselines(space)
    assert [record["candidate_digest"] for record in records[: len(expected)]] == [base.digest for base in expected]
    assert {record["state"] for record in records[: len(expected)]} == {"complete"}
    assert {record["prior"] for record in records[: len(expected)]} == {"baseline"}


def test_segments_go_on_from_the_last_checkpoint_with_the_trials_own_seed(simulate: Launch) -> None:
    spy = Spy()
    simulate(spy)
    seeds: dict[int, int] = {}
    for segment in spy.submitted:
        assert seeds.setdefault(segment.trial, segment.seed) == segment.seed
        assert (segment.start_step == 0) == (segment.checkpoint is None)
        assert segment.top == (segment.stop_step == 300)
    assert len(set(seeds.values())) == len(seeds)


@pytest.mark.parametrize("inserted", [1, 2, 4])
def test_killed_between_baselines_the_rest_comes_later(
    simulate: Launch, space: SearchSpace, monkeypatch: pytest.MonkeyPatch, inserted: int
) -> None:
    add, calls = Store.add_trial, []

    def dying(self: Store, *args: Any, **options: Any) -> Any:
        if len(calls) == inserted:
            raise KeyboardInterrupt
        calls.append(1)
        return add(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add_trial", dying)
        with pytest.raises(KeyboardInterrupt):
            simulate(trials=8)
    found = [r["candidate_digest"] for r in simulate(trials=8).records if r["prior"] == "baseline"]
    assert found == [base.digest for base in baselines(space)]


def test_a_second_ctrl_c_leaves_no_trial_running(simulate: Launch, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(Spy(die_after=5))
    with Store.open(f"sqlite:///{tmp_path}/nas.db", read_only=True) as store:
        assert not [row for row in store.trials(store.study("s").id) if row.state == "running"]


@pytest.mark.parametrize("die_after", [0, 1, 7, 20])
def test_killed_and_resumed_loses_and_repeats_nothing(simulate: Launch, tmp_path: Path, die_after: int) -> None:
    first = Spy(die_after=die_after)
    with pytest.raises(KeyboardInterrupt):
        simulate(first)
    second = Spy()
    result = simulate(second)
    records = result.records
    assert [record["trial"] for record in records] == list(range(24))
    assert len({record["candidate_digest"] for record in records}) == 24
    assert set(states(records)) <= {"complete", "pruned"}
    done = {(s.trial, s.rung) for s in first.submitted[:-2]}
    again = {(s.trial, s.rung) for s in second.submitted}
    assert len(done & again) <= 2, "only segments in flight may run again"
    with Store.open(f"sqlite:///{tmp_path}/nas.db", read_only=True) as store:
        info = store.study("s")
        for row in store.trials(info.id):
            steps = [m.step for m in store.measurements(info.id, row.number, ["recall_nll"])]
            assert steps == sorted(set(steps))
            assert row.step == max(steps)


def test_a_resume_proposes_what_an_uninterrupted_run_would_not_repeat(simulate: Launch) -> None:
    """One worker and no trial in flight at the kill: the resumed study proposes exactly what a whole one does."""
    whole = simulate(Spy(1), study="whole").records
    with pytest.raises(KeyboardInterrupt):
        simulate(Spy(1, die_after=30), study="cut")
    with_it = simulate(Spy(1), study="cut").records
    assert [r["candidate_digest"] for r in with_it] == [r["candidate_digest"] for r in whole]


def test_a_finished_study_starts_no_workers_and_can_grow(simulate: Launch) -> None:
    simulate()
    spy = Spy()
    assert simulate(spy).outcome == "finished"
    assert not spy.submitted
    grown = simulate(Spy(), trials=30).records
    assert len(grown) == 30


def test_lost_segments_are_retried_and_errors_are_not(simulate: Launch) -> None:
    lost: set[tuple[int, int]] = set()

    def fail(segment: Segment) -> Failed | None:
        kind = None
        if segment.trial == 6 and (segment.trial, segment.rung) not in lost:
            lost.add((segment.trial, segment.rung))
            kind = Failure.LOST
        elif segment.trial == 8:
            kind = Failure.DIVERGED
        elif segment.trial == 9:
            kind = Failure.ERROR
        if kind is None:
            return None
        return Failed(
            trial=segment.trial, attempt=segment.attempt, kind=kind, message=f"made to be {kind.value}", step=42
        )

    records = simulate(Spy(failures=fail)).records
    assert records[6]["state"] in ("complete", "pruned")
    assert records[6]["failure"] is None
    assert (records[8]["state"], records[8]["failure"], records[8]["step"]) == ("failed", "diverged", 42)
    assert (records[9]["state"], records[9]["failure"], records[9]["message"]) == (
        "failed",
        "error",
        "made to be error",
    )
    assert not {8, 9} & {record["trial"] for record in front(records)}


def test_a_broken_environment_stops_the_study(simulate: Launch) -> None:
    def fail(segment: Segment) -> Failed:
        return Failed(trial=segment.trial, attempt=segment.attempt, kind=Failure.ERROR, message="no module named fla")

    with pytest.raises(StudyAborted, match="5 trials in a row failed; .*no module named fla"):
        simulate(Spy(failures=fail))


def test_late_results_of_an_old_attempt_change_nothing(simulate: Launch, tmp_path: Path) -> None:
    class Late(Spy):
        def poll(self, timeout: float) -> list[Event]:
            events = super().poll(timeout)
            return events + [e.model_copy(update={"attempt": e.attempt - 1}) for e in events]

    records = simulate(Late()).records
    assert set(states(records)) == {"complete", "pruned"}


def test_over_budget_designs_never_become_trials(simulate: Launch, space: SearchSpace) -> None:
    tight = space.model_validate(space.canonical() | {"budget": {"kv_cache": "20%"}})
    records = simulate(space=tight, study="tight", trials=20).records
    assert all(r["kv_cache_ratio"] <= 0.2 for r in records if r["prior"] == "sampled")
    assert any(r["full_attention_layers"] for r in records if r["prior"] == "sampled")


def test_baselines_over_the_budget_are_trained_but_never_on_the_front(simulate: Launch, space: SearchSpace) -> None:
    tight = space.model_validate(space.canonical() | {"budget": {"kv_cache": "20%"}})
    records = simulate(space=tight, study="tight", trials=12).records
    assert (records[0]["name"], records[0]["state"]) == ("Full attention", "complete")
    assert records[0]["within_budget"] is False
    assert front(records)
    assert all(row["kv_cache_ratio"] <= 0.2 for row in front(records))


def test_an_older_studys_full_attention_baseline_is_not_added_in_another_form(
    simulate: Launch, space: SearchSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until revision 0002 the baseline had as many KV heads as query heads, whatever the space's kv_groups."""
    grouped = space.model_validate(space.canonical() | {"kv_groups": [2]})
    ungrouped = space.model_validate(space.canonical() | {"kv_groups": [1]})
    with monkeypatch.context() as patch:
        patch.setattr("nas.search.study.labelled_baselines", lambda _: labelled_baselines(ungrouped)[:1])
        simulate(space=grouped, study="old", trials=6)
    records = simulate(space=grouped, study="old", trials=9).records
    assert [r["name"] for r in records if r["prior"] == "baseline" and r["placement"] == "full"] == ["Full attention"]
    assert sum(r["prior"] == "baseline" for r in records) > 1


def test_a_growing_study_compares_its_pruned_trials_again(simulate: Launch) -> None:
    before = simulate(trials=16).records
    after = simulate(Spy(), trials=48).records
    pruned = {r["trial"] for r in before if r["state"] == "pruned"}
    assert {r["state"] for r in after} == {"complete", "pruned"}
    assert all(after[n]["step"] >= before[n]["step"] for n in range(16))
    assert pruned


def test_a_full_disk_stops_the_study_and_a_damaged_checkpoint_starts_over(simulate: Launch) -> None:
    once: set[tuple[str, int]] = set()

    def fail(segment: Segment) -> Failed | None:
        for kind, trial, rung in ((Failure.CHECKPOINT, 1, 1), (Failure.STORAGE, 2, 1)):
            if (segment.trial, segment.rung) == (trial, rung) and (kind, trial) not in once:
                once.add((kind, trial))
                return Failed(trial=trial, attempt=segment.attempt, kind=kind, message="no space left on device")
        return None

    with pytest.raises(StudyAborted, match="s/2 cannot keep its checkpoints: no space left on device"):
        simulate(Spy(failures=fail), trials=8)
    spy = Spy(failures=fail)
    records = simulate(spy, trials=8).records
    assert (Failure.CHECKPOINT, 1) in once
    assert set(states(records)) <= {"complete", "pruned"}


def test_workers_that_keep_dying_stop_the_study(simulate: Launch) -> None:
    with pytest.raises(StudyAborted, match="5 trials in a row failed"):
        simulate(Spy(lose=lambda segment: True))


def test_an_early_stop_keeps_the_scores_of_the_last_rung(
    simulate: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial 1 is stopped on its way from rung 0 to rung 1; what it scored at rung 0 stays."""

    class Stopping(Spy):
        def poll(self, timeout: float) -> list[Event]:
            if any((s.trial, s.rung) == (1, 1) for s in self.submitted):
                dispatchers[0].stop()
                return []
            return super().poll(timeout)

    from nas.search.study import Dispatcher

    dispatchers: list[Dispatcher] = []
    monkeypatch.setattr("nas.search.study.STOP_SECONDS", 5)
    begin = Dispatcher.run

    def run(self: Dispatcher) -> Any:
        dispatchers.append(self)
        return begin(self)

    monkeypatch.setattr(Dispatcher, "run", run)
    pool = Stopping()
    stop = pool.stop

    def release() -> bool:
        monkeypatch.setattr(Stopping, "poll", SimulatedPool.poll)
        return stop()

    monkeypatch.setattr(pool, "stop", release)
    result = simulate(pool, trials=8)
    assert result.outcome == "stopped"
    stopped = result.records[1]
    assert (stopped["state"], stopped["rung"]) == ("waiting", 0)
    assert stopped["recall"] is not None


def test_two_studies_of_one_name_keep_their_checkpoints_apart(simulate: Launch, tmp_path: Path) -> None:
    folders = []
    for database in ("a.db", "b.db"):
        spy = Spy()
        simulate(spy, trials=6, storage=f"sqlite:///{tmp_path}/{database}")
        folders.append({segment.checkpoints for segment in spy.submitted})
    assert not folders[0] & folders[1]


def test_own_designs_are_tried_and_those_over_budget_marked(
    simulate: Launch, space: SearchSpace, tmp_path: Path
) -> None:
    designs = tmp_path / "own.yaml"
    designs.write_text("- {backbone: gla, ratio: '4:1', kv_groups: 2}\n- {backbone: gla, ratio: '2:1'}\n")
    tight = space.model_validate(space.canonical() | {"budget": {"kv_cache": "20%"}})
    records = simulate(space=tight, enqueue=str(designs), trials=12).records
    own = [r for r in records if r["prior"] == "enqueued"]
    assert [r["name"] for r in own] == ["GLA 4:1 GQA2", "GLA 2:1"]
    assert own[0]["state"] in ("complete", "pruned")
    assert own[1]["state"] == "infeasible"
    assert sum(r["state"] != "infeasible" for r in records) == 12


def test_an_exhausted_space_ends(simulate: Launch, space: SearchSpace) -> None:
    small = space.canonical() | {
        "backbones": ["gla"],
        "ratios": ["pure", "4:1"],
        "placements": ["interleaved"],
        "kv_groups": [1],
        "routing": ["none"],
        "optimizers": {"adamw": {"lr": [1e-3, 3e-3]}},
    }
    result = simulate(space=space.model_validate(small), study="small", trials=50)
    assert result.outcome == "exhausted"
    assert len(result.records) == 5  # four designs, and full attention


def test_an_exhausted_space_still_promotes_whatever_the_number_of_workers(simulate: Launch, space: SearchSpace) -> None:
    def blind(candidate: Candidate, seed: int, step: int) -> dict[str, float]:
        return {"recall": space.workload.chance, "recall_nll": math.log(16), "loss": 5.0}

    finite = space.model_validate(
        space.canonical() | {"kv_groups": [1], "placements": ["late"], "optimizers": {"adamw": {"lr": [1e-3, 3e-3]}}}
    )
    for slots in (1, 3):
        result = simulate(Spy(slots, curve=blind), space=finite, study=f"w{slots}", trials=500)
        assert result.outcome == "exhausted"
        assert set(states(result.records)) == {"complete"}


def test_a_grid_tries_every_combination_and_prunes_nothing(simulate: Launch, space: SearchSpace) -> None:
    cells = space.canonical() | {"grid": True, "trials": None, "optimizers": {"adamw": {"lr": [1e-3, 3e-3]}}}
    cells["placements"] = ["interleaved"]
    result = simulate(space=space.model_validate(cells), study="grid", trials=None)
    assert set(states(result.records)) == {"complete"}
    assert len(result.records) == result.plan.trials


def test_at_chance_nothing_is_pruned(simulate: Launch, space: SearchSpace) -> None:
    def blind(candidate: Candidate, seed: int, step: int) -> dict[str, float]:
        return {"recall": space.workload.chance, "recall_nll": math.log(16), "loss": 5.0}

    records = simulate(Spy(curve=blind), study="blind", trials=12).records
    assert set(states(records)) == {"complete"}


def test_a_study_is_never_mixed_with_another_space(simulate: Launch, space: SearchSpace) -> None:
    simulate(trials=6)
    other = space.model_validate(space.canonical() | {"kv_groups": [1]})
    with pytest.raises(LaunchError, match=r"exists with another space \(kv_groups: \[1, 2\] -> \[1\]\)"):
        simulate(space=other)


def test_a_second_launch_on_a_running_study_is_refused(simulate: Launch, tmp_path: Path) -> None:
    simulate(trials=6)
    with (
        Store.open(f"sqlite:///{tmp_path}/nas.db") as store,
        store.lock("s"),
        pytest.raises(StudyBusy, match=r"being run by process \d+"),
    ):
        simulate(trials=8)


def test_a_budget_that_nothing_meets_names_the_smallest(simulate: Launch, space: SearchSpace, tmp_path: Path) -> None:
    impossible = space.model_validate(space.canonical() | {"budget": {"kv_cache": "1MiB"}})
    with pytest.raises(LaunchError, match="no design of cpu-demo fits; the smallest keeps 25165824 bytes"):
        simulate(space=impossible)
    assert not (tmp_path / "nas.db").exists()


def test_a_timeout_stops_and_the_study_goes_on_later(
    space: SearchSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nas.search.study.STOP_SECONDS", 0.1)
    storage = f"sqlite:///{tmp_path}/nas.db"

    class Slow(Spy):
        def poll(self, timeout: float) -> list[Event]:
            return []

    request = Request(space=space, study="s", storage=storage, trials=8, timeout=0.2)
    result = launch(request, pool=lambda plan: Slow())
    assert result.outcome == "timeout"
    assert states(result.records)["running"] == 0
    assert launch(Request(space=space, study="s", storage=storage, trials=8), pool=lambda plan: Spy()).outcome == (
        "finished"
    )
