"""What the page reads: short, read-only, and once per revision of a study.

A reader never keeps a transaction or a connection open between two looks (optuna-dashboard#545: an open page locked
SQLite and killed the study).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import streamlit as st

from dashboard.style import Record
from nas.search.front import front, hypervolume_over_trials, reference
from nas.search.records import record
from nas.settings import DEFAULT_STORAGE
from nas.store import MeasurementRow, Store, StudyInfo, TrialRow

ACTIVE = frozenset({"waiting", "running", "paused"})
"""States of trials that still go on while their study is running."""


@dataclass(frozen=True, slots=True)
class Options:
    """Where the page looks: `study` is None for the newest."""

    storage: str
    study: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A study as it stood at one revision. Shared between sessions: read it, never change it."""

    study: StudyInfo
    records: Sequence[Record]
    front: Sequence[Record]
    hypervolume: Sequence[tuple[int, float]]
    """(trial, hypervolume of the front of all trials up to it)."""
    baseline: Record | None
    """Full attention at its best recipe; None while no run of it is complete."""
    elapsed: float
    """Seconds from the study's creation to the last start or end of a trial."""

    @property
    def rungs(self) -> list[int]:
        return list(self.study.space["rungs"]["steps"])

    def by_number(self, number: int | None) -> Record | None:
        """The record of trial `number`; None if there is no such trial."""
        return next((found for found in self.records if found["trial"] == number), None)


def options(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Reads `--storage URL --study NAME` (after `--` on Streamlit's command line); else NAS_STORAGE, else ./nas.db.

    Raises:
        ValueError: an argument is unknown.
    """
    parser = argparse.ArgumentParser(prog="dashboard", add_help=False, allow_abbrev=False)
    parser.add_argument("--storage", default=environment.get("NAS_STORAGE") or DEFAULT_STORAGE)
    parser.add_argument("--study")
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ValueError(f"argument {unknown[0]!r} is unknown; allowed: --storage URL, --study NAME")
    return Options(storage=found.storage, study=found.study)


def studies(url: str) -> list[StudyInfo]:
    """All studies, the newest first.

    Raises:
        StoreError: there is no database yet, or it cannot be read.
    """
    with Store.open(url, read_only=True) as store:
        return store.studies()


def version(info: StudyInfo) -> str:
    """Changes whenever anything about the study changes, also when it was deleted and made anew."""
    return f"{info.created_at.isoformat()}/{info.revision}"


def snapshot(url: str, info: StudyInfo) -> Snapshot:
    """The study with its records, front and hypervolume; read once per version."""
    return _snapshot(url, info.name, version(info))


@st.cache_resource(max_entries=8, show_spinner=False)
def _snapshot(url: str, name: str, version: str) -> Snapshot:
    with Store.open(url, read_only=True) as store:
        info = store.study(name)
        rows = store.trials(info.id)
    records = [record(name, row) for row in rows]
    return Snapshot(
        study=info,
        records=records,
        front=front(records, info.space["objectives"]),
        hypervolume=hypervolume_over_trials(records),
        baseline=reference(records),
        elapsed=_elapsed(info, rows),
    )


def measurements(url: str, info: StudyInfo, number: int) -> Sequence[MeasurementRow]:
    """All measurements of one trial by step; read once per version."""
    return _measurements(url, info.id, number, version(info))


@st.cache_resource(max_entries=64, show_spinner=False)
def _measurements(url: str, study_id: int, number: int, version: str) -> Sequence[MeasurementRow]:
    with Store.open(url, read_only=True) as store:
        return store.measurements(study_id, number)


def _elapsed(info: StudyInfo, rows: Sequence[TrialRow]) -> float:
    times = [time for row in rows for time in (row.created_at, row.started_at, row.finished_at) if time]
    return (max(times, default=info.created_at) - info.created_at).total_seconds()


def best_recall(records: Sequence[Record], ratio: float = float("inf")) -> Record | None:
    """The complete trial of highest recall whose memory is at most `ratio` of full attention's."""
    scored = [
        found
        for found in records
        if found["state"] == "complete" and found["recall"] is not None and found["kv_cache_ratio"] <= ratio
    ]
    return max(scored, key=lambda found: found["recall"], default=None)
