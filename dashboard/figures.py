"""What all figures of the page share."""

from __future__ import annotations

import plotly.graph_objects as go

from dashboard.style import FAINT, FONT, INK, LINE, MUTED

TOP = 1.04
"""Upper end of every recall axis: room for a marker at 1."""


def blank(height: int) -> go.Figure:
    """An empty figure of `height` pixels in the page's look."""
    axis = {
        "showgrid": True,
        "gridcolor": LINE,
        "zeroline": False,
        "ticks": "",
        "title": {"font": {"size": 13, "color": MUTED}},
        "tickfont": {"size": 12, "color": MUTED},
    }
    return go.Figure(
        layout={
            "height": height,
            "margin": {"l": 8, "r": 8, "t": 64, "b": 8},
            "font": {"family": FONT, "size": 13, "color": INK},
            "plot_bgcolor": "white",
            "paper_bgcolor": "rgba(0, 0, 0, 0)",
            "xaxis": {**axis, "showgrid": False, "showline": True, "linecolor": LINE, "automargin": True},
            "yaxis": {**axis, "automargin": True},
            "legend": {"orientation": "h", "x": 0, "y": 1.12, "yanchor": "bottom", "font": {"size": 13}},
            "hoverlabel": {"bgcolor": "white", "bordercolor": LINE, "font": {"family": FONT, "color": INK}},
            "dragmode": "zoom",
            "modebar": {"bgcolor": "rgba(0, 0, 0, 0)", "color": FAINT, "activecolor": INK},
            "uirevision": "keep",
        }
    )


def note(figure: go.Figure, text: str) -> go.Figure:
    """Says in an empty figure why it is empty."""
    figure.update_layout(xaxis_visible=False, yaxis_visible=False)
    figure.add_annotation(
        text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 15, "color": FAINT}
    )
    return figure


def chance_line(figure: go.Figure, level: float) -> None:
    """Dots the recall that guessing reaches."""
    figure.add_hline(
        y=level,
        line={"color": FAINT, "width": 1.5, "dash": "dot"},
        annotation={"text": f"chance {level:.2f}", "font": {"size": 12, "color": MUTED}},
        annotation_position="bottom right",
    )
