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
from fake_runners import RUNNER, segment

from nas.messages import Event, Failed, Failure, Finished, Report
from workers import cluster
from workers.pool import RayPool

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def pool() -> Iterator[RayPool]:
    before = set(psutil.Process().children())
    pool = RayPool(2, runner=RUNNER)
    folder = pool._session.folder
    assert folder is not None and folder.is_dir()
    yield pool
    processes = [p for child in set(psutil.Process().children()) - before for p in (child, *child.children())]
    assert len(processes) > 3
    pool.close()
    assert alive(processes, 15) == [], "close leaves processes behind"
    assert not folder.exists(), "close leaves its folder behind"


def alive(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that do not end within some seconds."""
    return list(psutil.wait_procs(processes, timeout=seconds)[1])


def drain(pool: RayPool, ends: int, seconds: float = 60) -> list[Event]:
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


def worker_pid(event: Event) -> int:
    assert isinstance(event, Finished)
    return int(event.measurements[0].value)


def test_events_stream_in_order(pool: RayPool) -> None:
    pool.submit(segment(1, "0.1", 8))
    events: list[Event] = []
    polls = 0
    while not any(isinstance(event, Finished) for event in events):
        new = pool.poll(60)
        assert new
        polls += 1
        events += new
    assert polls > 4  # as they come, not in one piece at the end
    assert [event.measurements[0].step for event in events if isinstance(event, Report)] == list(range(1, 9))
    assert isinstance(events[-1], Finished) and events[-1].step == 8


def test_slots_run_at_once_in_processes_of_their_own(pool: RayPool, tmp_path: Path) -> None:
    assert pool.slots == 2
    pool.submit(segment(1, "meet", folder=tmp_path))
    pool.submit(segment(2, "meet", folder=tmp_path))
    with pytest.raises(RuntimeError, match="trial=3: all 2 slots are busy"):
        pool.submit(segment(3, "meet", folder=tmp_path))
    assert {worker_pid(event) for event in drain(pool, 2)} == set(pool.pids())


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
    threads = max(1, cluster.total_cpus() // 2)
    assert values["threads"] == values["omp"] == threads
    assert values["denormal"] == 0 and values["ignores_sigint"] == values["cuda_hidden"] == 1


def test_a_killed_worker_is_reported_lost_and_replaced(pool: RayPool) -> None:
    victim = worker_pid(run(pool, "describe"))
    pool.submit(segment(5, "0.2", 1000, attempt=4))
    pool.submit(segment(6, "0.2", 20))
    assert pool.poll(60)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    while not (lost := [event for event in pool.poll(1) if isinstance(event, Failed)]):
        assert time.monotonic() - began < 10
    assert lost[0].kind is Failure.LOST and (lost[0].trial, lost[0].attempt) == (5, 4)
    assert "\n" not in lost[0].message and lost[0].seconds > 0
    assert isinstance(drain(pool, 1)[-1], Finished)  # the other goes on
    assert victim not in pool.pids()
    assert isinstance(run(pool, "describe"), Finished)


def test_a_worker_is_replaced_after_an_error_but_not_after_divergence(pool: RayPool) -> None:
    before = pool.pids()
    event = run(pool, "diverge")
    assert isinstance(event, Failed) and event.kind is Failure.DIVERGED
    assert pool.pids() == before
    event = run(pool, "raise")
    assert isinstance(event, Failed) and event.kind is Failure.ERROR
    assert event.message == "ValueError: bad shape" and "second line" in event.traceback
    assert len(set(before) & set(pool.pids())) == 1


def test_stop_makes_segments_return_early(pool: RayPool) -> None:
    pool.submit(segment(1, "0.05", 10_000))
    pool.submit(segment(2, "0.05", 10_000))
    assert pool.poll(60)
    assert pool.stop(60)
    ends = [event for event in pool.poll(0) if isinstance(event, Finished)]
    assert {event.trial for event in ends} == {1, 2}
    assert all(event.step < 10_000 for event in ends)  # 0 where the stop overtakes the first step
    assert max(event.step for event in ends) > 0
    assert isinstance(run(pool, "describe"), Finished)


def test_stop_reports_what_still_runs(pool: RayPool) -> None:
    pool.submit(segment(1, "1", 10_000))
    assert not pool.stop(0)
    end = drain(pool, 1)[-1]
    assert isinstance(end, Finished) and end.step <= 1


def test_cancel_frees_the_slot_and_silences_the_trial(pool: RayPool) -> None:
    before = pool.pids()
    pool.submit(segment(1, "0.05", 10_000))
    assert pool.poll(60)
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


def test_temp_dir_must_leave_room_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"temp_dir=.* must be at most 43 bytes long"):
        cluster._temp_dir(tmp_path / ("x" * 60))
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 60)
    assert cluster._temp_dir(None) == Path(f"/tmp/nas-ray-{os.getuid()}")


def test_a_dead_or_malformed_address_is_refused_at_once() -> None:
    with pytest.raises(ConnectionError, match="ray_address=127.0.0.1:1: no Ray cluster answers there"):
        RayPool(1, address="127.0.0.1:1")
    with pytest.raises(ValueError, match="ray_address=cluster must be auto or HOST:PORT"):
        RayPool(1, address="cluster")


@pytest.mark.parametrize(("amount", "each", "workers"), [(8, 1, 8), (2, 0.5, 4), (1, 0.3, 3), (3, 2, 1), (0, 0.5, 0)])
def test_shares_of_a_machine(amount: float, each: float, workers: int) -> None:
    assert cluster._share(amount, each) == workers


DRIVER = """
import sys, time
sys.path[:0] = [{here!r}, {root!r}]
from fake_runners import RUNNER, segment
from workers.pool import RayPool
pool = RayPool(1, runner=RUNNER)
pool.submit(segment(0, "0.05", 10_000))
pool.poll(60)
print("running", flush=True)
time.sleep(60)
"""


def test_workers_end_with_a_killed_driver() -> None:
    code = DRIVER.format(here=str(HERE), root=str(HERE.parents[1]))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/") as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "running\n"
        family = psutil.Process(driver.pid).children(recursive=True)
        agents = [process for process in family if process.name().endswith("Agent")]
        assert "ray::Worker" in {process.name() for process in family}
        driver.kill()
        assert alive([process for process in family if process not in agents], 10) == []
    for process in agents:  # of Ray: they would end by themselves a minute later
        process.kill()
