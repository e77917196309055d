"""Bad input: one line that names the field, its value and what is allowed; exit 2; nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nas.store import Store
from tests.cli.conftest import TINY, Ended, Nas, write_space


def refused(ended: Ended, *parts: str) -> None:
    assert ended.code == 2
    assert ended.out == "" or ended.out.startswith("study ")  # the plain view's heading
    assert ended.error.startswith("error: ")
    for part in parts:
        assert part in ended.error


def assert_untouched(folder: Path) -> None:
    assert not list(folder.glob("nas*"))


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"backbone": ["gla"]}, ["backbone: unknown key", "did you mean 'backbones'?"]),
        ({"backbones": ["gla2"]}, ["'gla2' is unknown", "did you mean 'gla'?", "retnet"]),
        ({"ratios": ["one half"]}, ["'one half' is unknown", "allowed: pure, N:1"]),
        ({"ratios": ["24:1"]}, ["'24:1' needs at least 24 layers", "proxy.layers=4"]),
        ({"budget": {"kv_cache": "0.1%"}}, ["budget.kv_cache=", "the smallest keeps 25165824 bytes (0.39%"]),
    ],
)
def test_a_bad_space(nas: Nas, folder: Path, changed: dict[str, object], parts: list[str]) -> None:
    write_space(folder / "bad.yaml", **changed)
    refused(nas("launch", "--space", "bad.yaml"), *parts)
    refused(nas("launch", "--space", "bad.yaml", "--dry-run"), *parts)
    refused(nas("spaces", "check", "bad.yaml"), *parts)
    assert_untouched(folder)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--space", "cpu-dmo"], ["'cpu-dmo' is unknown", "did you mean 'cpu-demo'?"]),
        (["--space", "none.yaml"], ["'none.yaml' cannot be read"]),
        (["--trials", "0"], ["trials=0", "above 0"]),
        (["--workers", "-1"], ["workers=-1"]),
        (["--workers", "many"], ["--workers", "valid integer"]),
        (["--timeout", "soon"], ["--timeout='soon'", "10m"]),
        (["--study", "a/b"], ["study='a/b'"]),
        (["--enqueue", "none.yaml"], ["enqueue='none.yaml' cannot be read"]),
        (["--storage", "mysql://host/db"], ["mysql", "allowed: sqlite:///FILE or postgresql://"]),
        (["--storage", "sqlite:///missing/nas.db"], ["there is no folder missing"]),
        (["--strage", "x"], ["No such option: --strage", "--storage"]),
    ],
)
def test_a_bad_option(nas: Nas, folder: Path, arguments: list[str], parts: list[str]) -> None:
    refused(nas("launch", "--space", "tiny.yaml", *arguments), *parts)
    assert_untouched(folder)


def test_an_empty_text_folder(nas: Nas, folder: Path) -> None:
    (folder / "empty").mkdir()
    write_space(folder / "text.yaml", workload={"text": {"source": "empty"}})
    refused(nas("launch", "--space", "text.yaml"), "workload.text.source='empty'")
    assert_untouched(folder)


def test_a_folder_that_cannot_be_written(nas: Nas, folder: Path) -> None:
    refused(nas("launch", "--space", "tiny.yaml", "--storage", "sqlite:////proc/nas.db"), "/proc")
    assert_untouched(folder)


def test_a_study_with_another_space(demo: Ended, nas: Nas, folder: Path) -> None:
    write_space(folder / "other.yaml", backbones=["gla"], proxy=TINY["proxy"] | {"batch_size": 8})
    before = nas("trials", "--json").out
    refused(
        nas("launch", "--space", "other.yaml", "--study", "demo"),
        "study 'demo' exists with another space",
        "proxy.batch_size: 4 -> 8",
        "--study",
    )
    assert nas("trials", "--json").out == before


def test_a_second_launch_on_a_running_study(demo: Ended, nas: Nas) -> None:
    before = nas("trials", "--json").out
    with Store.open("sqlite:///nas.db") as store, store.lock("demo"):
        refused(nas("launch", "--space", "tiny.yaml", "--study", "demo"), "'demo' is being run by process")
        assert nas("trials", "--json").out == before


def test_more_workers_than_the_cluster_holds(nas: Nas, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise ValueError("workers=9: this Ray has 0 GPUs")

    monkeypatch.setattr("nas.service._ray_pool", full)
    refused(nas("launch", "--space", "tiny.yaml"), "workers=9: this Ray has 0 GPUs")


@pytest.mark.parametrize("command", ["status", "front", "trials", "export"])
def test_a_missing_database_or_study(nas: Nas, command: str) -> None:
    refused(nas(command), "there is no file nas.db")
    with Store.open("sqlite:///nas.db"):
        pass
    refused(nas(command), "holds no study yet")
    refused(nas(command, "x"), "study 'x' does not exist")


def test_a_missing_trial(demo: Ended, nas: Nas) -> None:
    refused(nas("show", "99"), "trial 99 does not exist in study 'demo'; it has trials 0 to 7")
    refused(nas("show", "x/1"), "study 'x' does not exist; known: demo")
    refused(nas("show", "demo"), "trial='demo'", "STUDY/N")
    refused(nas("export", "demo/99", "--out", "out"), "trial 99 does not exist")
    refused(nas("export", "demo/1", "--top", "2"), "--top=2")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["frnt"], ["No such command 'frnt'", "front"]),
        (["trials", "--state", "compleet"], ["did you mean 'complete'?"]),
        (["cost", "tiny.yaml", "--context", "4x"], ["--context='4x'", "4096 or 4k"]),
        (["cost"], ["NAME|FILE"]),
        (["spaces", "show", "nope"], ["'nope' is unknown"]),
        (["data", "show", "mqa"], ["did you mean 'mqar'?"]),
        (["dashboard", "--port", "0"], ["--port"]),
    ],
)
def test_bad_arguments(nas: Nas, arguments: list[str], parts: list[str]) -> None:
    refused(nas(*arguments), *parts)


@pytest.mark.parametrize("module", ["torch", "ray"])
def test_a_missing_extra_is_named(nas: Nas, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    def missing(_: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("nas.service.prepare_data", missing)
    refused(nas("launch", "--space", "tiny.yaml"), f"{module} is not installed: pip install 'hybrid-nas[train]'")


def test_a_missing_streamlit_is_named(nas: Nas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboard.launch.find_spec", lambda name: None)
    refused(nas("dashboard"), "pip install 'hybrid-nas[dashboard]'")


def test_an_unexpected_error_is_one_line_and_debug_adds_the_traceback(
    nas: Nas, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise KeyError("lr")

    monkeypatch.setattr("nas.service.make_plan", bug)
    ended = nas("launch")
    assert ended.code == 1
    assert ended.error == "error: unexpected KeyError: 'lr'; `nas --debug ...` shows where"
    ended = nas("--debug", "launch")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1] == "error: unexpected KeyError: 'lr'"


def test_python_m_nas_uses_the_same_exit_codes_and_streams(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "nas", "front", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: storage ")
    assert ended.stderr.endswith("there is no file nas.db\n")
