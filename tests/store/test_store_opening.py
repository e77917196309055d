"""Opening: files, folders, URLs, schema revisions, readers beside writers, Optuna in the same database."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import nas.store.migrations
from nas.messages import Measurement, TrialState
from nas.store import StorageError, Store, StudyInfo, TrialRow, schema
from nas.store.tables import metadata

Add = Callable[..., TrialRow]
DATA = Path(__file__).parent / "data"


def test_opening_twice_keeps_everything(url: str) -> None:
    with Store.open(url) as store:
        study = store.create_study("demo", {}, "digest", seed=0)
    with Store.open(url) as store:
        assert store.studies() == [study]
    with Store.open(url, read_only=True) as reader:
        assert reader.studies() == [study]


def test_several_processes_may_create_it_at_once(url: str) -> None:
    script = "import sys; from nas.store import Store; print(Store.open(sys.argv[1]).studies())"
    command = [sys.executable, "-c", script, url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == [b"[]\n"] * 2


def test_several_threads_may_open_and_write_at_once(url: str) -> None:
    barrier = threading.Barrier(4)

    def work(index: int) -> None:
        barrier.wait()
        with Store.open(url) as store:
            study = store.create_study(f"study-{index}", {}, "digest", seed=0)
            for step in range(5):
                store.set_meta(study.id, "step", step)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    with Store.open(url) as store:
        assert {study.revision for study in store.studies()} == {6}
        assert len(store.studies()) == 4


def test_tables_and_migrations_agree(store: Store) -> None:
    script = ScriptDirectory(str(Path(nas.store.migrations.__file__).parent))
    assert script.get_heads() == [schema.HEAD]
    with store._read() as connection:
        options = {"include_name": lambda name, kind, _: kind != "table" or name.startswith("nas_")}
        context = MigrationContext.configure(connection, opts={**options, "version_table": schema.VERSION_TABLE})
        assert compare_metadata(context, metadata) == []
        checks = {
            check["name"]
            for table in metadata.tables
            for check in sqlalchemy.inspect(connection).get_check_constraints(table)
        }
    declared = {
        constraint.name
        for table in metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, sqlalchemy.CheckConstraint)
    }
    assert checks == declared
    assert all(table.startswith("nas_") for table in metadata.tables)


@pytest.mark.parametrize("revision", [f"{int(schema.HEAD) + 1:04}", "0999"])
def test_a_newer_schema_is_refused(url: str, revision: str) -> None:
    with Store.open(url) as store, store._write() as connection:
        connection.execute(sqlalchemy.text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '{revision}'"))
    for read_only in (False, True):
        with pytest.raises(StorageError, match=f"revision {revision}, this version knows up to {schema.HEAD}: upgrade"):
            Store.open(url, read_only=read_only)


def test_a_reader_creates_nothing(url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no file|holds no study"):
        Store.open(url, read_only=True)
    assert list(tmp_path.iterdir()) == []
    engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    assert sqlalchemy.inspect(engine).get_table_names() == []
    engine.dispose()


def test_a_reader_writes_nothing(store: Store, study: StudyInfo, url: str) -> None:
    with Store.open(url, read_only=True) as reader:
        with pytest.raises(StorageError, match="open for reading only"):
            reader.set_meta(study.id, "key", 1)
        with pytest.raises(StorageError, match=r"(?i)read-?only"), reader._read() as connection:
            connection.execute(sqlalchemy.text("DELETE FROM nas_studies"))
    assert store.studies() == [study]


def test_readers_and_a_writer_do_not_wait_for_each_other(store: Store, study: StudyInfo, add: Add, url: str) -> None:
    add()
    attempt = store.start_segment(study.id, 0, rung=0)
    with Store.open(url, read_only=True) as reader:
        with store._change(study.id) as connection:  # a writer in the middle of its transaction
            connection.execute(sqlalchemy.text("UPDATE nas_trials SET seconds = 99"))
            assert reader.trial(study.id, 0).seconds == 0
        assert reader.trial(study.id, 0).seconds == 99
        with reader._read() as connection:  # a reader in the middle of its transaction
            connection.execute(sqlalchemy.text("SELECT * FROM nas_trials")).all()
            assert store.record(study.id, 0, attempt, [Measurement(step=1, name="loss", value=1.0)])
        assert len(reader.measurements(study.id)) == 1


def test_ten_thousand_trials_are_listed_within_a_second(store: Store, study: StudyInfo, add: Add) -> None:
    layers = [{"mixer": "gated_deltanet", "heads": 16, "head_dim": 128, "expand_v": 2.0, "conv_size": 4}] * 24
    add(candidate={"architecture": {"layers": layers}, "recipe": {"lr": 1e-3}})
    with store._write() as connection:
        columns = [column.name for column in metadata.tables["nas_trials"].c]
        copied = {"number": "n", "candidate_digest": "candidate_digest || n"}
        series = "WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 9999)"
        if store.backend == "postgresql":
            copied["candidate_digest"] = "candidate_digest || n::text"
        chosen = ", ".join(copied.get(column, column) for column in columns)
        insert = f"INSERT INTO nas_trials ({', '.join(columns)})"
        connection.execute(sqlalchemy.text(f"{insert} {series} SELECT {chosen} FROM nas_trials, s"))
    for _ in range(3):  # the machine may be busy
        begin = time.process_time()
        trials = store.trials(study.id)
        if (seconds := time.process_time() - begin) < 1:
            break
    assert seconds < 1
    assert [trial.number for trial in trials] == list(range(10_000))
    assert trials[-1].candidate["architecture"]["layers"] == layers
    store.set_states(study.id, range(0, 10_000, 10), TrialState.PRUNED)
    assert len(store.trials(study.id, [TrialState.PRUNED])) == 1000


@pytest.mark.parametrize("optuna_first", [True, False])
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optuna_lives_in_the_same_database(url: str, optuna_first: bool) -> None:
    def use_optuna() -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = optuna.storages.RDBStorage(url.replace("postgresql:", "postgresql+psycopg:"))
        study = optuna.create_study(storage=storage, study_name="theirs", load_if_exists=True)
        study.tell(study.ask(), 1.0)
        storage.engine.dispose()

    def use_nas() -> None:
        with Store.open(url) as store:
            name = f"ours-{len(store.studies())}"
            assert store.create_study(name, {}, "digest", seed=0) == store.study()

    first, second = (use_optuna, use_nas) if optuna_first else (use_nas, use_optuna)
    for use in (first, second, first, second):
        use()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nas.db", "'nas.db' is not a database URL; allowed: sqlite:///FILE"),
        ("mysql://user:secret@host/nas", r"'mysql://user:\*\*\*@host/nas': mysql is not supported"),
        ("postgresql+asyncpg://host/nas", r"postgresql\+asyncpg is not supported"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:////no/such/folder/nas.db", "there is no folder /no/such/folder"),
        ("sqlite:////usr", "/usr is not a writable file"),
        ("postgresql://user:secret@/nas?host=/no/such/socket", r"user:\*\*\*@/nas"),
    ],
)
def test_a_bad_address_is_one_clear_line(url: str, reason: str) -> None:
    with pytest.raises(StorageError, match=reason) as refused:
        Store.open(url)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nas.db"
    path.write_text("no database, but long enough to be looked at " * 10)
    for read_only in (False, True):
        with pytest.raises(StorageError, match="file is not a database"):
            Store.open(f"sqlite:///{path}", read_only=read_only)


@pytest.mark.parametrize("exists", [False, True])
def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    path = tmp_path / "nas.db"
    if exists:
        Store.open(f"sqlite:///{path}").close()
    before = sorted(tmp_path.iterdir())
    tmp_path.chmod(0o555)
    if os.geteuid() == 0:  # whom no mode keeps out: ask as an ordinary user would be answered
        monkeypatch.setattr(os, "access", lambda path, mode: bool(Path(path).stat().st_mode & 0o200))
    try:
        with pytest.raises(StorageError, match=f"the folder {tmp_path} is not writable"):
            Store.open(f"sqlite:///{path}")
        assert sorted(tmp_path.iterdir()) == before
    finally:
        tmp_path.chmod(0o755)


def test_sqlite_is_set_up_for_a_reader_beside_a_writer(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'a b?%20#.db'}") as store, store._read() as connection:
        pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        found = [connection.scalar(sqlalchemy.text(f"PRAGMA {pragma}")) for pragma in pragmas]
        assert found == ["wal", 1, 1, 30_000]
        with Store.open(store.url, read_only=True) as reader:
            assert reader.studies() == []


def test_a_database_of_revision_0001_opens(tmp_path: Path) -> None:
    path = tmp_path / "nas.db"
    path.write_bytes((DATA / "revision_0001.db").read_bytes())
    with Store.open(f"sqlite:///{path}") as store:
        study = store.study("old")
        space = {"backbones": ["gla"], "sizing": {"parameters": "free"}}
        assert (study.space, study.seed, store.get_meta(study.id, "note")) == (space, 7, "kept")
        states = [(trial.state, trial.rung, trial.recall) for trial in store.trials(study.id)]
        assert states == [
            (TrialState.COMPLETE, 0, 0.5),
            (TrialState.FAILED, -1, None),
            (TrialState.RUNNING, -1, None),
            (TrialState.WAITING, -1, None),
        ]
        assert [(row.step, row.name, row.value) for row in store.measurements(study.id, 0)] == [
            (50, "loss", 3.0),
            (100, "loss", 2.0),
            (100, "recall", 0.5),
        ]
        assert store.recover(study.id) == [2]


@pytest.mark.parametrize("file", sorted(path.name for path in DATA.glob("*.db")))
def test_every_old_database_opens_at_this_revision(tmp_path: Path, file: str) -> None:
    (tmp_path / "nas.db").write_bytes((DATA / file).read_bytes())
    with Store.open(f"sqlite:///{tmp_path}/nas.db") as store, store._read() as connection:
        assert schema.current(connection) == schema.HEAD
        assert all(store.trials(study.id) for study in store.studies() if study.name != "nope")


def test_a_database_in_a_read_only_folder_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only mount, where SQLite cannot make its -shm file; root ignores modes, so the check is stood in."""
    url = f"sqlite:///{tmp_path}/nas.db"
    with Store.open(url) as store:
        store.create_study("demo", {}, "digest", seed=0)
    monkeypatch.setattr(os, "access", lambda *_: False)
    before = {path.name for path in tmp_path.iterdir()}
    with Store.open(url, read_only=True) as reader:
        assert [study.name for study in reader.studies()] == ["demo"]
        assert {path.name for path in tmp_path.iterdir()} == before
