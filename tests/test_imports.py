"""Import rules that import-linter cannot see: what loads at run time, and how the exported model code imports."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "triton", "fla", "transformers", "ray")

# Python imports a sitecustomize at start-up, so this holds in `python -m nas` as well as in `python -c`.
REFUSE_HEAVY = f"""
import sys

class RefuseHeavy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise AssertionError(f"{{name}} was imported")

sys.meta_path.insert(0, RefuseHeavy())
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.startswith(tuple(sys.argv[2:])):
        importlib.import_module(module.name)
"""


def run_without_torch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(REFUSE_HEAVY)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_hook_refuses_torch(tmp_path: Path) -> None:
    result = run_without_torch(tmp_path, "-c", "import torch")
    assert result.returncode != 0
    assert "torch was imported" in result.stderr


@pytest.mark.parametrize("module", ["nas", "nas.registry", "nas.cost", "nas.messages"])
def test_the_ground_loads_without_torch(tmp_path: Path, module: str) -> None:
    result = run_without_torch(tmp_path, "-c", f"import {module}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("package", "left_out"),
    [
        ("search_spaces", ()),
        ("nas.store", ("nas.store.migrations.env",)),  # alembic runs it
        ("nas.search", ()),
        ("nas.cli", ()),
        ("dashboard", ("dashboard.app", "dashboard.pages")),  # scripts that draw when they are imported
    ],
)
def test_every_module_of_a_light_room_loads_without_torch(
    tmp_path: Path, package: str, left_out: tuple[str, ...]
) -> None:
    result = run_without_torch(tmp_path, "-c", IMPORT_ALL, package, *left_out)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", [("--help",), ("launch", "--help"), ("front", "--help"), ("status", "--help")])
def test_help_answers_without_torch(tmp_path: Path, command: tuple[str, ...]) -> None:
    result = run_without_torch(tmp_path, "-m", "nas", *command)
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(level, name) of every import of a file: the top-level package at level 0, a module beside it at level 1."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(0, alias.name.partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(node.level, name if node.level else name.partition(".")[0]) for name in names]
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "nas" / "models").rglob("*.py")), ids=lambda path: path.name)
def test_model_code_can_be_carried_flat(path: Path) -> None:
    """`trust_remote_code` copies the files beside one another: single-dot siblings and known libraries only."""
    assert path.parent == ROOT / "nas" / "models", "nas/models has no subfolders"
    siblings = {file.stem for file in path.parent.glob("*.py")}
    allowed = {"torch", "fla", "triton", "transformers", "einops", *sys.stdlib_module_names}
    for level, module in imports_of(path):
        assert module in (siblings if level == 1 else allowed if level == 0 else ()), f"{path.name} imports {module}"


def test_every_room_stands_in_the_layers_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "rooms")
    named = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    rooms = {
        f"nas.{path.stem}"
        for path in (ROOT / "nas").iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    assert rooms - {"nas.__init__", "nas.__main__", "nas._version"} <= named
