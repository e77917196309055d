"""Our CPU kernels against fla's Triton kernels themselves, run by Triton's interpreter in two subprocesses."""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.models.interpreter import pairwise_cover

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
ROOT = Path(__file__).parents[2]
HALVES = (
    ["kda", "gated_deltanet2"],
    ["gated_deltanet", "deltanet", "gla", "mamba2", "retnet", "rwkv6", "hgrn", "modules"],
)
"""About equally long; hgrn2 calls GLA's kernels."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_equal_triton() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "FLA_DISABLE_BACKEND_DISPATCH": "1"}

    def interpret(names: list[str]) -> dict[str, list[float]]:
        command = [sys.executable, str(SCRIPT), *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor() as threads:
        results = {case: pair for half in threads.map(interpret, HALVES) for case, pair in half.items()}
    for mixer in {name for half in HALVES for name in half} - {"modules"}:
        for kernel in ("chunk", "recurrent"):
            cases = [case for case in results if case.startswith(f"{mixer}, {kernel}: ")]
            assert len(cases) >= 6, (mixer, kernel)
    assert sum(case.startswith("module:") for case in results) == 24
    assert {case: pair for case, pair in results.items() if not pair[0] < pair[1]} == {}


@pytest.mark.parametrize("size", [2, 9, 10, 14, 35])
def test_cover_has_every_pair_of_levels(size: int) -> None:
    cases = pairwise_cover({f"factor {i}": ("low", "high") for i in range(size)})
    assert len(cases) <= 8
    for first, second in itertools.combinations(cases[0], 2):
        assert len({(case[first], case[second]) for case in cases}) == 4
