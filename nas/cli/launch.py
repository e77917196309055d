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
    seed: Annotated[int, _option("--seed", "Seed of the study.")] = 0,
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
        typer.echo("\n".join(describe(plan)))
        return
    result = run(request, plan)
    print_result(result)


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
    except LaunchError as error:
        raise Refused(one_line(error)) from error
    except (StudyAborted, StoreError, ValueError, ConnectionError, RuntimeError) as error:
        if not view.began:  # the storage, the cluster or a number of workers that it cannot hold
            raise (Failed if isinstance(error, StudyAborted) else Refused)(one_line(error)) from error
        if isinstance(error, StudyAborted | StoreError):
            raise Failed(f"{one_line(error)}; nas trials {plan.study} --state failed shows more") from error
        raise


def print_result(result: Result) -> None:
    """The Front, and the commands to look further."""
    from nas.cli.tables import console, front_table
    from nas.search.front import front
    from nas.search.study import Outcome

    out, study, records = console(), result.info.name, result.records
    rows = front(records, result.plan.space.objectives)
    done = sum(record["state"] in ("complete", "pruned", "failed") for record in records)
    out.print(f"\nstudy {study} {result.outcome.value}: {done} of {len(records)} trials ended", style="bold")
    if rows:
        out.print(front_table(rows, records))
        best = max(rows, key=lambda row: row["recall"])["trial"]
        out.print(
            f"nas show {study}/{best}", f"nas export {study} --top 3 --out out", f"nas dashboard {study}", sep="\n"
        )
    if result.outcome in (Outcome.STOPPED, Outcome.TIMEOUT):
        out.print(f"the same command goes on where it stood: {shlex.join(['nas', *sys.argv[1:]])}")


def describe(plan: Plan) -> list[str]:
    """What `--dry-run` prints: facts of the space, then estimates with what they rest on."""
    from nas.cli import text
    from nas.cli.estimate import BYTES_PER_PARAMETER, CHECKPOINTS_KEPT, FLOPS_PER_CORE, FLOPS_PER_GPU, estimate
    from search_spaces.designs import architectures, baselines

    space, found = plan.space, estimate(plan.space, plan.trials)
    deployment, full = space.deployment, space.deployment.full_attention_bytes()
    cores = os.cpu_count() or 1
    speed = plan.workers * FLOPS_PER_GPU if plan.device == "cuda" else cores * FLOPS_PER_CORE
    what = f"{plan.workers} GPUs at 10 TFLOP/s" if plan.device == "cuda" else f"{cores} CPU cores at 20 GFLOP/s"
    rungs = ", ".join(
        f"{count:.0f} to step {step}" for step, count in zip(space.rungs.steps, found.reached, strict=True)
    )
    lines = [
        f"study {plan.study}, space {space.name}: {len(architectures(space))} designs",
        f"kv_cache at {text.context(deployment.context)}: {text.size(plan.cheapest)} to {text.size(plan.dearest)}, "
        f"{text.percent(plan.cheapest / full)} to {text.percent(plan.dearest / full)} of full attention",
        f"trials: {plan.trials}, of which {min(plan.trials, len(baselines(space)))} baselines and "
        f"{len(plan.enqueued)} enqueued; {plan.workers} workers on {plan.device}",
        f"rungs, expected: {rungs}",
        f"training, expected: {found.steps:,.0f} steps, {text.big(found.tokens)} tokens, {found.flops:.2g} FLOPs "
        "(the mean design's, forward and backward)",
        f"time, estimated: {found.seconds(speed) / 3600:.2g} hours, assuming {what}; evaluation and start come on top",
        f"disk, at most: {text.size(found.disk_bytes)} ({CHECKPOINTS_KEPT} checkpoints a trial, {BYTES_PER_PARAMETER} bytes "
        f"a parameter) in {plan.checkpoints}",
    ]
    if plan.request.timeout:
        lines.append(f"stops after {text.duration(plan.request.timeout)} at the latest")
    return [*lines, "nothing was trained or written"]
