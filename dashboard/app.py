"""The page of a study: Pareto chart, selected trial, learning curves and trial table.

Started by `nas dashboard`. The address keeps the view (`?study=demo&trial=3`). A fragment looks at the study's
revision every few seconds; only when it has changed is anything read or drawn again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import streamlit as st

from dashboard import charts, curves, data, details, style, table
from dashboard.data import Options, Snapshot
from dashboard.style import Record
from nas.store import StoreError, StudyInfo

REFRESH_SECONDS = 3.0
_PLOT = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}
_STILL = {"displayModeBar": False}


def main() -> None:
    st.set_page_config(page_title="Hybrid architecture search", layout="wide")
    st.html(details.STYLE)
    try:
        where = data.options(sys.argv[1:], os.environ)
    except ValueError as error:
        st.error(str(error))
        return
    try:
        studies = data.studies(where.storage)
        info = _study(where, studies) if studies else None
        snapshot = data.snapshot(where.storage, info) if info else None
    except StoreError as error:
        _nothing_yet(str(error))
        watch(where, None)
        return
    if snapshot is None:
        _nothing_yet("The storage holds no study yet")
    else:
        page(where, snapshot, [found.name for found in studies])
    watch(where, _seen(studies, info))


@st.fragment(run_every=REFRESH_SECONDS)
def watch(where: Options, seen: tuple[str, ...] | None) -> None:
    """Draws the whole page again if a study came or went, or the shown one changed since `seen`."""
    try:
        studies = data.studies(where.storage)
        now = _seen(studies, _study(where, studies, warn=False) if studies else None)
    except StoreError:
        return  # what is on the page stays until the storage can be read again
    if now != seen:
        st.rerun()


def _seen(studies: Sequence[StudyInfo], info: StudyInfo | None) -> tuple[str, ...]:
    return (*(found.name for found in studies), data.version(info) if info else "")


def page(where: Options, snapshot: Snapshot, names: Sequence[str]) -> None:
    left, right = st.columns([0.78, 0.22], vertical_alignment="bottom")
    left.html(details.title(snapshot))
    st.session_state["study"] = snapshot.study.name
    right.selectbox("Study", names, key="study", on_change=_study_chosen)
    st.html(details.tiles(snapshot))
    if not snapshot.records:
        st.info(f"Study {snapshot.study.name} has no trial yet; this page follows it.")
        return
    found = _selected(snapshot)
    left, right = st.columns([2, 1], gap="medium")
    with left.container(border=True):
        st.html(details.head("Recall against memory"))
        _pareto(snapshot, found)
    with right.container(border=True):
        _card(snapshot, found)
    _curves(where, snapshot, found)
    with st.container(border=True):
        _table(snapshot)


def _pareto(snapshot: Snapshot, found: Record) -> None:
    figure = charts.pareto(snapshot.records, snapshot.front, found["trial"])
    st.plotly_chart(figure, key="pareto", theme=None, config=_PLOT, on_select=_point_clicked, selection_mode="points")


def _card(snapshot: Snapshot, found: Record) -> None:
    name, jump = st.columns([0.6, 0.4], vertical_alignment="center")
    name.html(details.head(f"Trial {found['trial']}"))
    st.session_state["jump"] = found["trial"]
    last = len(snapshot.records) - 1
    jump.number_input("Trial", 0, last, key="jump", on_change=_jumped, label_visibility="collapsed")
    st.html(details.card(found, snapshot))


def _curves(where: Options, snapshot: Snapshot, found: Record) -> None:
    points = data.measurements(where.storage, snapshot.study, found["trial"])
    backbones = found["backbones"] or ()
    figures = (
        (f"Recall of trial {found['trial']}", "recall"),
        (f"Loss of trial {found['trial']}, nats per token", "loss"),
        ("Hypervolume of the front", "hypervolume"),
    )
    drawn = (
        curves.recall_curve(points, snapshot.rungs, found["recall_chance"], backbones),
        curves.loss_curve(points, snapshot.rungs, backbones),
        curves.hypervolume(snapshot.hypervolume),
    )
    for column, (title, key), figure in zip(st.columns(3, gap="medium"), figures, drawn, strict=True):
        with column.container(border=True):
            st.html(details.head(title))
            st.plotly_chart(figure, key=key, theme=None, config=_STILL)


def _table(snapshot: Snapshot) -> None:
    head, states, backbones = st.columns([0.12, 0.38, 0.5], vertical_alignment="center")
    head.html(details.head("Trials"))
    present = list(dict.fromkeys(found["state"] for found in snapshot.records))
    labels = sorted({style.backbone_label(found) for found in snapshot.records})
    chosen = states.pills("State", present, selection_mode="multi", key="states", label_visibility="collapsed")
    wanted = backbones.pills("Backbone", labels, selection_mode="multi", key="backbones", label_visibility="collapsed")
    shown = table.filtered(snapshot.records, chosen, wanted)
    st.session_state["rows"] = [found["trial"] for found in shown]
    st.dataframe(
        table.frame(shown, snapshot.front),
        key=_table_key(),
        column_config=table.columns(),
        hide_index=True,
        height=min(36 * (len(shown) + 1) + 3, 520),
        on_select=_row_clicked,
        selection_mode="single-row",
    )


def _study(where: Options, studies: Sequence[StudyInfo], *, warn: bool = True) -> StudyInfo:
    """The study that the address names, else the command line, else the newest."""
    wanted = st.query_params.get("study") or where.study
    found = next((info for info in studies if info.name == wanted), None)
    if wanted and found is None and warn:
        known = ", ".join(info.name for info in studies)
        st.warning(f"study={wanted!r} does not exist; known: {known}. The newest is shown.")
    return found or studies[0]


def _selected(snapshot: Snapshot) -> Record:
    """The trial that the address names, else the best one, else the first."""
    wanted = st.query_params.get("trial")
    found = snapshot.by_number(int(wanted)) if wanted and wanted.isdecimal() else None
    if wanted and found is None:
        st.warning(
            f"trial={wanted!r} does not exist; study {snapshot.study.name} has 0 to {len(snapshot.records) - 1}."
        )
    return found or data.best_recall(snapshot.records) or snapshot.records[0]


def _nothing_yet(reason: str) -> None:
    st.html(details.title(None))
    st.info(f"{reason}. Start a search with `make launch` or `nas launch`; this page follows it.")


def _select(trial: int) -> None:
    st.query_params["trial"] = str(trial)


def _study_chosen() -> None:
    st.query_params["study"] = st.session_state["study"]
    st.query_params.pop("trial", None)
    _forget_row()


def _point_clicked() -> None:
    points = st.session_state["pareto"]["selection"]["points"]
    if points and "customdata" in points[0]:
        _select(points[0]["customdata"])
        _forget_row()


def _jumped() -> None:
    _select(st.session_state["jump"])
    _forget_row()


def _row_clicked() -> None:
    rows = st.session_state[_table_key()]["selection"]["rows"]
    if rows:
        _select(st.session_state["rows"][rows[0]])


def _table_key() -> str:
    return f"table {st.session_state.get('table', 0)}"


def _forget_row() -> None:
    """A table keeps its marked row for ever; under a new key it starts without one."""
    st.session_state["table"] = st.session_state.get("table", 0) + 1


if __name__ == "__main__":  # as Streamlit runs it
    main()
