"""Our CPU kernels against fla's Triton kernels themselves, run by Triton's interpreter in one subprocess."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_equal_triton() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "FLA_DISABLE_BACKEND_DISPATCH": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) >= 20
    assert {name: error for name, error in errors.items() if not error < 2e-4} == {}
