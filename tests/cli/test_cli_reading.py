"""The commands that read: status, front, trials, show, spaces, data, export, dashboard, settings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from nas.cli import text
from nas.search.front import front
from nas.search.records import load
from nas.store import Store
from search_spaces import load_space, preset_names
from tests.cli.conftest import Ended, Nas

KEYS = [
    "study",
    "trial",
    "state",
    "failure",
    "candidate_digest",
    "architecture_digest",
    "recall",
    "recall_sd",
    "recall_chance",
    "loss",
    "kv_cache_bytes",
    "kv_cache_ratio",
    "attention_bytes",
    "recurrent_bytes",
    "convolution_bytes",
    "parameters",
    "layers",
    "full_attention_layers",
    "backbones",
    "placement",
    "kv_heads",
    "optimizer",
    "lr",
    "routing",
    "seeds",
    "rung",
    "step",
    "seconds",
    "prior",
    "proxy_kv_cache_bytes",
    "proxy_layers",
]


def strict(output: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(output, parse_constant=refuse)


def stored() -> list[dict[str, Any]]:
    with Store.open("sqlite:///nas.db", read_only=True) as store:
        return load(store, "demo")


def test_json_is_the_records_and_nothing_else(demo: Ended, nas: Nas) -> None:
    records = stored()
    assert strict(nas("trials", "demo", "--json").out) == records
    assert strict(nas("front", "demo", "--json").out) == front(records)
    assert strict(nas("show", "demo/3", "--json").out) == records[3]
    assert set(KEYS) <= set(records[0])


def test_all_lists_every_complete_design_once(demo: Ended, nas: Nas) -> None:
    rows = strict(nas("front", "--all", "--json").out)
    complete = {row["architecture_digest"] for row in stored() if row["state"] == "complete"}
    assert {row["architecture_digest"] for row in rows} == complete
    assert len(rows) == len(complete)
    assert len(nas("front", "--all").out.splitlines()) >= len(rows) + 2


def test_trials_by_state(demo: Ended, nas: Nas) -> None:
    pruned = strict(nas("trials", "--state", "pruned", "--json").out)
    assert pruned
    assert {row["state"] for row in pruned} == {"pruned"}
    assert len(nas("trials").out.splitlines()) == 2 + 8  # the header and its line


def test_the_latest_study_is_the_default(demo: Ended, nas: Nas) -> None:
    assert nas("launch", "--space", "tiny.yaml", "--study", "later", "--trials", "3").code == 0
    assert strict(nas("show", "0", "--json").out)["study"] == "later"
    status = nas("status").out
    assert "later (space tiny, seed 0)" in status
    assert re.search(r"other studies +demo", status)
    assert strict(nas("status", "demo", "--json").out)["states"]["running"] == 0


def test_status_shows_what_runs(demo: Ended, nas: Nas) -> None:
    with Store.open("sqlite:///nas.db") as store:
        info = store.study("demo")
        row = store.trials(info.id)[3]
        added = store.add_trial(
            info.id,
            candidate=row.candidate,
            candidate_digest="new",
            architecture_digest="new",
            params={},
            sampler_state={},
            facts=row.facts,
            prior="sampled",
        )
        store.start_segment(info.id, added.number, 0)
    status = strict(nas("status", "--json").out)
    assert status["states"]["running"] == 1
    assert status["running"][0] | {"name": ""} == {
        "trial": 8,
        "name": "",
        "rung": 0,
        "step": 0,
        "stop_step": 100,
        "last_activity": None,
    }
    assert "demo/8" in nas("status").out
    assert "step 0 of 100" in nas("status").out


def test_show_draws_the_design_and_its_scores(demo: Ended, nas: Nas) -> None:
    shown = nas("show", "demo/0").out
    for part in ("demo/0  Full attention  complete", "F" * 24, "0-3  Softmax attention, 2 heads x 16", "6.0 GiB"):
        assert part in shown
    for part in ("adamw, learning rate 0.00316", "chance 0.062", "steps 50 to 300", "nats a token"):
        assert part in shown


def test_show_prints_a_failure_with_its_traceback(demo: Ended, nas: Nas) -> None:
    from nas.messages import Failed, Failure, TrialState

    with Store.open("sqlite:///nas.db") as store:
        info = store.study("demo")
        row = store.trials(info.id)[3]
        number = store.add_trial(
            info.id,
            candidate=row.candidate,
            candidate_digest="new",
            architecture_digest="new",
            params={},
            sampler_state={},
            facts=row.facts,
            prior="sampled",
        ).number
        attempt = store.start_segment(info.id, number, 0)
        failed = Failed(
            trial=number, attempt=attempt, kind=Failure.ERROR, message="bad [bold]shape", traceback="Traceback\n  x[0]"
        )
        store.fail_segment(info.id, failed, state=TrialState.FAILED)
    shown = nas("show", f"demo/{number}").out
    assert "error: bad [bold]shape\nTraceback\n  x[0]\n" in shown


def test_spaces_lists_prints_and_checks(nas: Nas, folder: Path) -> None:
    listed = nas("spaces").out
    assert listed == nas("spaces", "list").out
    for name in preset_names():
        assert name in listed
        (folder / "copy.yaml").write_text(nas("spaces", "show", name).out)
        assert load_space("copy.yaml") == load_space(name)
    checked = nas("spaces", "check", "p1-grid").out
    assert "p1-grid is valid" in checked
    assert "30, with their recipes 90 candidates" in checked


def test_data_show_prints_a_sample(nas: Nas) -> None:
    sample = nas("data", "show", "mqar", "--space", "tiny.yaml").out
    assert "chance: 1 of 16 answers = 0.0625" in sample
    assert sample != nas("data", "show", "mqar", "--space", "tiny.yaml", "--seed", "1").out


def test_export_takes_the_best_of_the_front_or_one_trial(
    demo: Ended, nas: Nas, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[int]]] = []

    def export_trials(store: Store, study: str, numbers: list[int], out: Path) -> list[Path]:
        asked.append((study, numbers))
        return [out / str(number) for number in numbers]

    monkeypatch.setattr("nas.export.export_trials", export_trials)
    best = [row["trial"] for row in sorted(front(stored()), key=lambda row: -row["recall"])]
    assert nas("export", "demo", "--top", "2", "--out", "o").out == "".join(f"o/{number}\n" for number in best[:2])
    assert nas("export", "demo/5", "--out", "o").out == "o/5\n"
    assert asked == [("demo", best[:2]), ("demo", [5])]
    ended = nas("export", "demo", "--top", "50", "--out", "o")
    assert ended.code == 0
    assert len(ended.out.splitlines()) == len(best)
    assert ended.err == f"exported {len(best)}, not 50: the Front of study demo holds no more\n"


def test_an_export_that_fails_half_way_is_a_failure(
    demo: Ended, nas: Nas, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    from nas.export import hub

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    number = stored()[0]["trial"]
    row = SimpleNamespace(number=number, checkpoint="x")
    monkeypatch.setattr("nas.store.Store.trial", lambda *_: row)
    monkeypatch.setattr(hub, "load_model", lambda _: None)
    monkeypatch.setattr(hub, "_write", full)
    ended = nas("export", f"demo/{number}", "--out", "o")
    assert ended.code == 1
    assert ended.error.startswith(f"error: out='o/demo-{number}' cannot be written: I/O error: No space")
    assert not list((folder / "o").iterdir())


def test_dashboard_runs_the_server_with_the_storage_in_its_environment(
    demo: Ended, nas: Nas, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[list[str], str]] = []

    def run(command: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        calls.append((command, env["NAS_STORAGE"]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("nas.cli.tools.subprocess.run", run)
    ended = nas("dashboard", "demo", "--port", "8600")
    assert (ended.code, ended.err) == (0, "")
    assert "http://127.0.0.1:8600/" in ended.out
    command, storage = calls[0]
    assert storage == "sqlite:///nas.db"
    assert command[-2:] == ["--study", "demo"]
    assert not any("sqlite" in part for part in command)


def test_settings_option_beats_variable_beats_file_beats_default(
    nas: Nas, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*options: str) -> str:
        return re.findall(r"sqlite:///\w+\.db", nas("status", *options).error)[0]

    assert asked() == "sqlite:///nas.db"
    (folder / "nas.toml").write_text('storage = "sqlite:///file.db"\nworkers = 3\n')
    assert asked() == "sqlite:///file.db"
    assert "on 3 workers" in nas("launch", "--space", "tiny.yaml", "--dry-run").out
    monkeypatch.setenv("NAS_STORAGE", "sqlite:///variable.db")
    assert asked() == "sqlite:///variable.db"
    assert asked("--storage", "sqlite:///option.db") == "sqlite:///option.db"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('storge = "x"', "unknown key 'storge'; did you mean 'storage'?"),
        ("workers = true", "workers=True must be int"),
        ("storage = ", "nas.toml cannot be read"),
    ],
)
def test_a_bad_settings_file_is_refused(nas: Nas, folder: Path, content: str, part: str) -> None:
    (folder / "nas.toml").write_text(content)
    ended = nas("status")
    assert ended.code == 2
    assert part in ended.error


def test_version_and_help(nas: Nas) -> None:
    from nas._version import __version__

    assert nas("--version").out == f"nas {__version__}\n"
    assert nas().out == nas("--help").out
    assert "Usage:" in nas("front", "-h").out


@pytest.mark.parametrize(
    ("given", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("1d", 86400)]
)
def test_durations_are_read(given: str, seconds: float) -> None:
    assert text.parse_duration(given) == seconds


def test_numbers_are_written_for_people() -> None:
    assert [text.percent(x) for x in (None, 0.0039, 0.341, 0.9997, 1.0)] == ["-", "0.39%", "34.1%", "100%", "100%"]
    assert [text.size(x) for x in (0, 1023, 1536, 25165824, 6 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "24.0 MiB",
        "6.0 GiB",
    ]
    assert [text.big(x) for x in (999, 1_310_000_000)] == ["999", "1.31 B"]
    assert [text.duration(x) for x in (5, 200, 7500, 100_000)] == ["5s", "3m 20s", "2h 05m", "1d 3h"]
    assert text.parse_contexts("4k, 32768") == [4096, 32768]
    assert text.sparkline([0, 1, 6, 7]) == "▁▂▇█"
    assert text.sparkline([1.0, 1.0]) == "▁▁"
    assert len(text.sparkline(list(range(1000)))) == 32
