"""A store and simulated launches: the whole service without torch or Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nas.search.simulator import SimulatedPool
from nas.service import Request, Result, launch
from search_spaces import SearchSpace
from search_spaces.loading import parse_space, read_text

Launch = Callable[..., Result]


@pytest.fixture
def space() -> SearchSpace:
    """cpu-demo without text, so that a launch needs no corpus."""
    return parse_space(read_text("cpu-demo").replace("text: {weight: 0.25", "text: {weight: 0"), "test")


@pytest.fixture
def simulate(tmp_path: Path, space: SearchSpace) -> Launch:
    """Launches on a simulated pool; keyword arguments override the Request's fields or name the pool."""

    def run(pool: SimulatedPool | None = None, **fields: object) -> Result:
        settings = {"space": space, "study": "s", "storage": f"sqlite:///{tmp_path}/nas.db", "trials": 24} | fields
        return launch(Request(**settings), pool=lambda plan: pool or SimulatedPool(2))  # type: ignore[arg-type]

    return run
