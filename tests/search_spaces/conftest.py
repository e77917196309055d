"""A small space, read as a file is, with any of its fields replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from search_spaces import SearchSpace
from search_spaces.loading import parse_space

SMALL: dict[str, Any] = {
    "name": "small",
    "grid": True,
    "backbones": ["gated_deltanet", "gla"],
    "ratios": ["pure", "3:1"],
    "optimizers": {"adamw": {"lr": [1e-3]}},
    "proxy": {
        "layers": 6,
        "hidden_size": 64,
        "intermediate_size": 128,
        "heads": 2,
        "head_dim": 32,
        "sequence_length": 64,
        "batch_size": 8,
    },
    "workload": {"text": {"weight": 0}},
    "rungs": {"steps": [100]},
}

Small = Callable[..., SearchSpace]


@pytest.fixture
def small() -> Small:
    """Builds the space with the keywords' fields instead of its own; `proxy` is merged into it."""

    def build(proxy: dict[str, Any] | None = None, **changed: Any) -> SearchSpace:
        content = SMALL | changed | {"proxy": SMALL["proxy"] | (proxy or {})}
        return parse_space(yaml.safe_dump(content, sort_keys=False), "small")

    return build
