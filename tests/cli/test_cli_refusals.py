"""Bad input: one line that names the field, its value and what is allowed; exit 2; nothing written."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nas.store import Store
from tests.cli.conftest import TINY, Ended, Nas, write_space


def refused(ended: Ended, *parts: str) -> None:
    assert ended.code == 2
    assert ended.out == ""
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
        (["--trials", "2"], ["trials=2: the baselines alone are 3 (full attention and each", "allowed: 3 or more"]),
        (["--trials", "1000001"], ["trials=1000001 must be at most 1000000"]),
        (["--workers", "100001"], ["workers=100001 must be at most 100000"]),
        (["--gpus", "1e400"], ["gpus=inf must be a whole number"]),
        (["--timeout", "4000d"], ["timeout=345600000.0 must be at most 315360000"]),
        (["--timeout", "9" * 400], ["timeout=inf must be at most"]),
        (["--seed", "-1"], ["seed=-1 must be from 0 to 9223372036854775807"]),
        (["--seed", str(2**63)], ["seed=9223372036854775808"]),
        (["--study", "a/b"], ["study='a/b' is not a name; allowed: 1 to 64 letters"]),
        (["--study", "../up"], ["study='../up'"]),
        (["--study", "a" * 65], ["study='aaa", "1 to 64"]),
        (["--study", "a" * 6500], ["study='aaa", "...", "1 to 64"]),
        (["--study", "two words"], ["study='two words'"]),
        (["--study", "über"], ["study='über'"]),
        (["--checkpoints", "nowhere://a/b"], ["fsspec knows no protocol 'nowhere'"]),
        (["--checkpoints", "tiny.yaml"], ["checkpoints='tiny.yaml' cannot be written"]),
        (["--storage", "nas.db"], ["'nas.db' is not a database URL"]),
        (["--enqueue", "none.yaml"], ["enqueue='none.yaml' cannot be read"]),
        (["--storage", "mysql://host/db"], ["mysql", "allowed: sqlite:///FILE or postgresql://"]),
        (["--storage", "sqlite:///missing/nas.db"], ["there is no folder missing"]),
        (["--strage", "x"], ["No such option: --strage", "--storage"]),
    ],
)
def test_a_bad_option(nas: Nas, folder: Path, arguments: list[str], parts: list[str]) -> None:
    refused(nas("launch", "--space", "tiny.yaml", *arguments), *parts)
    refused(nas("launch", "--space", "tiny.yaml", *arguments, "--dry-run"), *parts)
    assert_untouched(folder)


def test_a_text_folder_that_does_not_exist(nas: Nas, folder: Path) -> None:
    write_space(folder / "text.yaml", workload={"text": {"source": "gone"}})
    refused(nas("launch", "--space", "text.yaml", "--dry-run"), "workload.text.source='gone' does not exist")


@pytest.mark.parametrize(
    ("design", "parts"),
    [
        ("{ratio: pure, kv_groups: 1}", ["enqueue[0].kv_groups does not apply to ratio pure"]),
        ("{ratio: pure, placement: interleaved}", ["enqueue[0].placement does not apply to ratio pure"]),
        ("{backbone: gla, routing: none}", ["enqueue[0].routing does not apply to backbone gla"]),
        ("{lr_adamw: 1}", ["enqueue[0].lr_adamw=1 is not in this space; allowed: 0.001 to 0.01"]),
        ("{lr_muon: 5e-3}", ["enqueue[0].lr_muon is unknown; allowed: backbone"]),
        ("{kv_groups: true, ratio: 4:1}", ["enqueue[0].kv_groups=True is not in this space"]),
        ("{ratio: [1, 2]}", ["enqueue[0].ratio=[1, 2] is not in this space; allowed: pure, 4:1, 2:1"]),
        ("{[1]: 2}", ["not valid YAML", "key [1]"]),
        ("{1: 2}", ["enqueue[0].1 is unknown"]),
        ("{<<: {ratio: pure}}", ["enqueue[0].<< is unknown"]),
        ("{lr_adamw: " + "9" * 5000 + "}", ["not valid YAML"]),
        ("[" * 3000, ["nested too deeply"]),
        ("{backbone: " + "x" * 3000 + "}", ["enqueue[0].backbone='xxx", "allowed: gated_deltanet, gla"]),
    ],
)
def test_a_bad_enqueued_design(nas: Nas, folder: Path, design: str, parts: list[str]) -> None:
    (folder / "designs.yaml").write_text(f"- {design}\n")
    refused(nas("launch", "--space", "tiny.yaml", "--enqueue", "designs.yaml"), *parts)
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
    refused(nas("show", "9" * 24), "is not a trial")
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


def test_help_and_version_answer_beside_a_broken_settings_file(nas: Nas, folder: Path) -> None:
    (folder / "nas.toml").write_text("storage = ")
    for arguments in ([], ["--help"], ["--version"], ["launch", "--help"]):
        assert nas(*arguments).code == 0
    refused(nas("front"), "nas.toml cannot be read")


@pytest.mark.parametrize("closed", ["<&- >&-", ">&-"])
def test_a_closed_stdout_is_quiet(folder: Path, closed: str) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m nas spaces list {closed}"
    ended = subprocess.run(["bash", "-c", command], cwd=folder, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


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
