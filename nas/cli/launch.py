"""`nas launch`: runs a search on this terminal, and says at the end what it found."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.errors import Failed, Refused, one_line
from nas.cli.options import StorageOption
from nas.settings import DEFAULT_STORAGE
from nas.settings import storage as usual_storage

if TYPE_CHECKING:
    from nas.service import Plan, Request, Result


def _option(flag: str, explanation: str, metavar: str | None = None, **more: Any) -> Any:
    variable = "NAS_" + flag.strip("-").replace("-", "_").upper()
    return typer.Option(flag, envvar=variable, help=explanation, metavar=metavar, **more)


def launch(
    space: Annotated[
        str | None,
        _option(
            "--space", "Preset or YAML file.", "NAME|FILE", show_default="cpu-demo, or hybrid-gpu where there is a GPU"
        ),
    ] = None,
    study: Annotated[
        str | None,
        _option(
            "--study", "Study to begin or to go on with.", "NAME", show_default="the space's name; demo without --space"
        ),
    ] = None,
    storage: StorageOption = DEFAULT_STORAGE,
    trials: Annotated[int | None, _option("--trials", "Trials to train.", show_default="the space's")] = None,
    workers: Annotated[
        int | None, _option("--workers", "Worker processes.", show_default="GPUs, or CPU cores without one")
    ] = None,
    gpus: Annotated[float | None, _option("--gpus", "GPUs to use.", show_default="all")] = None,
    timeout: Annotated[
        str | None, _option("--timeout", "Stop after this time: 90, 10m, 2h.", "TIME", show_default="none")
    ] = None,
    seed: Annotated[int | None, _option("--seed", "Seed of a new study; 0 by default.")] = None,
    ray_address: Annotated[
        str | None, _option("--ray-address", "Join a running Ray cluster.", "ADDRESS", show_default="a local Ray")
    ] = None,
    enqueue: Annotated[
        str | None, _option("--enqueue", "YAML list of own designs to try first.", "FILE", show_default="none")
    ] = None,
    checkpoints: Annotated[
        str | None,
        _option("--checkpoints", "Folder or fsspec URL.", "DIR", show_default="nas-checkpoints beside the database"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be trained and what it takes; write nothing.")
    ] = False,
) -> None:
    """Search a space, or go on with a study that was stopped or killed."""
    from nas.cli.tables import print_pairs
    from nas.cli.text import parse_duration
    from nas.service import Request, make_plan

    request = Request(
        space=space,
        study=study,
        storage=storage,
        trials=trials,
        workers=workers,
        gpus=gpus,
        timeout=parse_duration(timeout) if timeout else None,
        seed=seed,
        ray_address=ray_address,
        enqueue=enqueue,
        checkpoints=checkpoints,
    )
    try:
        plan = make_plan(request)
    except ValueError as error:
        raise Refused(one_line(error)) from error
    if dry_run:
        print_pairs(describe(plan))
        typer.echo("dry run: nothing was trained or written")
    else:
        print_result(run(request, plan))


def run(request: Request, plan: Plan) -> Result:
    """Runs the search under the view that fits the output."""
    from nas.cli.live import make_view
    from nas.search.study import StudyAborted
    from nas.service import LaunchError
    from nas.service import launch as run_search
    from nas.store import StoreError

    view = make_view(plan)
    try:
        with view:
            return run_search(request, notify=view.notify, log=view.log)
    except StudyAborted as error:
        listing = f"nas trials {plan.study}{storage_option(request.storage)}"
        hint = f"{listing} shows the trials; mend the cause and run the same command again"
        raise Failed(f"{one_line(error)}; {hint}") from error
    except (LaunchError, StoreError) as error:
        raise (Failed if view.began else Refused)(one_line(error)) from error
    except (ValueError, ConnectionError, RuntimeError) as error:
        if view.began:
            raise
        # The cluster is not there, or cannot hold the workers.
        raise (Failed if isinstance(error, RuntimeError) else Refused)(one_line(error)) from error


def print_result(result: Result) -> None:
    """The Front, and the commands to look further."""
    from nas.cli.tables import console, empty_front, print_front
    from nas.search.front import front
    from nas.search.study import Outcome

    out, study, records = console(), result.info.name, result.records
    rows = front(records, result.plan.space.objectives)
    done = sum(record["state"] in ("complete", "pruned", "failed") for record in records)
    out.print(f"\nstudy {study} {result.outcome.value}: {done} of {len(records)} trials ended", style="bold")
    if rows:
        print_front(rows, records)
        best = max(rows, key=lambda row: row["recall"])["trial"]
        where = storage_option(result.plan.request.storage)
        for command in (f"show {study}/{best}", f"export {study} --top 3 --out out", f"dashboard {study}"):
            out.print(f"nas {command}{where}")
    elif any(record["state"] == "complete" for record in records):
        out.print(empty_front(study, records))
    if result.outcome in (Outcome.STOPPED, Outcome.TIMEOUT):
        out.print(f"the same command goes on where it stood: {shlex.join(['nas', *sys.argv[1:]])}")


def storage_option(url: str) -> str:
    """What a later command needs to find the storage: nothing where the settings lead there anyway."""
    from sqlalchemy import make_url

    return "" if url == usual_storage() else f" --storage {shlex.quote(make_url(url).render_as_string())}"


def describe(plan: Plan) -> dict[str, str]:
    """What `--dry-run` prints: facts of the space, then estimates with what they rest on."""
    from nas.cli import text
    from nas.cli.estimate import BYTES_PER_PARAMETER, CHECKPOINTS_KEPT, FLOPS_PER_CORE, FLOPS_PER_GPU, estimate
    from nas.cli.tables import cache_range
    from search_spaces.designs import architectures, baselines

    space, found = plan.space, estimate(plan.space, plan.trials)
    on_gpu, cores = plan.device == "cuda", os.cpu_count() or 1
    speed = plan.workers * FLOPS_PER_GPU if on_gpu else cores * FLOPS_PER_CORE
    assumed = f"{plan.workers} GPUs at 10 TFLOP/s" if on_gpu else f"{cores} CPU cores at 20 GFLOP/s"
    first = f"{min(plan.trials, len(baselines(space)))} baselines, {len(plan.enqueued)} enqueued"
    reached = zip(found.reached, space.rungs.steps, strict=True)
    kept = f"{CHECKPOINTS_KEPT} checkpoints a trial, {BYTES_PER_PARAMETER} bytes a parameter"
    lines = {
        "study": f"{plan.study} (space {space.name}, {len(architectures(space))} designs)",
        "kv_cache": cache_range(space.deployment, plan.cheapest, plan.dearest),
        "trials": f"{plan.trials} ({first}) on {text.count(plan.workers, 'worker')} ({plan.device})",
        "rungs": "expected: " + ", ".join(f"{count:.0f} trials to step {step}" for count, step in reached),
        "training": f"expected: {found.steps:,.0f} steps, {text.big(found.tokens)} tokens, {found.flops:.2g} FLOPs",
        "time": f"estimated: {text.duration(found.seconds(speed))}, if {assumed}; evaluation and start come on top",
        "disk": f"at most {text.size(found.disk_bytes)} in {plan.checkpoints} ({kept})",
    }
    if plan.request.timeout:
        lines["timeout"] = f"stops after {text.duration(plan.request.timeout)} at the latest, to be resumed"
    return lines
