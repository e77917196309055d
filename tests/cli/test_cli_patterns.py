"""Patterns of mixers, windows and routing labels as the commands print them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import TINY, Nas, write_space


@pytest.fixture
def mixed(folder: Path) -> str:
    """mixed.yaml: a pattern with a window, one plain mixer, two routings."""
    mixers = {"softmax": {"qk_norm": True, "rope_theta": None}, "sliding_window": {"window": 16, "rope_theta": 10000}}
    changed: dict[str, Any] = {
        "backbones": [["kda", "sliding_window"], "gla"],
        "ratios": ["4:1"],
        "routing": ["clvr:4", "wide_ffn"],
        "proxy": TINY["proxy"] | {"mixers": mixers, "intermediate_size": 128},
    }
    write_space(folder / "mixed.yaml", **changed)
    return "mixed.yaml"


def test_spaces_check_names_backbones_routings_and_sizes(nas: Nas, mixed: str, folder: Path) -> None:
    checked = nas("spaces", "check", mixed)
    assert checked.code == 0, checked.err
    lines = {line.split()[0]: line for line in checked.out.splitlines()}
    assert "kda+sliding_window, gla" in lines["backbones"]
    assert "clvr:4, wide_ffn" in lines["routing"]
    assert "parameters, MLPs 112 to 114 wide" in lines["proxies"]
    assert "3, with their recipes unlimited candidates" in lines["designs"]
    write_space(folder / "free.yaml", sizing={"parameters": "free"})
    assert "parameters, MLPs 64 wide" in nas("spaces", "check", "free.yaml").out


def test_show_and_trials_print_them(nas: Nas, mixed: str, folder: Path) -> None:
    designs = "- {backbone: kda+sliding_window, routing: clvr:4}\n- {backbone: kda+sliding_window, routing: wide_ffn}\n"
    (folder / "designs.yaml").write_text(designs)
    ended = nas("launch", "--space", mixed, "--study", "m", "--trials", "5", "--enqueue", "designs.yaml")
    assert ended.code == 0, ended.err
    found = json.loads(nas("trials", "m", "--json").out)
    assert [row["routing"] for row in found[:5]] == ["none", "none", "none", "clvr:4", "wide_ffn"]
    assert [row["backbones"] for row in found[:5]] == [[], ["kda"], ["gla"], ["kda"], ["kda"]]
    assert found[3]["name"] == "Kimi Delta Attention + SWA16 4:1 +CLVR:4"
    shown = nas("show", "m/3").out
    for part in (
        "-w-F  proxy (F full attention, w window, - linear)",
        "0  Kimi Delta Attention, 2 heads x 16, convolution 4 + clvr:4 + MLP 114",
        "1  Softmax attention, 2 heads x 16, window 16, QK-norm + MLP 114",
        "3  Softmax attention, 2 heads x 16, QK-norm, no positions + MLP 114",
    ):
        assert part in shown
    shown = nas("show", "m/4").out
    assert "convolution 4 + MLP 125" in shown  # a third of the layer's 32 values wider
    assert "QK-norm + MLP 114" in shown
