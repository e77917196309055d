"""The Worker as a plain object, in this process: what it says of a segment however the runner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runners import RUNNER, segment

from nas.messages import Event, Failed, Failure, Finished, Report
from workers.worker import Worker


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back after the test
    handler = signal.getsignal(signal.SIGINT)
    yield Worker(RUNNER, threads=1, cuda=False)
    signal.signal(signal.SIGINT, handler)


def until_end(worker: Worker, events: list[Event]) -> list[Event]:
    while isinstance(events[-1], Report):
        events = events + worker.take()
    return events


@pytest.mark.parametrize(
    ("study", "kind", "message"),
    [
        ("raise", Failure.ERROR, "ValueError: bad shape"),
        ("exit", Failure.ERROR, "SystemExit: 3"),
        ("oom", Failure.OOM, "MemoryError: 8 GiB"),
        ("wrong", Failure.ERROR, "TypeError: fake_runners:run returned NoneType, not Finished or Failed"),
    ],
)
def test_exceptions_become_failures(worker: Worker, study: str, kind: Failure, message: str) -> None:
    (event,) = worker.start(segment(7, study, attempt=2))
    assert isinstance(event, Failed)
    assert (event.trial, event.attempt, event.kind, event.message) == (7, 2, kind, message)
    assert "Traceback" in event.traceback and "worker.py" in event.traceback


def test_torch_out_of_memory_is_oom() -> None:
    import torch

    from workers.worker import failed

    event = failed(segment(0, "0"), torch.OutOfMemoryError("CUDA out of memory. Tried"), 1.0)
    assert event.kind is Failure.OOM


def test_a_runner_that_is_not_there_is_an_error(worker: Worker) -> None:
    (event,) = Worker("nowhere.at.all:run", threads=1, cuda=False).start(segment(0, "0"))
    assert isinstance(event, Failed) and event.message == "ModuleNotFoundError: No module named 'nowhere'"


def test_the_runners_own_failure_passes_unchanged(worker: Worker) -> None:
    (event,) = worker.start(segment(0, "diverge"))
    assert event == Failed(trial=0, attempt=0, kind=Failure.DIVERGED, message="loss=nan")


def test_reports_come_in_order_and_segments_follow_one_another(worker: Worker) -> None:
    for trial in range(3):
        events = until_end(worker, worker.start(segment(trial, "0", 50)))
        assert {event.trial for event in events} == {trial}
        steps = [event.measurements[0].step for event in events if isinstance(event, Report)]
        assert steps == list(range(1, 51)) and isinstance(events[-1], Finished)


def test_stop_holds_for_its_attempt_only_even_before_the_start(worker: Worker) -> None:
    worker.stop(1, 0)
    (event,) = worker.start(segment(1, "0.01"))
    assert isinstance(event, Finished) and event.step == 0
    end = until_end(worker, worker.start(segment(1, "0.01", attempt=1)))[-1]
    assert isinstance(end, Finished) and end.step == 3


def test_the_training_thread_is_set_up(worker: Worker) -> None:
    (event,) = worker.start(segment(0, "describe"))
    assert isinstance(event, Finished)
    values = {measurement.name: measurement.value for measurement in event.measurements}
    del values["pid"]
    assert values == {"threads": 1, "omp": 1, "denormal": 0, "ignores_sigint": 1, "cuda_hidden": 1}


def test_import_is_light() -> None:
    code = "import sys, workers, workers.worker; print({'ray', 'torch'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    output = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert output == "set()\n"
