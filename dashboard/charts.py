"""The Pareto chart: pure functions from records to a plotly figure; what is not a finite number is never drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from dashboard import style
from dashboard.figures import TOP, blank, chance_line, note
from dashboard.style import ACCENT, FAINT, INK, MUTED, Record, finite

_SYMBOLS = {
    "complete": ("circle", 12),
    "pruned": ("circle-open", 9),
    "paused": ("circle-open", 9),
    "running": ("circle-open-dot", 11),
    "waiting": ("circle-open-dot", 9),
    "failed": ("x-thin-open", 8),
    "infeasible": ("x-thin-open", 8),
}
"""Symbol and size by state: filled only where the trial went all the way."""


def pareto(records: Sequence[Record], front: Sequence[Record], selected: int | None = None) -> go.Figure:
    """Recall against kv_cache bytes at the Deployment.

    A point is a trial (its number is in `customdata`), coloured by backbone, hollow where it was stopped or still
    runs; the front is a step line, the baselines are named, chance is dotted, `selected` is ringed.
    """
    drawn = [found for found in records if _at(found) is not None]
    figure = blank(height=620)
    low, high = _span([found["kv_cache_bytes"] for found in drawn])
    _draw_front(figure, front, high)
    _draw_trials(figure, drawn)
    _draw_symbols(figure, drawn)
    for found in drawn:
        if found["trial"] == selected:
            _ring(figure, found)
    _name_baselines(figure, drawn, low, high)
    _draw_chance(figure, records)
    figure.update_xaxes(
        type="log",
        range=[math.log10(low), math.log10(high)],
        title_text="KV cache per sequence, and its share of full attention's",
        **_memory_ticks(drawn, low, high),
    )
    figure.update_yaxes(range=[0, TOP], title_text="Recall", dtick=0.2, tickformat=".1f")
    figure.update_layout(margin_t=8, legend=_below(-0.11), legend2=_below(-0.165))
    if not drawn:
        note(figure, "No trial has been scored yet.")
    return figure


def hover(record: Record) -> str:
    """The design in a few lines, as plotly's HTML."""
    blocks = "".join({"F": "■", "w": "▣"}.get(layer, "□") for layer in record.get("diagram") or "")
    memory, share = style.bytes_text(record["kv_cache_bytes"]), style.percent_text(record["kv_cache_ratio"])
    lines = [
        f"<b>{record['name']}</b>",
        f"trial {record['trial']} · {style.state_text(record)} · step {record['step']}",
        f"<span style='letter-spacing:1px'>{blocks}</span>",
        f"recall <b>{style.score_text(record['recall'])}</b> (chance {style.score_text(record['recall_chance'], 2)})",
        f"KV cache <b>{memory}</b> · {share} of full attention",
        f"{record['optimizer']}, lr {style.rate_text(record['lr'])}, routing {record['routing']}",
    ]
    return "<br>".join(lines)


def _at(record: Record) -> tuple[float, float] | None:
    """(bytes, recall), or None where the trial cannot be drawn on a logarithmic axis."""
    memory, recall = finite(record["kv_cache_bytes"]), finite(record["recall"])
    return None if memory is None or memory <= 0 or recall is None else (memory, recall)


def _draw_front(figure: go.Figure, front: Sequence[Record], right: float) -> None:
    steps = sorted(at for found in front if (at := _at(found)) is not None)
    if not steps:
        return
    xs, ys = [steps[0][0]], [0.0]
    for memory, recall in steps:
        xs.append(memory)
        ys.append(max(ys[-1], recall))
    figure.add_scatter(
        x=[*xs, right],
        y=[*ys, ys[-1]],
        mode="lines",
        name="front",
        line={"color": ACCENT, "width": 2, "shape": "hv"},
        fill="tozeroy",
        fillcolor="rgba(15, 76, 129, 0.05)",
        hoverinfo="skip",
        legendrank=1100,
    )


