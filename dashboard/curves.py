"""Curves over steps and trials: plotly figures, pure functions; a value that is not a finite number is never drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import plotly.graph_objects as go

from dashboard import style
from dashboard.figures import TOP, blank, chance_line, note
from dashboard.style import ACCENT, FAINT, LINE, finite


class Point(Protocol):
    """A measurement: what the curves need of `nas.store.MeasurementRow`."""

    @property
    def step(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> float: ...


def recall_curve(
    points: Sequence[Point], rungs: Sequence[int], chance: float | None, backbones: Sequence[str]
) -> go.Figure:
    """Mean recall (bold) and recall at every evaluation size over training steps."""
    figure = blank(height=300)
    names = sorted({point.name for point in points if point.name.startswith("recall/")}, key=_natural)
    for index, name in enumerate(names):
        shade = f"rgba(100, 116, 139, {1 - 0.65 * index / max(1, len(names) - 1):.2f})"
        task, _, size = name.removeprefix("recall/").rpartition("/")
        _draw_curve(figure, points, name, f"{task} {size}", shade, 1.5)
    _draw_curve(figure, points, "recall", "mean", style.colour(backbones), 3)
    chance = finite(chance)
    if chance is not None and figure.data:
        chance_line(figure, chance)
    figure.update_yaxes(range=[0, TOP], dtick=0.2, tickformat=".1f")
    return _finish_curve(figure, rungs)


def loss_curve(points: Sequence[Point], rungs: Sequence[int], backbones: Sequence[str]) -> go.Figure:
    """Validation loss (bold) and training loss over training steps, nats per token."""
    figure = blank(height=300)
    _draw_curve(figure, points, "train_loss", "training", FAINT, 1.5)
    _draw_curve(figure, points, "loss", "validation text", style.colour(backbones), 3)
    return _finish_curve(figure, rungs)


def hypervolume(points: Sequence[tuple[int, float]]) -> go.Figure:
    """Hypervolume of the front over trials: how much the search still finds."""
    figure = blank(height=300)
    kept = [(trial, value) for trial, value in points if finite(value) is not None]
    if not kept:
        return note(figure, "No complete trial yet.")
    figure.add_scatter(
        x=[trial for trial, _ in kept],
        y=[value for _, value in kept],
        mode="lines",
        line={"color": ACCENT, "width": 2.5, "shape": "hv"},
        fill="tozeroy",
        fillcolor="rgba(15, 76, 129, 0.07)",
        hovertemplate="after trial %{x}: %{y:.3f}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title_text="Trial", rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _draw_curve(figure: go.Figure, points: Sequence[Point], name: str, label: str, shade: str, width: float) -> None:
    kept = [(point.step, point.value) for point in points if point.name == name and finite(point.value) is not None]
    if kept:
        figure.add_scatter(
            x=[step for step, _ in kept],
            y=[value for _, value in kept],
            mode="lines+markers" if len(kept) < 40 else "lines",
            name=label,
            line={"color": shade, "width": width},
            marker={"size": 3 + width, "color": shade},
            hovertemplate=f"{label} %{{y:.3f}}<extra></extra>",
        )


def _finish_curve(figure: go.Figure, rungs: Sequence[int]) -> go.Figure:
    if not figure.data:
        return note(figure, "No measurement yet.")
    for index, step in enumerate(rungs):
        figure.add_vline(
            x=step,
            line={"color": LINE, "width": 1.5},
            layer="below",
            annotation={
                "text": f"rung {index}",
                "font": {"size": 11, "color": FAINT},
                "yanchor": "bottom",
                "yref": "paper",
                "y": 1,
                "xanchor": "center",
            },
        )
    figure.update_xaxes(
        title_text="Step", range=[0, 1.02 * max([*rungs, *(x for trace in figure.data for x in trace.x)])]
    )
    figure.update_layout(hovermode="x")
    return figure


def _natural(name: str) -> tuple[str, float, str]:
    """Sorts recall/mqar/5 before recall/mqar/10."""
    task, _, size = name.rpartition("/")
    return task, float(size) if size.isdigit() else math.inf, size
