"""What reads a study starts without what trains one: torch, ray, transformers and optuna are refused here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import Ended

ROOT = Path(__file__).parents[2]
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise AssertionError(f"{{name}} was imported")

sys.meta_path.insert(0, Refuse())
from nas.cli import main
for command in {commands}:
    try:
        main(command.split())
    except SystemExit as ended:
        assert ended.code == 0, command
"""


def run(folder: Path, refused: tuple[str, ...], *commands: str) -> subprocess.CompletedProcess[str]:
    code = REFUSE.format(refused=set(refused), commands=commands)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_reading_needs_nothing_that_trains(folder: Path, demo: Ended) -> None:
    read = (
        "status",
        "front",
        "front --all",
        "trials --json",
        "show 0",
        "cost tiny.yaml",
        "spaces",
        "spaces check tiny.yaml",
    )
    ended = run(folder, ("torch", "ray", "transformers", "fla", "optuna", "streamlit", "pandas"), *read)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_help_needs_next_to_nothing(folder: Path) -> None:
    heavy = ("torch", "ray", "transformers", "optuna", "sqlalchemy", "alembic", "numpy", "moocore", "yaml")
    ended = run(folder, heavy, "--help", "launch --help", "front --help", "--version")
    assert ended.returncode == 0, ended.stderr
