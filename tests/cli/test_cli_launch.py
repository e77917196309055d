"""`nas launch`: a search to its end, stopped, resumed, and only planned."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nas.cli import estimate, live
from nas.messages import Event, Failed, Failure, Segment
from nas.search.simulator import SimulatedPool
from nas.service import Request, launch, make_plan
from search_spaces import load_space
from tests.cli.conftest import Ended, Nas


def test_ends_with_the_front_the_baselines_and_the_next_commands(demo: Ended, nas: Nas) -> None:
    assert "study demo finished: 8 of 8 trials ended" in demo.out
    assert "recall at chance: 0.062" in demo.out
    for baseline in ("Full attention (baseline)", "GLA pure (baseline)", "Gated DeltaNet pure (baseline)"):
        assert baseline in demo.out
    best = json.loads(nas("front", "demo", "--json").out)
    top = max(best, key=lambda row: row["recall"])["trial"]
    assert f"nas show demo/{top}\nnas export demo --top 3 --out out\nnas dashboard demo\n" in demo.out
    assert "\x1b" not in demo.out, "plain lines where there is no terminal"
    assert "demo/0 Full attention, adamw lr 0.0032: recall" in demo.out


def test_again_goes_on_and_trains_nothing_twice(demo: Ended, nas: Nas) -> None:
    before = json.loads(nas("trials", "--json").out)
    again = nas("launch", "--space", "tiny.yaml", "--study", "demo", "--trials", "10")
    after = json.loads(nas("trials", "--json").out)
    assert again.code == 0
    assert [row["candidate_digest"] for row in after[:8]] == [row["candidate_digest"] for row in before]
    assert len({row["candidate_digest"] for row in after}) == len(after) == 10


def test_a_study_with_more_trials_than_asked_for_has_nothing_to_do(demo: Ended, nas: Nas) -> None:
    again = nas("launch", "--space", "tiny.yaml", "--study", "demo", "--trials", "3")
    assert again.code == 0
    assert "study demo finished: 8 of 8 trials ended" in again.out
    assert "3 trials on" not in again.out, "no heading where nothing is dispatched"


def test_enqueued_designs_are_read_as_spaces_are(nas: Nas, folder: Path) -> None:
    (folder / "own.yaml").write_text("- {backbone: gla, ratio: 4:1, lr_adamw: 2e-3}\n")
    assert nas("launch", "--space", "tiny.yaml", "--enqueue", "own.yaml").code == 0
    own = [row for row in json.loads(nas("trials", "--json").out) if row["prior"] == "enqueued"]
    assert [(row["diagram"], row["lr"]) for row in own] == [("---F", 0.002)]


def test_commands_named_at_the_end_find_another_storage(nas: Nas) -> None:
    ended = nas("launch", "--space", "tiny.yaml", "--storage", "sqlite:///other.db")
    assert "nas dashboard tiny --storage sqlite:///other.db\n" in ended.out


class Interrupted(SimulatedPool):
    """Ctrl-C arrives while the third segment runs."""

    polls = 0

    def poll(self, timeout: float) -> list[Event]:
        self.polls += 1
        if self.polls == 3:
            signal.raise_signal(signal.SIGINT)
        return super().poll(timeout)


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(nas: Nas, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["launch", "--space", "tiny.yaml", "--study", "my-study"]
    monkeypatch.setattr("sys.argv", ["nas", *command])
    with monkeypatch.context() as patch:
        patch.setattr("nas.service._ray_pool", lambda plan: Interrupted(2))
        stopped = nas(*command)
    assert stopped.code == 0
    assert "study my-study stopped" in stopped.out
    assert "goes on where it stood: nas launch --space tiny.yaml --study my-study\n" in stopped.out
    states = json.loads(nas("status", "--json").out)["states"]
    assert states["running"] == 0
    assert nas(*command).code == 0
    states = json.loads(nas("status", "--json").out)["states"]
    assert states["complete"] + states["pruned"] == 8


def test_an_aborted_study_fails_with_one_line(nas: Nas, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(segment: Segment) -> Failed:
        return Failed(trial=segment.trial, attempt=segment.attempt, kind=Failure.ERROR, message="boom [bracket]")

    monkeypatch.setattr("nas.service._ray_pool", lambda plan: SimulatedPool(1, failures=broken))
    ended = nas("launch", "--space", "tiny.yaml")
    assert ended.code == 1
    assert "boom [bracket]" in ended.error
    assert ended.error.endswith("; nas trials tiny shows the trials; mend the cause and run the same command again")


def test_a_diverged_trial_is_failed_and_never_on_the_front(nas: Nas, monkeypatch: pytest.MonkeyPatch) -> None:
    def curve(candidate: Any, seed: int, step: int) -> dict[str, float]:
        bad = float("nan") if candidate.architecture.backbones == ("gla",) and step > 50 else 0.5
        return {"recall": bad, "recall_nll": 1.0, "loss": 2.0}

    monkeypatch.setattr("nas.service._ray_pool", lambda plan: SimulatedPool(1, curve))
    assert nas("launch", "--space", "tiny.yaml").code == 0
    rows = json.loads(nas("trials", "--json").out)
    diverged = [row for row in rows if row["backbones"] == ["gla"]]
    assert diverged
    assert {(row["state"], row["failure"]) for row in diverged} == {("failed", "diverged")}
    assert not [row for row in json.loads(nas("front", "--json").out) if row["backbones"] == ["gla"]]
    shown = nas("show", str(diverged[0]["trial"]))
    assert "diverged: " in shown.out


def test_a_study_at_chance_says_so_instead_of_a_front(nas: Nas, monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(candidate: Any, seed: int, step: int) -> dict[str, float]:
        return {"recall": 0.06, "recall_nll": 2.77, "loss": 2.0}

    monkeypatch.setattr("nas.service._ray_pool", lambda plan: SimulatedPool(1, guess))
    assert "all at chance, as full attention is" in nas("launch", "--space", "tiny.yaml").out
    assert "all at chance, as full attention is" in nas("front").out
    assert nas("front", "--json").out == "[]\n"
    refused = nas("export")
    assert refused.code == 2
    assert "all at chance" in refused.error
    assert nas("front", "--all").out.count("at chance") > 2


def test_a_dry_run_writes_nothing_and_states_what_it_assumes(nas: Nas, folder: Path) -> None:
    ended = nas("launch", "--space", "tiny.yaml", "--dry-run", "--timeout", "2h")
    assert ended.code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["tiny.yaml"]
    for part in (
        "6 designs",
        "at 32k tokens",
        "8 (3 baselines, 0 enqueued)",
        "20 GFLOP/s",
        "2h 00m",
        "16 bytes a parameter",
    ):
        assert part in ended.out


def test_the_estimate_is_what_halving_does(folder: Path) -> None:
    space = load_space("tiny.yaml")
    assert estimate.expected_at_rungs(space, 11) == [11, 3 + 4, 3 + 2]
    assert estimate.expected_steps(space, 11) == 100 * (11 + 7 + 5)
    found = estimate.estimate(space, 11)
    assert found.tokens == found.steps * 4 * 64
    assert found.seconds(found.flops) == 1


def test_the_live_view_shows_states_workers_levels_and_time_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(Request(space="tiny.yaml", workers=2))
    screen = io.StringIO()
    monkeypatch.setattr(live, "console", lambda: Console(file=screen, width=100, force_terminal=True, no_color=True))
    monkeypatch.setattr(live, "REDRAW_SECONDS", 0.0)
    view = live.make_view(plan)
    assert isinstance(view, live.LiveView)
    with view:
        launch(plan.request, pool=lambda plan: SimulatedPool(2), notify=view.notify, log=view.log)
    shown = screen.getvalue()
    for part in ("3 of 8 trials", "2 running", "0/100", "<= 1/16", "<= 1 ", "left", "Full attention", "at step 300"):
        assert part in shown
