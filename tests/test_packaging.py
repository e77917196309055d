"""The distribution: one version, bounded dependencies that are all declared, and a wheel that carries what runs."""

import ast
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nas._version import __version__

ROOT = Path(__file__).parents[1]
PACKAGES = ("nas", "search_spaces", "workers", "dashboard")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
RUNTIME = [
    *PROJECT["dependencies"],
    *(line for extra, lines in PROJECT["optional-dependencies"].items() if extra != "dev" for line in lines),
]
EVERYTHING = [*RUNTIME, *PROJECT["optional-dependencies"]["dev"]]


def requirements(lines: list[str]) -> Iterator[Requirement]:
    """The requirements on others: an extra that names hybrid-nas itself only joins other extras."""
    return (requirement for requirement in map(Requirement, lines) if requirement.name != PROJECT["name"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    # In-process, as pip's build isolation would ask the package index for hatchling.
    builder = WheelBuilder(str(ROOT))
    (path,) = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


def read_dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"hybrid_nas-{__version__}.dist-info/{name}").decode()


def test_the_version_has_one_source(wheel: zipfile.ZipFile) -> None:
    assert "version" not in PROJECT
    assert Parser().parsestr(read_dist_info(wheel, "METADATA"))["Version"] == __version__


@pytest.mark.parametrize("line", [*PYPROJECT["build-system"]["requires"], *EVERYTHING])
def test_every_dependency_is_bounded_on_both_sides(line: str) -> None:
    for requirement in requirements([line]):
        assert {specifier.operator for specifier in requirement.specifier} == {">=", "<"}


@pytest.mark.parametrize("line", EVERYTHING)
def test_what_is_installed_lies_within_the_bounds(line: str) -> None:
    for requirement in requirements([line]):
        assert requirement.specifier.contains(version(requirement.name), prereleases=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_third_party_import_is_declared(package: str) -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements(RUNTIME)}
    declared.add("pydantic-core")  # pydantic pins it to one release
    distributions = packages_distributions()
    undeclared = {}
    for path in (ROOT / package).rglob("*.py"):
        for module in third_party_imports(path):
            providers = {canonicalize_name(name) for name in distributions.get(module, ())}
            if not providers & declared:
                undeclared[module] = str(path.relative_to(ROOT))
    assert not undeclared


def third_party_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(PACKAGES) - sys.stdlib_module_names


def test_the_wheel_carries_every_source_and_data_file(wheel: zipfile.ZipFile) -> None:
    carried = set(wheel.namelist())
    for package in PACKAGES:
        files = {path for suffix in ("*.py", "*.yaml", "py.typed") for path in (ROOT / package).rglob(suffix)}
        missing = {str(path.relative_to(ROOT)) for path in files} - carried
        assert not missing
    assert {f"{package}/py.typed" for package in PACKAGES} <= carried
    assert any(name.startswith("nas/store/migrations/versions/") for name in carried)
    assert any(name.startswith("search_spaces/presets/") and name.endswith(".yaml") for name in carried)


def test_the_wheel_carries_nothing_else(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0] for name in wheel.namelist()} == {
        *PACKAGES,
        f"hybrid_nas-{__version__}.dist-info",
    }
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.endswith(".db")]


def test_the_wheel_is_pure_python_with_the_console_script(wheel: zipfile.ZipFile) -> None:
    assert "Tag: py3-none-any" in read_dist_info(wheel, "WHEEL")
    assert "nas = nas.cli:main" in read_dist_info(wheel, "entry_points.txt")
