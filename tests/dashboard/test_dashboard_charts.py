"""The figures: what is drawn, where, and that nothing but finite numbers is."""

import json
import math
import time
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import pytest

from dashboard import charts, curves, style

FULL_BYTES = 6 * 2**30


def make(
    trial: int, recall: float | None, ratio: float, backbone: str | None = "gla", **changes: Any
) -> dict[str, Any]:
    known = {
        "study": "demo",
        "trial": trial,
        "state": "complete",
        "failure": None,
        "name": f"{backbone or 'Full attention'} {ratio}",
        "diagram": "--F-",
        "recall": recall,
        "recall_chance": 0.0625,
        "kv_cache_bytes": ratio * FULL_BYTES,
        "kv_cache_ratio": ratio,
        "backbones": [backbone] if backbone else [],
        "optimizer": "adamw",
        "lr": 0.002,
        "routing": "none",
        "step": 300,
        "prior": "sampled",
    }
    return known | changes


@dataclass(frozen=True)
class Point:
    step: int
    name: str
    value: float


def trials_of(figure: go.Figure) -> dict[int, Any]:
    """The trace that each trial is drawn in."""
    return {number: trace for trace in figure.data if trace.customdata is not None for number in trace.customdata}


def numbers(value: Any) -> list[float]:
    """Every number in the JSON of a figure; NaN and infinity included where there are any."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float) else []


def test_front_is_a_step_line_through_the_front() -> None:
    records = [make(0, 0.4, 0.01), make(1, 0.7, 0.25), make(2, 0.95, 1.0, None), make(3, 0.3, 0.5)]
    figure = charts.pareto(records, records[:3])
    (line,) = [trace for trace in figure.data if trace.name == "front"]
    assert line.line.shape == "hv"
    assert list(line.y) == [0.0, 0.4, 0.7, 0.95, 0.95]
    assert list(line.x)[:4] == [0.01 * FULL_BYTES, 0.01 * FULL_BYTES, 0.25 * FULL_BYTES, FULL_BYTES]
    assert list(line.x)[4] == pytest.approx(10 ** figure.layout.xaxis.range[1])


def test_axis_is_logarithmic_in_halvings_of_full_attention() -> None:
    figure = charts.pareto([make(0, 0.4, 0.01), make(1, 0.9, 1.0, None)], [])
    axis = figure.layout.xaxis
    assert axis.type == "log"
    ticks = dict(zip(axis.tickvals, axis.ticktext, strict=True))
    assert ticks[FULL_BYTES].startswith("6 GiB")
    assert "100 %" in ticks[FULL_BYTES]
    assert ticks[FULL_BYTES / 8].startswith("768 MiB")
    assert "12 %" in ticks[FULL_BYTES / 8]


def test_filled_only_where_complete_and_coloured_by_backbone() -> None:
    states = ("complete", "pruned", "paused", "running", "waiting", "failed", "infeasible")
    records = [make(i, 0.5, 0.1, state=state) for i, state in enumerate(states)]
    records.append(make(7, 0.9, 1.0, None))
    drawn = trials_of(charts.pareto(records, []))
    assert sorted(drawn) == list(range(8))
    assert [drawn[i].marker.symbol == "circle" for i in range(8)] == [True, *[False] * 6, True]
    assert {drawn[i].marker.color for i in range(7)} == {style.colour(["gla"])}
    assert drawn[7].marker.color == style.colour([]) != style.colour(["gla"])


def test_colours_differ_and_unknown_mixers_have_one() -> None:
    known = [style.colour([name]) for name in ("gated_deltanet", "deltanet", "gla", "hgrn2", "hgrn", "retnet")]
    assert len({*known, style.colour([])}) == 7
    assert style.colour(["from_a_plugin"]) == style.colour(["from_a_plugin"])
    assert style.title("from_a_plugin") == "from_a_plugin"


def test_baselines_are_named_and_selection_is_ringed() -> None:
    records = [
        make(0, 0.9, 1.0, None, name="Full attention", prior="baseline"),
        make(1, 0.3, 0.004, name="GLA pure", prior="baseline"),
        make(2, 0.31, 0.004, "hgrn2", name="HGRN-2 pure", prior="baseline"),
        make(3, 0.8, 0.25),
    ]
    figure = charts.pareto(records, [], selected=3)
    heights = {note.text: note.y for note in figure.layout.annotations}
    assert {"Full attention", "GLA pure", "HGRN-2 pure", "chance 0.06"} == set(heights)
    assert heights["HGRN-2 pure"] - heights["GLA pure"] > 0.04  # moved apart
    (ring,) = [trace for trace in figure.data if trace.name == "selected"]
    assert (ring.x[0], ring.y[0]) == (0.25 * FULL_BYTES, 0.8)


def test_only_finite_numbers_are_drawn() -> None:
    bad = [math.nan, math.inf, -math.inf, None]
    records = [make(i, value, 0.2, lr=value, recall_chance=value) for i, value in enumerate(bad)]
    records += [make(9 + i, 0.5, 0.2, kv_cache_bytes=value, kv_cache_ratio=value) for i, value in enumerate([*bad, 0])]
    records.append(make(20, 0.5, 0.2))
    points = [
        Point(step, name, value) for step, value in enumerate([math.nan, 1.0, math.inf]) for name in ("recall", "loss")
    ]
    figures = [
        charts.pareto(records, records),
        curves.recall_curve(points, [100], math.nan, ["gla"]),
        curves.loss_curve(points, [100], ["gla"]),
        curves.hypervolume([(0, math.nan), (1, 0.4), (2, math.inf)]),
    ]
    assert list(trials_of(figures[0])) == [20]
    for figure in figures:
        found = numbers(figure.to_plotly_json()["data"]) + numbers(json.loads(figure.to_json()))
        assert found
        assert all(math.isfinite(number) for number in found)
        assert "NaN" not in figure.to_json()
        assert "Infinity" not in figure.to_json()


def test_nothing_to_draw_says_so() -> None:
    for figure in (
        charts.pareto([], []),
        charts.pareto([make(0, None, 0.2, state="waiting")], []),
        curves.recall_curve([], [100], 0.06, []),
        curves.loss_curve([], [], []),
        curves.hypervolume([]),
    ):
        assert any(note.text.startswith("No ") for note in figure.layout.annotations)


def test_curves_show_sizes_in_order_and_rungs() -> None:
    points = [Point(100, f"recall/mqar/{size}", 0.5) for size in (10, 5)] + [Point(100, "recall", 0.5)]
    figure = curves.recall_curve(points, [100, 200], 0.06, ["gla"])
    assert [trace.name for trace in figure.data] == ["mqar 5", "mqar 10", "mean"]
    assert {shape.x0 for shape in figure.layout.shapes if shape.x0 == shape.x1} == {100, 200}


def test_five_thousand_trials_are_quick() -> None:
    backbones = ("gated_deltanet", "gla", "hgrn2", "retnet")
    records = [
        make(i, (i * 37 % 1000) / 1000, 0.005 + (i % 50) / 51, backbones[i % 4], state=("complete", "pruned")[i % 2])
        for i in range(5000)
    ]
    started = time.perf_counter()
    figure = charts.pareto(records, records[:20], selected=17)
    assert time.perf_counter() - started < 5  # .2 s on an idle machine; a quadratic chart takes minutes
    assert len(trials_of(figure)) == 5000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (style.bytes_text(768 * 2**20), "768 MiB"),
        (style.bytes_text(1.5 * 2**30), "1.5 GiB"),
        (style.bytes_text(None), "–"),
        (style.count_text(1_366_000_000), "1.37 G"),
        (style.percent_text(0.2551), "26 %"),
        (style.percent_text(0.0041), "0.41 %"),
        (style.duration_text(425), "7 min 05 s"),
        (style.duration_text(90_000), "1 d 1 h"),
        (style.score_text(math.nan), "–"),
        (style.rate_text(0.00213), "0.0021"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected
