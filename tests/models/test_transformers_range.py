"""Decoding, generate(), saving and loading at both ends of our range of transformers.

This folder's tests run on the transformers that is installed, which in a fresh environment is the newest of the range.
Here they run again, in a process of their own, on each end that is not installed. It comes from the package index into
pytest's cache folder, with what it depends on in releases that our own bounds allow too.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/models/test_decoding.py::test_prefill_and_decoding_equal_one_pass",
    "tests/models/test_decoding.py::test_left_padding_changes_nothing",
    "tests/models/test_decoding.py::test_generates_greedily",
    "tests/models/test_modeling.py::test_save_and_load",
    "tests/models/test_modeling.py::test_configuration_round_trip",
    "tests/models/test_modeling.py::test_gradient_checkpointing_changes_nothing",
    "tests/models/test_export_folder.py::test_loads_without_nas",
)
RUN = """
import sys, pytest
from packaging.requirements import Requirement
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]])
used = sys.modules["transformers"].__version__
assert Requirement(sys.argv[1]).specifier.contains(used), used
sys.exit(code)
"""


def declared() -> dict[str, Requirement]:
    """Our requirements by name: the core's and those of the extra `train`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["train"]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def ends() -> list[str]:
    """The requirements of both ends: the release at the lower bound, the last minor below the upper one."""
    bounds = {x.operator: Version(x.version) for x in declared()["transformers"].specifier}
    upper = bounds["<"]
    return [f"transformers=={bounds['>=']}", f"transformers>={upper.major}.{upper.minor - 1},<{upper}"]


def is_installed(requirement: str) -> bool:
    return Requirement(requirement).specifier.contains(transformers.__version__)


def fetched(requirement: str, cache: Path) -> Path:
    """A folder with that release and what it depends on; torch is no part of that."""
    depends = {Requirement(line).name for line in requires("transformers") or [] if "extra ==" not in line}
    wanted = [requirement, *(str(ours) for name, ours in declared().items() if name in depends)]
    folder = cache / f"{' '.join(wanted)} {sys.implementation.cache_tag}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            target = Path(temporary, "packages")
            pip = ["pip", "install", "--quiet", "--no-input", "--retries=1", "--timeout=20", "--no-compile"]
            done = run("-m", *pip, "--target", str(target), *wanted)
            assert "ResolutionImpossible" not in done.stderr, done.stderr
            if done.returncode:
                pytest.skip(f"pip could not fetch {requirement}: {done.stderr.strip()[-300:]}")
            target.rename(folder)
    return folder


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("requirement", [end for end in ends() if not is_installed(end)])
def test_the_other_end_of_the_range(requirement: str, pytestconfig: pytest.Config) -> None:
    folder = fetched(requirement, Path(pytestconfig.cache.mkdir("transformers")))
    done = run("-c", RUN, requirement, *TESTS, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
