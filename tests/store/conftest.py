"""One store of each kind: SQLite always, PostgreSQL on a real server of its own where its binaries are."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nas.messages import Finished, Measurement, TrialState
from nas.store import Store, StudyInfo, TrialRow


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Path]:
    """The socket folder of a PostgreSQL cluster that lives as long as the session."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = found[-1] if found else shutil.which("initdb")
    if initdb is None:
        pytest.skip("PostgreSQL's initdb is not installed (apt-get install postgresql)")
    binaries = Path(initdb).parent
    # Not under pytest's tmp_path: a socket's path has at most 107 characters, and postgres refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="nas-pg-", dir="/tmp"))
    account: dict[str, Any] = {}
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
        account = {"user": "postgres", "group": "postgres", "extra_groups": []}

    def call(program: str, *arguments: str) -> None:
        command = [str(binaries / program), "-D", str(folder / "data"), *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, **account)

    options = f"-k {folder} -c listen_addresses='' -c fsync=off -c shared_buffers=16MB"
    try:
        call("initdb", "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
        call("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        yield folder
        call("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new, empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'nas.db'}"
    psycopg = pytest.importorskip("psycopg")
    folder = request.getfixturevalue("postgres_server")
    with psycopg.connect(f"host={folder} user=postgres dbname=postgres", autocommit=True) as connection:
        connection.execute(  # what a test before this one may have left open would block the next line
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return f"postgresql://postgres@/postgres?host={folder}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@pytest.fixture
def study(store: Store) -> StudyInfo:
    return store.create_study("demo", {"backbones": ["gla"]}, "space-1", seed=7)


@pytest.fixture
def add(store: Store, study: StudyInfo) -> Callable[..., TrialRow]:
    """Adds a trial whose candidate differs from all others; keywords replace its fields."""

    def add_trial(**changed: Any) -> TrialRow:
        digest = f"candidate-{len(store.trials(study.id))}"
        fields: dict[str, Any] = {
            "candidate": {"name": digest},
            "candidate_digest": digest,
            "architecture_digest": "architecture-0",
            "params": {"lr": 1e-3},
            "sampler_state": {"generation": 0},
            "facts": {"kv_cache_bytes": 1024},
            "prior": "sampled",
        }
        return store.add_trial(study.id, **(fields | changed))

    return add_trial


@pytest.fixture
def finish(store: Store, study: StudyInfo) -> Callable[..., bool]:
    """Ends a running segment at a rung with the scores given by name."""

    def finish_segment(
        number: int, attempt: int, rung: int, state: TrialState = TrialState.PAUSED, **scores: float
    ) -> bool:
        step = 100 * (rung + 1)
        finished = Finished(
            trial=number,
            attempt=attempt,
            step=step,
            checkpoint=f"step-{step}",
            seconds=1.5,
            measurements=tuple(Measurement(step=step, name=name, value=value) for name, value in scores.items()),
        )
        return store.finish_segment(study.id, finished, state=state, rung=rung)

    return finish_segment
