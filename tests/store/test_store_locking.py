"""One dispatcher per study, and what its death leaves behind: in other processes, killed with SIGKILL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy

from nas.messages import Measurement
from nas.store import StorageError, Store, StudyBusy, StudyInfo, TrialRow

Add = Callable[..., TrialRow]

HOLD = """
import sys, time
from nas.store import Store
store = Store.open(sys.argv[1])
with store.lock("demo"):
    print("held", flush=True)
    time.sleep(60)
"""

COMMIT_FOR_EVER = """
import itertools, sys
from nas.messages import Measurement
from nas.store import Store
store = Store.open(sys.argv[1])
for step in itertools.count():
    batch = [Measurement(step=step, name=name, value=step) for name in ("loss", "recall")]
    assert store.record(1, 0, 1, batch)
    print(step, flush=True)
"""

STOP_IN_TRANSACTION = """
import sys, time
from sqlalchemy import text
from nas.store import Store
store = Store.open(sys.argv[1])
with store._change(1) as connection:
    connection.execute(text("UPDATE nas_trials SET seconds = 99"))
    connection.execute(text("DELETE FROM nas_measurements"))
    print("written", flush=True)
    time.sleep(60)
"""


@contextmanager
def process(script: str, url: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_lock_of_another_process_is_refused_and_named(store: Store, url: str) -> None:
    with process(HOLD, url) as child:
        assert line(child) == "held"
        with pytest.raises(StudyBusy, match=f"study 'demo' is being run by process {child.pid} on ") as busy:
            store.lock("demo").__enter__()
        holder = busy.value.holder
        assert holder is not None
        assert (holder.pid, holder.host) == (child.pid, socket.gethostname())
        assert timedelta(seconds=-1) < store.now() - holder.since < timedelta(minutes=1)
        assert "\n" not in str(busy.value)
        with store.lock("other"):
            pass
        child.kill()
        child.wait()
        acquire_soon(store)


def acquire_soon(store: Store) -> None:
    """A killed process's file lock is free at once; PostgreSQL needs a moment to see that its client is gone."""
    deadline = time.monotonic() + (10 if store.backend == "postgresql" else 0)
    while True:
        try:
            with store.lock("demo"):
                return
        except StudyBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_lock_is_free_after_use_and_after_an_error(store: Store) -> None:
    for _ in range(2):
        with store.lock("demo"), pytest.raises(StudyBusy, match=f"process {os.getpid()} "):
            store.lock("demo").__enter__()
    with pytest.raises(ZeroDivisionError), store.lock("demo"):
        raise ZeroDivisionError
    acquire_soon(store)


def test_a_reader_takes_no_lock(store: Store, url: str, tmp_path: Path) -> None:
    with Store.open(url, read_only=True) as reader, pytest.raises(StorageError, match="reading only"):
        reader.lock("demo")
    assert list(tmp_path.glob("*.lock")) == []


def test_a_kill_loses_nothing_committed(store: Store, study: StudyInfo, add: Add, url: str) -> None:
    add()
    store.start_segment(study.id, 0, rung=0)
    with process(COMMIT_FOR_EVER, url) as child:
        while int(last := line(child)) < 40:
            pass
        child.kill()
        assert child.stdout is not None
        committed = int([last, *child.stdout.read().split()][-1])
    rows = store.measurements(study.id)
    steps = [row.step for row in rows if row.name == "loss"]
    assert steps in (list(range(committed + 1)), list(range(committed + 2))), "all that was reported, without gaps"
    assert [row.step for row in rows if row.name == "recall"] == steps, "no batch is torn"
    assert store.record(study.id, 0, 1, []), "and the next writer goes on"


def test_a_kill_within_a_transaction_undoes_it(store: Store, study: StudyInfo, add: Add, url: str) -> None:
    add()
    store.record(study.id, 0, store.start_segment(study.id, 0, rung=0), [Measurement(step=1, name="loss", value=2.0)])
    before = store.study("demo"), store.trials(study.id), store.measurements(study.id)
    with process(STOP_IN_TRANSACTION, url) as child:
        assert line(child) == "written"
        child.kill()
    assert (store.study("demo"), store.trials(study.id), store.measurements(study.id)) == before
    if store.backend == "sqlite":
        with store._read() as connection:
            assert connection.scalar(sqlalchemy.text("PRAGMA integrity_check")) == "ok"
    store.set_meta(study.id, "key", 1)
