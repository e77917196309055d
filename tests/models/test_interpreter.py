"""Our CPU kernels against fla's Triton kernels themselves, run by Triton's interpreter in one subprocess."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.interpreter import pairwise_cover

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
ROOT = Path(__file__).parents[2]
MIXERS = ["gated_deltanet", "kda", "gated_deltanet2", "deltanet", "gla", "mamba2", "retnet", "rwkv6", "hgrn"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_equal_triton() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "FLA_DISABLE_BACKEND_DISPATCH": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    for mixer in MIXERS:
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
