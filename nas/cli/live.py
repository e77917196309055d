"""What `nas launch` shows while it runs: a live view on a terminal, one line an event elsewhere."""

from __future__ import annotations

import time
from collections import Counter, deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from rich.console import Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nas.cli import text
from nas.cli.estimate import expected_steps
from nas.cli.tables import STATE_STYLES, console, grid
from nas.messages import TrialState

if TYPE_CHECKING:
    from nas.search.study import Dispatcher
    from nas.service import Plan

LEVELS = {"1/16": 1 / 16, "1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "1": 1.0}
"""Shares of full attention's cache at which the best recall is shown."""
REDRAW_SECONDS = 0.5
MAX_WORKERS = 16
LOG_LINES = 6


class View(Protocol):
    """A context manager that the dispatcher tells what happens; `began` once it has started to dispatch."""

    began: bool

    def notify(self, dispatcher: Dispatcher) -> None: ...

    def log(self, line: str) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_view(plan: Plan) -> View:
    return LiveView(plan) if console().is_terminal else LineView(plan)


def heading(plan: Plan) -> str:
    amount = f"{text.count(plan.trials, 'trial')} on {text.count(plan.workers, 'worker')} ({plan.device})"
    return f"study {plan.study}, space {plan.space.name}: {amount}"


class LineView:
    """One plain line an event, flushed at once: for logs and pipes."""

    def __init__(self, plan: Plan) -> None:
        self.began = False
        self._plan = plan

    def notify(self, dispatcher: Dispatcher) -> None:
        if not self.began:
            self.began = True
            self.log(heading(self._plan))
            if ended := sum(row.state.is_final for row in dispatcher.board.rows.values()):
                self.log(f"going on: {text.count(ended, 'trial')} of {self._plan.trials} ended before")

    def log(self, line: str) -> None:
        print(line, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LiveView:
    """Redrawn in place. The picture is made while the dispatcher waits for it, never from another thread."""

    def __init__(self, plan: Plan) -> None:
        self.began = False
        self._plan = plan
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._live = Live(Text(), console=console(), auto_refresh=False)
        self._drawn = -REDRAW_SECONDS
        self._progress = Progress(plan)

    def notify(self, dispatcher: Dispatcher) -> None:
        self.began = True
        now = time.monotonic()
        if now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            steps = running_steps(dispatcher)
            eta = self._progress.remaining(dispatcher, steps, now)
            self._live.update(picture(self._plan, dispatcher, steps, eta, self._lines), refresh=True)

    def log(self, line: str) -> None:
        self._lines.append(line)
        if not self.began:
            self._live.update(Text("\n".join(self._lines)), refresh=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        if not self.began:
            self.log("reading the data and starting the workers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


class Progress:
    """Time left, from the steps that this run has done and those that the study is expected to need."""

    def __init__(self, plan: Plan) -> None:
        self._expected = expected_steps(plan.space, plan.trials)
        self._start: tuple[float, float] | None = None

    def remaining(self, dispatcher: Dispatcher, steps: dict[int, int], now: float) -> float | None:
        """Seconds; None until there is a pace to tell from."""
        done = float(sum(steps.get(number, row.step) for number, row in dispatcher.board.rows.items()))
        if self._start is None:
            self._start = (now, done)
        began, before = self._start
        if done <= before or now <= began:
            return None
        return max(0.0, self._expected - done) * (now - began) / (done - before)


def running_steps(dispatcher: Dispatcher) -> dict[int, int]:
    """The last step reported by every running trial."""
    found = {}
    for number in dispatcher.running:
        step = dispatcher.board.rows[number].step
        latest = dispatcher.store.measurements(dispatcher.info.id, number, names=["train_loss"], after_step=step)
        found[number] = latest[-1].step if latest else step
    return found


def picture(plan: Plan, dispatcher: Dispatcher, steps: dict[int, int], eta: float | None, lines: deque[str]) -> Group:
    """The whole view: heading, states, workers, best recall at each memory level, last log lines."""
    rows = dispatcher.board.rows.values()
    counts = Counter(row.state for row in rows)
    states = Text(f"{dispatcher.trained()} of {plan.trials} trials: ")
    for state in TrialState:
        if counts[state]:
            states.append(f"{counts[state]} {state.value}  ", style=STATE_STYLES[state.value])
    states.append("stopping" if dispatcher.stopping else f"about {text.duration(eta)} left" if eta is not None else "")
    log = Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")
    blocks = (states, _workers(dispatcher, steps), _best(dispatcher.records()), log)
    return Group(Text(heading(plan), style="bold"), *(Padding(block, (0, 0, 1, 0)) for block in blocks))


def _workers(dispatcher: Dispatcher, steps: dict[int, int]) -> Table:
    table = grid(">trial", "running", "layers", "recipe", ">step")
    for number in sorted(dispatcher.running)[:MAX_WORKERS]:
        row = dispatcher.board.rows[number]
        stop = dispatcher.space.rungs.steps[max(0, row.target_rung)]
        known = row.facts
        table.add_row(
            str(number),
            known["name"],
            known["diagram"],
            f"{known['optimizer']} {known['lr']:.2g}",
            f"{steps[number]}/{stop}",
        )
    hidden = len(dispatcher.running) - MAX_WORKERS
    if hidden > 0:
        table.add_row("", f"and {hidden} more")
    return table


def _best(records: list[dict[str, Any]]) -> Table:
    table = grid("cache, of full", ">best recall", "design", "layers", ">trial")
    for label, level in LEVELS.items():
        within = [r for r in records if r["recall"] is not None and r["kv_cache_ratio"] <= level]
        best = max(within, key=lambda record: record["recall"], default=None)
        if best is None:
            table.add_row(f"<= {label}", text.ABSENT)
        else:
            table.add_row(f"<= {label}", text.number(best["recall"]), best["name"], best["diagram"], str(best["trial"]))
    return table
