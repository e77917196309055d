"""`nas export` and `nas dashboard`: take a design away, look at a study in the browser."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.errors import Failed, Refused, one_line, refusing
from nas.cli.options import StorageOption, StudyArgument, parse_trial, reading
from nas.settings import DEFAULT_STORAGE


def export(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="STUDY|STUDY/N", help="A study (the latest by default) or one trial.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write to; one subfolder a trial.")
    ] = Path("out"),
    top: Annotated[
        int | None, typer.Option("--top", min=1, help="How many of the Front, best recall first.", show_default="1")
    ] = None,
    storage: StorageOption = DEFAULT_STORAGE,
) -> None:
    """Write trials as Hugging Face folders: config, weights, model code, tokenizer and card."""
    if what is not None and "/" in what:
        if top is not None:
            raise Refused(f"--top={top} applies to a study; {what} is one trial")
        study, number = parse_trial(what)
        numbers = [number]
    else:
        study, numbers = what, best_trials(storage, what, top or 1)
    from nas.export import WriteError, export_trials

    with reading(storage, study) as (store, info), refusing(ValueError):
        try:
            paths = export_trials(store, info.name, numbers, out)
        except WriteError as error:
            raise Failed(one_line(error)) from error
    for path in paths:
        typer.echo(path)
    if top is not None and len(numbers) < top:
        typer.echo(f"exported {len(numbers)}, not {top}: the Front of study {info.name} holds no more", err=True)


def best_trials(storage: str, study: str | None, top: int) -> list[int]:
    """Numbers of the `top` designs of the Front, the highest recall first."""
    from nas.cli.tables import empty_front
    from nas.search.front import front
    from nas.search.records import load

    with reading(storage, study) as (store, info):
        records = load(store, info)
    rows = front(records, info.space["objectives"])
    if not rows:
        raise Refused(f"{empty_front(info.name, records)}; nas export {info.name}/N exports trial N")
    rows.sort(key=lambda row: (-row["recall"], row["kv_cache_bytes"]))
    return [row["trial"] for row in rows[:top]]


def dashboard(
    study: StudyArgument = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on this machine.")] = 8501,
    storage: StorageOption = DEFAULT_STORAGE,
) -> None:
    """Open the dashboard: a page in the browser that follows the search live."""
    from dashboard.launch import command, url

    if study is not None:
        with reading(storage, study):
            pass  # refuses a study that does not exist
    with refusing(ValueError):
        server = command(None, port, study)
    typer.echo(f"dashboard: {url(port)} (Ctrl-C ends it)")
    try:
        # In the environment, where a password is not seen by `ps`.
        code = subprocess.run(server, env=os.environ | {"NAS_STORAGE": storage}, check=False).returncode
    except KeyboardInterrupt:
        return
    if code:
        raise Failed(f"the dashboard's server ended with exit code {code}")