def _draw_trials(figure: go.Figure, drawn: Sequence[Record]) -> None:
    """One trace per backbone and state; the legend has one entry per backbone."""
    groups: dict[tuple[str, str], list[Record]] = {}
    scale = 1.0 if len(drawn) <= 400 else 0.6
    for found in sorted(drawn, key=lambda found: (found["state"] == "complete", found["trial"])):
        groups.setdefault((style.backbone_label(found), found["state"]), []).append(found)
    for (label, state), members in groups.items():
        symbol, size = _SYMBOLS[state]
        shade = style.colour(members[0]["backbones"] or ())
        figure.add_scatter(
            x=[found["kv_cache_bytes"] for found in members],
            y=[found["recall"] for found in members],
            customdata=[found["trial"] for found in members],
            hovertext=[hover(found) for found in members],
            hovertemplate="%{hovertext}<extra></extra>",
            mode="markers",
            name=label,
            legendgroup=label,
            showlegend=False,
            marker={
                "symbol": symbol,
                "size": scale * size,
                "color": shade,
                "line": {"width": 1, "color": "white"} if state == "complete" else {"width": 1.6, "color": shade},
            },
            # The ring shows the selection; plotly would fade all other points.
            selected={"marker": {"opacity": 1}},
            unselected={"marker": {"opacity": 1}},
        )
    backbones = {style.backbone_label(found): found["backbones"] or () for found in drawn}
    for label in sorted(backbones, key=lambda label: (label == style.FULL_ATTENTION, label)):
        _legend_entry(figure, label, "circle", style.colour(backbones[label]), group=label, legend="legend")


def _draw_symbols(figure: go.Figure, drawn: Sequence[Record]) -> None:
    """Legend entries that say what the symbols mean, for the states that are there."""
    for state in [state for state in _SYMBOLS if any(found["state"] == state for found in drawn)]:
        _legend_entry(figure, state, _SYMBOLS[state][0], MUTED, group=f"state {state}", legend="legend2")


def _legend_entry(figure: go.Figure, name: str, symbol: str, shade: str, *, group: str, legend: str) -> None:
    marker = {"symbol": symbol, "size": 10, "color": shade, "line": {"width": 1.6, "color": shade}}
    figure.add_scatter(x=[None], y=[None], mode="markers", name=name, legendgroup=group, legend=legend, marker=marker)


def _below(height: float) -> dict[str, str | float]:
    """Where a legend goes: a row under the axis, out of the toolbar's way."""
    return {"orientation": "h", "x": 0, "y": height, "yanchor": "top"}


def _ring(figure: go.Figure, found: Record) -> None:
    figure.add_scatter(
        x=[found["kv_cache_bytes"]],
        y=[found["recall"]],
        mode="markers",
        name="selected",
        marker={"symbol": "circle-open", "size": 21, "color": INK, "line": {"width": 2}},
        hoverinfo="skip",
        showlegend=False,
    )


def _name_baselines(figure: go.Figure, drawn: Sequence[Record], low: float, high: float) -> None:
    """Names the best trial of each baseline design; names that would overlap are moved apart."""
    best: dict[str, Record] = {}
    for found in drawn:
        kept = best.get(found["name"])
        if found["prior"] == "baseline" and (kept is None or found["recall"] > kept["recall"]):
            best[found["name"]] = found
    middle, taken = math.sqrt(low * high), dict[bool, float]()
    for found in sorted(best.values(), key=lambda found: float(found["recall"])):
        leftwards = found["kv_cache_bytes"] > middle
        height = max(found["recall"], taken.get(leftwards, -1.0) + 0.042)
        taken[leftwards] = height
        figure.add_annotation(
            x=math.log10(found["kv_cache_bytes"]),
            y=height,
            text=found["name"],
            showarrow=False,
            xanchor="right" if leftwards else "left",
            xshift=-13 if leftwards else 13,
            font={"size": 13, "color": style.colour(found["backbones"] or ())},
            bgcolor="rgba(255, 255, 255, 0.75)",
        )


def _draw_chance(figure: go.Figure, records: Iterable[Record]) -> None:
    levels = [level for found in records if (level := finite(found["recall_chance"])) is not None]
    if levels:
        chance_line(figure, max(levels))


def _span(sizes: Sequence[float]) -> tuple[float, float]:
    """The ends of the memory axis: half an octave beyond the data."""
    if not sizes:
        return 2.0**20, 2.0**33
    return min(sizes) / math.sqrt(2), max(sizes) * math.sqrt(2)


def _memory_ticks(drawn: Sequence[Record], low: float, high: float) -> dict[str, list[float] | list[str]]:
    """Ticks at full attention's memory over powers of two, or at powers of two where that is not known."""
    ratios = [(found["kv_cache_bytes"], finite(found["kv_cache_ratio"])) for found in drawn]
    full = next((memory / ratio for memory, ratio in ratios if ratio), None)
    unit = full or 1.0
    first, last = math.ceil(math.log2(low / unit)), math.floor(math.log2(high / unit))
    stride = max(1, math.ceil((last - first + 1) / 9))
    powers = range(last, first - 1, -stride)
    values = [unit * 2.0**power for power in powers]
    shares = [f"<br><span style='color:{FAINT}'>{style.percent_text(value / unit)}</span>" for value in values]
    texts = [style.bytes_text(value) + (share if full else "") for value, share in zip(values, shares, strict=True)]
    return {"tickvals": values, "ticktext": texts}
