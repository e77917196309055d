"""`nas status`, `nas front`, `nas trials`: what a study has found so far."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.errors import Refused
from nas.cli.options import JsonOption, StorageOption, StudyArgument, print_json, reading
from nas.settings import DEFAULT_STORAGE

if TYPE_CHECKING:
    from nas.store import Store, StudyInfo, TrialRow


def status(study: StudyArgument = None, storage: StorageOption = DEFAULT_STORAGE, as_json: JsonOption = False) -> None:
    """Show how far a study has come: trials by state and rung, what runs now, the last activity."""
    with reading(storage, study) as (store, info):
        rows = store.trials(info.id)
        found = _summary(store, info, rows)
        others = [other.name for other in store.studies() if other.name != info.name]
    if as_json:
        print_json(found)
        return
    _print_status(found, others)


def _summary(store: Store, info: StudyInfo, rows: list[TrialRow]) -> dict[str, Any]:
    from nas.messages import TrialState

    steps = info.space["rungs"]["steps"]
    running = [_running(store, info, row) for row in rows if row.state is TrialState.RUNNING]
    times = [time for row in rows for time in (row.created_at, row.started_at, row.finished_at) if time]
    times += [datetime.fromisoformat(row["last_activity"]) for row in running if row["last_activity"]]
    states = Counter(row.state for row in rows)
    return {
        "study": info.name,
        "space": info.space["name"],
        "seed": info.seed,
        "created": info.created_at.isoformat(),
        "last_activity": max(times, default=info.created_at).isoformat(),
        "states": {state.value: states[state] for state in TrialState},
        "rungs": [
            {"rung": rung, "step": step, "trials": sum(row.rung >= rung for row in rows)}
            for rung, step in enumerate(steps)
        ],
        "running": running,
    }


def _running(store: Store, info: StudyInfo, row: TrialRow) -> dict[str, Any]:
    latest = store.measurements(info.id, row.number, after_step=max(0, row.step - 1))
    return {
        "trial": row.number,
        "name": row.facts["name"],
        "rung": row.target_rung,
        "step": max([row.step, *(found.step for found in latest)]),
        "stop_step": info.space["rungs"]["steps"][row.target_rung],
        "last_activity": max(found.at for found in latest).isoformat() if latest else None,
    }


def _print_status(found: dict[str, Any], others: list[str]) -> None:
    from nas.cli import text
    from nas.cli.tables import console, grid

    out = console()
    table = grid("", "", header=False)
    table.add_row("study", f"{found['study']} (space {found['space']}, seed {found['seed']})")
    table.add_row("created", text.moment(datetime.fromisoformat(found["created"])))
    table.add_row("last activity", text.moment(datetime.fromisoformat(found["last_activity"])))
    table.add_row(
        "trials", ", ".join(f"{count} {state}" for state, count in found["states"].items() if count) or "none"
    )
    table.add_row("rungs", ", ".join(f"{rung['trials']} reached step {rung['step']}" for rung in found["rungs"]))
    for row in found["running"]:
        line = f"{found['study']}/{row['trial']} {row['name']}, step {row['step']} of {row['stop_step']}"
        table.add_row("running", line)
    if others:
        table.add_row("other studies", ", ".join(others))
    out.print(table)


def front(
    study: StudyArgument = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every complete design at its best recipe, not the Front alone.")
    ] = False,
    storage: StorageOption = DEFAULT_STORAGE,
    as_json: JsonOption = False,
) -> None:
    """Show the Front: the designs that no other beats in both recall and memory."""
    from nas.search.front import best_recipes
    from nas.search.front import front as pareto
    from nas.search.records import load

    with reading(storage, study) as (store, info):
        records = load(store, info)
    rows = pareto(records, info.space["objectives"])
    if as_json:
        print_json(best_recipes(records) if everything else rows)
        return
    from nas.cli.tables import empty_front, print_front

    if rows or everything:
        print_front(rows, records, everything=everything)
    else:
        typer.echo(empty_front(info.name, records))


def trials(
    study: StudyArgument = None,
    state: Annotated[str | None, typer.Option("--state", help="Only trials in this state.", show_default=False)] = None,
    storage: StorageOption = DEFAULT_STORAGE,
    as_json: JsonOption = False,
) -> None:
    """List the trials of a study."""
    from nas.messages import TrialState
    from nas.registry import did_you_mean
    from nas.search.records import load

    states = tuple(found.value for found in TrialState)
    if state is not None and state not in states:
        raise Refused(f"--state={state!r} is unknown; {did_you_mean(state, states)}")
    with reading(storage, study) as (store, info):
        records = [record for record in load(store, info) if state in (None, record["state"])]
    if as_json:
        print_json(records)
        return
    from nas.cli.tables import console, trials_table

    console().print(trials_table(records))
