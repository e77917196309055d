"""`from nas import ...`: exported names are frozen; a search from Python and what it found."""

from __future__ import annotations

import builtins
import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nas.api import Study, launch, load_study
from nas.architecture import Candidate
from nas.search.records import load
from nas.search.simulator import SimulatedPool
from nas.store import Store, StudyNotFound
from search_spaces import SearchSpace
from tests.cli.conftest import TINY

ROOT = Path(__file__).parents[1]
EXPORTED = [
    "Architecture",
    "Candidate",
    "Deployment",
    "LayerSpec",
    "Recipe",
    "Routing",
    "SearchSpace",
    "Study",
    "Trial",
    "__version__",
    "cost",
    "launch",
    "load_space",
    "load_study",
]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr("nas.service._ray_pool", lambda plan: SimulatedPool(plan.workers))
    monkeypatch.setattr("nas.service.visible_gpus", lambda: 0)
    space = SearchSpace.model_validate(TINY)
    return launch(space, study="demo", storage=f"sqlite:///{tmp_path / 'nas.db'}", trials=6, workers=2)


def test_exported_names_are_frozen() -> None:
    package = importlib.import_module("nas")
    assert package.__all__ == EXPORTED
    assert dir(package) == EXPORTED
    for name in EXPORTED:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="'nas' has no attribute 'lunch'"):
        _ = package.lunch


def test_cost_is_the_function_whatever_was_imported_before() -> None:
    code = "import nas.cost, nas; assert callable(nas.cost); from nas.cost import ITEMSIZE; assert callable(nas.cost)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_study_knows_its_space_and_trials(study: Study) -> None:
    assert study.name == "demo"
    assert study.space == SearchSpace.model_validate(TINY)
    trials = study.trials()
    with Store.open(study.storage, read_only=True) as store:
        assert [trial.record for trial in trials] == load(store, "demo")
    first = trials[0]
    assert (first.trial, first.prior, first.placement) == (0, "baseline", "full")
    assert "kv_cache_bytes" in dir(first)
    assert repr(first).startswith("<Trial demo/0 Full attention, complete, recall ")
    with pytest.raises(AttributeError, match="a trial has no 'recal'"):
        _ = first.recal


def test_a_trial_gives_its_candidate_and_measurements(study: Study) -> None:
    trial = study.trials()[3]
    assert isinstance(trial.candidate, Candidate)
    assert trial.candidate.digest == trial.candidate_digest
    found = trial.measurements()
    assert {measurement.trial for measurement in found} == {3}
    assert {"recall", "loss"} <= {measurement.name for measurement in found}
    assert pickle.loads(pickle.dumps(trial)) == trial


def test_best_is_the_highest_recall_within_a_share_of_the_cache(study: Study) -> None:
    front = study.front()
    assert [trial.kv_cache_bytes for trial in front] == sorted(trial.kv_cache_bytes for trial in front)
    best = study.best(at_memory=0.02)
    assert best is not None
    assert best.kv_cache_ratio <= 0.02
    assert best.recall == max(trial.recall for trial in front if trial.kv_cache_ratio <= 0.02)
    assert study.best(at_memory=1e-6) is None


def test_the_frame_has_one_row_a_trial(study: Study) -> None:
    frame = study.frame()
    assert list(frame.index) == list(range(6))
    assert frame.loc[0, "name"] == "Full attention"
    assert frame["kv_cache_ratio"].max() == 1.0


def test_a_frame_without_pandas_names_the_extra(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "pandas":
            raise ImportError("No module named 'pandas'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'hybrid-nas\[dashboard\]'"):
        study.frame()


def test_load_study_takes_the_latest_and_the_storage_of_the_settings(
    study: Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert load_study(storage=study.storage) == study
    monkeypatch.setenv("NAS_STORAGE", study.storage)
    assert load_study("demo") == study
    with pytest.raises(StudyNotFound, match="known: demo"):
        load_study("x")
    monkeypatch.delenv("NAS_STORAGE")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nas.toml").write_text(f'storage = "{study.storage}"')
    assert load_study() == study


def test_launch_goes_on_with_a_study(study: Study) -> None:
    lines: list[str] = []
    again = launch(study.space, study="demo", storage=study.storage, trials=7, log=lines.append)
    assert again == study
    assert len(again.trials()) == 7
    assert any(line.startswith("demo/6 ") for line in lines)


def test_a_refused_launch_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'cpu-dmo' is unknown"):
        launch("cpu-dmo", storage=f"sqlite:///{tmp_path / 'nas.db'}")
    assert not list(tmp_path.iterdir())
