"""A tiny space, a simulated pool instead of Ray, and `nas` called as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from nas.cli import main
from nas.search.simulator import SimulatedPool

TINY: dict[str, Any] = {
    "name": "tiny",
    "trials": 8,
    "backbones": ["gated_deltanet", "gla"],
    "ratios": ["pure", "4:1", "2:1"],
    "optimizers": {"adamw": {"lr": {"low": 1e-3, "high": 1e-2}}},
    "proxy": {
        "layers": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "heads": 2,
        "head_dim": 16,
        "sequence_length": 64,
        "batch_size": 4,
    },
    "workload": {"text": {"weight": 0}},  # no text: nothing to tokenise, no torch
    "rungs": {"steps": [100, 200, 300]},
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


Nas = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: empty but for tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path / "tiny.yaml")
    return tmp_path


def write_space(path: Path, **changed: Any) -> Path:
    path.write_text(yaml.safe_dump(TINY | changed, sort_keys=False))
    return path


@pytest.fixture
def nas(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Nas:
    """Runs a command line in this process, with a simulated pool of workers."""
    monkeypatch.setattr("nas.service._ray_pool", lambda plan: SimulatedPool(plan.workers))
    monkeypatch.setattr("nas.service.visible_gpus", lambda: 0)

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def demo(nas: Nas) -> Ended:
    """A finished study `demo` in ./nas.db."""
    ended = nas("launch", "--space", "tiny.yaml", "--study", "demo", "--workers", "2")
    assert ended.code == 0, ended.err
    return ended
