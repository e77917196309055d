"""RayPool against a real local Ray of two workers that run fake_runners: one Ray for the module, any order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nas.architecture import Architecture, Candidate, LayerSpec, Recipe
from nas.messages import Event, Failed, Failure, Finished, Report, Segment
from nas.workload import Workload
from workers.pool import RayPool

HERE = Path(__file__).parent
RUNNER = "fake_runners:run"


@pytest.fixture(scope="module")
def pool() -> Iterator[RayPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        pool = RayPool(2, runner=RUNNER)
    yield pool
    pool.close()


def segment(trial: int, study: str, stop_step: int = 3, attempt: int = 0) -> Segment:
    layer = LayerSpec(mixer="softmax", heads=1, head_dim=8)
    architecture = Architecture(vocab_size=32, hidden_size=8, intermediate_size=8, layers=(layer,))
    recipe = Recipe(optimizer="adamw", lr=1e-3, warmup_steps=0, total_steps=9, batch_size=1, sequence_length=8)
    return Segment(
        study=study,
        trial=trial,
        attempt=attempt,
        rung=0,
        start_step=0,
        stop_step=stop_step,
        top=False,
        candidate=Candidate(architecture=architecture, recipe=recipe),
        seed=0,
        workload=Workload(),
        checkpoints="nowhere",
    )


def drain(pool: RayPool, ends: int, seconds: float = 30) -> list[Event]:
    """Polls until `ends` segments have ended."""
    events: list[Event] = []
    deadline = time.monotonic() + seconds
    while sum(not isinstance(event, Report) for event in events) < ends:
        assert time.monotonic() < deadline, events
        events += pool.poll(1)
    return events


def run(pool: RayPool, study: str) -> Finished | Failed:
    pool.submit(segment(0, study))
    (event,) = drain(pool, 1)
    assert not isinstance(event, Report)
    return event


def failure(pool: RayPool, study: str) -> Failed:
    event = run(pool, study)
    assert isinstance(event, Failed)
    return event


def worker_pid(event: Event) -> int:
    assert isinstance(event, Finished)
    return int(event.measurements[0].value)


def test_events_stream_in_order_from_two_workers_at_once(pool: RayPool) -> None:
    pool.pids()
    pool.submit(segment(1, "0.1", 8))
    pool.submit(segment(2, "0.1", 8))
    with pytest.raises(RuntimeError, match="all 2 slots are busy"):
        pool.submit(segment(3, "0.1"))
    events: list[Event] = []
    polls = 0
    while len(events) < 18:
        new = pool.poll(10)
        assert new
        polls += 1
        events += new
    assert polls > 6  # not in one piece at the end
    for trial in (1, 2):
        own = [event for event in events if event.trial == trial]
        assert [event.measurements[0].step for event in own if isinstance(event, Report)] == list(range(1, 9))
        assert isinstance(own[-1], Finished)
    halves = [{event.trial for event in events[:9]}, {event.trial for event in events[9:]}]
    assert halves == [{1, 2}, {1, 2}]
    ended = {worker_pid(event) for event in events if isinstance(event, Finished)}
    assert ended == set(pool.pids())


def test_poll_waits_no_longer_than_its_timeout(pool: RayPool) -> None:
    began = time.monotonic()
    assert pool.poll(0.2) == []
    assert 0.15 < time.monotonic() - began < 2
    pool.submit(segment(1, "1", 1))
    assert pool.poll(0.2) == []
    drain(pool, 1)


def test_worker_stays_warm_and_is_set_up_for_a_cpu(pool: RayPool) -> None:
    first = run(pool, "describe")
    assert worker_pid(run(pool, "describe")) == worker_pid(first)
    assert isinstance(first, Finished)
    values = {measurement.name: measurement.value for measurement in first.measurements}
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert values["threads"] == values["omp"] == threads
    assert values["denormal"] == 0 and values["ignores_sigint"] == values["cuda_hidden"] == 1


def test_a_killed_worker_is_reported_lost_and_replaced(pool: RayPool) -> None:
    victim = worker_pid(run(pool, "describe"))
    pool.submit(segment(5, "0.2", 1000, attempt=4))
    pool.submit(segment(6, "0.2", 20))
    assert pool.poll(10)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    while not (lost := [event for event in pool.poll(1) if isinstance(event, Failed)]):
        assert time.monotonic() - began < 5
    assert lost[0].kind is Failure.LOST and (lost[0].trial, lost[0].attempt) == (5, 4)
    assert "\n" not in lost[0].message and lost[0].seconds > 0
    assert isinstance(drain(pool, 1)[-1], Finished)  # the other goes on
    assert victim not in pool.pids()
    assert isinstance(run(pool, "describe"), Finished)


@pytest.mark.parametrize(
    ("study", "kind", "message", "replaced"),
    [
        ("raise", Failure.ERROR, "ValueError: bad shape", True),
        ("exit", Failure.ERROR, "SystemExit: 3", True),
        ("oom", Failure.OOM, "MemoryError: 8 GiB", True),
        ("wrong", Failure.ERROR, "TypeError: fake_runners:run returned NoneType, not Finished or Failed", True),
        ("diverge", Failure.DIVERGED, "loss=nan", False),
    ],
)
def test_failures_carry_kind_message_and_traceback(
    pool: RayPool, study: str, kind: Failure, message: str, replaced: bool
) -> None:
    before = pool.pids()
    event = failure(pool, study)
    assert (event.kind, event.message) == (kind, message)
    assert ("Traceback" in event.traceback) is replaced
    assert (pool.pids() != before) is replaced


def test_stop_makes_segments_return_early(pool: RayPool) -> None:
    pool.submit(segment(1, "0.05", 10_000))
    pool.submit(segment(2, "0.05", 10_000))
    assert pool.poll(10)
    assert pool.stop(10)
    ends = [event for event in pool.poll(0) if isinstance(event, Finished)]
    assert {event.trial for event in ends} == {1, 2}
    assert all(0 < event.step < 10_000 for event in ends)
    assert isinstance(run(pool, "describe"), Finished)


def test_stop_reports_what_still_runs(pool: RayPool) -> None:
    pool.submit(segment(1, "1", 10_000))
    assert not pool.stop(0)
    end = drain(pool, 1)[-1]
    assert isinstance(end, Finished) and end.step <= 1


def test_cancel_frees_the_slot_and_silences_the_trial(pool: RayPool) -> None:
    before = pool.pids()
    pool.submit(segment(1, "0.05", 10_000))
    assert pool.poll(10)
    pool.cancel(1)
    pool.cancel(99)
    pool.submit(segment(2, "0.05"))
    pool.submit(segment(3, "0.05"))
    assert {event.trial for event in drain(pool, 2)} <= {2, 3}
    assert len(set(before) & set(pool.pids())) == 1


def test_bad_requests_are_refused_at_once(pool: RayPool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        RayPool(0)
    with pytest.raises(ValueError, match=r"workers=64 with 8 GPUs each: this Ray has \d+ GPUs and \d+ CPU cores"):
        RayPool(64, gpus_per_worker=8)
    assert isinstance(run(pool, "describe"), Finished)  # a pool that was refused leaves the other's Ray alone


DRIVER = """
import sys, time
sys.path[:0] = [{here!r}, {root!r}]
from test_pool import RUNNER, segment
from workers.pool import RayPool
{before}
pool = RayPool(1, runner=RUNNER)
pool.submit(segment(0, "0.05", 10_000))
pool.poll(30)
print("running", pool._session.folder, flush=True)
{after}
"""


def driver(before: str = "", after: str = "time.sleep(60)") -> subprocess.Popen[str]:
    """A process of its own that runs a segment on a Ray of its own, at the point where `after` follows."""
    code = DRIVER.format(here=str(HERE), root=str(HERE.parents[1]), before=before, after=after)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/")
    return process


def alive(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=seconds)[1]


def test_everything_ends_with_a_killed_driver() -> None:
    with driver() as process:
        assert process.stdout is not None and process.stdout.readline().startswith("running")
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("ray::Worker" in " ".join(child.cmdline()) for child in family)
        process.kill()
        began = time.monotonic()
        assert alive(family, 15) == []
        print(f"all gone {time.monotonic() - began:.1f} s after SIGKILL of the driver")


def test_close_leaves_no_process_and_no_folder_behind() -> None:
    with driver(after="sys.stdin = None; time.sleep(1); pool.close(); print('closed', flush=True); time.sleep(20)") as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().split()[1])
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) > 3 and folder.is_dir()
        assert process.stdout.readline() == "closed\n"
        assert alive(family, 5) == []
        assert not folder.exists()
        process.kill()
