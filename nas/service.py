"""`nas launch`, without its terminal: checks a request, opens the store, runs the dispatcher on a pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nas.architecture import Candidate
from nas.checks import (
    MAX_WORKERS,
    LaunchError,
    check_bounds,
    check_seed,
    check_storage,
    check_study,
    check_text,
    read_designs,
    writable,
)
from nas.messages import Pool
from nas.search.study import Dispatcher, Limits, Outcome
from nas.settings import DEFAULT_STORAGE
from nas.store import Store, StudyInfo, StudyNotFound
from search_spaces import SearchSpace, SpaceError, load_space
from search_spaces.designs import Value, architectures, baselines, count, grid
from search_spaces.feasible import budget_problem, deployment_problem
from search_spaces.sizing import layer

MIN_GPU_HEAD = 16


@dataclass
class Request:
    """What `nas launch` is asked for; None takes the space's or the machine's default.

    `storage` is an SQLAlchemy URL; `workers` counts slots (default: GPUs, or CPU cores without one); `gpus` says how
    many GPUs to use (default: all of this machine's; 0 for none); `ray_address` joins a running cluster; `timeout` is
    in seconds; `checkpoints` is a folder or fsspec URL.
    """

    space: str | SearchSpace | None = None
    study: str | None = None
    storage: str = DEFAULT_STORAGE
    trials: int | None = None
    workers: int | None = None
    gpus: float | None = None
    timeout: float | None = None
    seed: int | None = None
    ray_address: str | None = None
    enqueue: str | None = None
    checkpoints: str | None = None


@dataclass
class Plan:
    """A request, checked: all that can be known before a worker starts."""

    space: SearchSpace
    study: str
    trials: int
    workers: int
    device: str
    enqueued: list[tuple[Candidate, dict[str, Value]]]
    request: Request
    checkpoints: str
    designs: float = field(init=False)
    cheapest: int = field(init=False)
    dearest: int = field(init=False)

    def __post_init__(self) -> None:
        costs = [self.space.deployment.cost(found).kv_cache_bytes for found in architectures(self.space)]
        self.designs, self.cheapest, self.dearest = count(self.space), min(costs), max(costs)


@dataclass
class Result:
    """How a launch ended."""

    plan: Plan
    info: StudyInfo
    outcome: Outcome
    records: list[dict[str, Any]]


def visible_gpus() -> int:
    """CUDA devices this machine offers, without importing torch: `CUDA_VISIBLE_DEVICES`, else /proc's NVIDIA list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else len(list(Path("/dev").glob("nvidia[0-9]*")))


def make_plan(request: Request) -> Plan:
    """Checks a request without writing anything.

    Raises:
        SpaceError, LaunchError, StoreError: the first thing that is wrong, in one line.
    """
    check_bounds(trials=request.trials, workers=request.workers, timeout=request.timeout)
    check_seed(request.seed)
    gpus = _gpus(request)
    on_gpu = gpus > 0
    space = request.space or ("hybrid-gpu" if on_gpu else "cpu-demo")
    if isinstance(space, str):
        space = load_space(space)
    study = request.study or ("demo" if request.space is None else space.name)
    check_study(study)
    check_storage(request.storage)
    if problem := deployment_problem(space) or budget_problem(space):
        raise LaunchError(problem)
    if on_gpu and (small := _small_heads(space)):
        raise LaunchError(f"proxy head_dim={small[1]} of {small[0]}: fla's GPU kernels need at least {MIN_GPU_HEAD}")
    check_text(space)
    return Plan(
        space=space,
        study=study,
        trials=_trials(request, space),
        workers=request.workers or gpus or os.cpu_count() or 1,
        device="cuda" if on_gpu else "cpu",
        enqueued=read_designs(request.enqueue, space) if request.enqueue else [],
        request=request,
        checkpoints=writable(request.checkpoints or _beside(request.storage)),
    )


def _gpus(request: Request) -> int:
    """GPUs to use: as asked for, else those of this machine. A cluster's cannot be seen from here.

    Raises:
        LaunchError: not a whole number from 0 to `MAX_WORKERS`, or a cluster without the number or a place that all its
            nodes reach.
    """
    if request.gpus is not None and not (0 <= request.gpus <= MAX_WORKERS and request.gpus % 1 == 0):
        raise LaunchError(f"gpus={request.gpus:g} must be a whole number from 0 to {MAX_WORKERS}")
    if request.ray_address is not None:
        if request.gpus is None:
            raise LaunchError("gpus is missing: with ray_address say how many GPUs to use, or gpus=0 and workers=N")
        if request.gpus == 0 and request.workers is None:
            raise LaunchError("workers is missing: with ray_address and gpus=0 say how many CPU workers to use")
        if request.checkpoints is None:
            raise LaunchError("checkpoints is missing: with ray_address give a folder or URL that all nodes reach")
    return visible_gpus() if request.gpus is None else int(request.gpus)


def _small_heads(space: SearchSpace) -> tuple[str, int] | None:
    """A linear mixer whose key or value heads are too small for a GPU, and their size (fla issue 22)."""
    layers = ((name, layer(space, name)) for name in space.linear_mixers)
    sizes = ((name, round(x.head_dim * min(1, x.expand_v))) for name, x in layers)
    return next(((name, size) for name, size in sizes if size < MIN_GPU_HEAD), None)


def _trials(request: Request, space: SearchSpace) -> int:
    """Trials to train: as asked for, else the space's, else all of a grid or 24.

    Raises:
        LaunchError: fewer than the baselines, which always train.
    """
    digests = {found.digest for found in baselines(space)}
    wanted = len(digests | {found.digest for _, found in grid(space)}) if space.grid else 24
    trials = request.trials or space.trials or max(wanted, len(digests))
    if trials < len(digests):
        raise LaunchError(
            f"trials={trials}: the baselines alone are {len(digests)} (full attention and each pure backbone); "
            f"allowed: {len(digests)} or more"
        )
    return trials


def _beside(storage: str) -> str:
    """Checkpoints of an SQLite study live beside its file."""
    path = storage.removeprefix("sqlite:///") if storage.startswith("sqlite:///") else ""
    return str(Path(path).resolve().parent / "nas-checkpoints")


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two spaces differ: "proxy.layers: 4 -> 6"."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [line for key in keys for line in difference(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))]
    return [] if old == new else [f"{path}: {old} -> {new}"]


def find_study(store: Store, plan: Plan) -> StudyInfo | None:
    """The plan's study if there is one.

    Raises:
        LaunchError: it has another space or seed.
    """
    try:
        info = store.study(plan.study)
    except StudyNotFound:
        return None
    if info.space_digest != plan.space.digest:
        changes = difference(info.space, plan.space.canonical())
        raise LaunchError(
            f"study {plan.study!r} exists with another space ({'; '.join(changes)}); choose another --study"
        )
    if plan.request.seed not in (None, info.seed):
        raise LaunchError(
            f"seed={plan.request.seed}: study {plan.study!r} has seed {info.seed}; choose another --study"
        )
    return info


def launch(
    request: Request,
    *,
    pool: Callable[[Plan], Pool] | None = None,
    notify: Callable[[Dispatcher], None] = lambda _: None,
    log: Callable[[str], None] = lambda _: None,
) -> Result:
    """Runs a search to its end, or goes on with one that was stopped or killed.

    Args:
        request: what to search and how far.
        pool: makes the worker pool; Ray by default.
        notify, log: as in `Dispatcher`.

    Raises:
        SpaceError, LaunchError: refused, nothing written.
        StoreError: the storage cannot be used, or another launch holds the study.
    """
    plan = make_plan(request)
    prepare_data(plan.space)
    make_pool = pool or _ray_pool
    workers: Pool = _NoPool()
    with Store.open(request.storage) as store, store.lock(plan.study):
        info = find_study(store, plan)
        try:
            if info is None:
                workers = make_pool(plan)  # what Ray refuses is refused before the study exists
                info = store.create_study(plan.study, plan.space.canonical(), plan.space.digest, request.seed or 0)
            dispatcher = Dispatcher(
                store=store,
                info=info,
                space=plan.space,
                pool=workers,
                checkpoints=plan.checkpoints,
                limits=Limits(plan.trials, request.timeout),
                device=plan.device,
                notify=notify,
                log=log,
            )
            dispatcher.enqueue_baselines()
            for found, params in plan.enqueued:
                if dispatcher.enqueue(found, "enqueued", params) is None:
                    log("an enqueued design is in the study already")
            if not dispatcher.unfinished():
                return Result(plan, info, Outcome.FINISHED, dispatcher.records())
            if isinstance(workers, _NoPool):
                workers = dispatcher.pool = make_pool(plan)
            with _graceful_signals(dispatcher, log):
                outcome = dispatcher.run()
            return Result(plan, info, outcome, dispatcher.records())
        finally:
            workers.close()


def prepare_data(space: SearchSpace) -> None:
    """Finds and tokenises the text once, before the study exists and before workers would race for it.

    Raises:
        LaunchError: the text source is empty or cannot be read.
    """
    from nas.training.data.text import load_corpus

    if not space.workload.text.weight:
        return
    try:
        load_corpus(space.workload.text)
    except (OSError, ValueError) as error:
        raise LaunchError(f"workload.text.source={space.workload.text.source!r}: {error}") from error


def _ray_pool(plan: Plan) -> Pool:
    from workers.pool import RayPool

    per_worker = 1.0 if plan.device == "cuda" else 0.0
    try:
        return RayPool(plan.workers, gpus_per_worker=per_worker, address=plan.request.ray_address)
    except (ValueError, ConnectionError) as error:
        raise LaunchError(str(error)) from error


class _NoPool:
    """Stands in until there is something to train: a finished study starts no workers."""

    slots = 0

    def submit(self, segment: Any) -> None:
        raise AssertionError("no pool yet")

    def poll(self, timeout: float) -> list[Any]:
        return []

    def cancel(self, trial: int) -> None: ...

    def stop(self) -> bool:
        return True

    def close(self) -> None: ...


@contextmanager
def _graceful_signals(dispatcher: Dispatcher, log: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM stops with checkpoints kept; a second one ends at once."""

    def handle(number: int, _: object) -> None:
        if dispatcher.stopping:
            raise KeyboardInterrupt
        log(f"{signal.Signals(number).name}: stopping, checkpoints are being written; once more to end at once")
        dispatcher.stop()

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["LaunchError", "Plan", "Request", "Result", "SpaceError", "launch", "make_plan"]
