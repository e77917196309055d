"""Studies of older revisions, written by the code of their time, go on as they were: on SQLite and PostgreSQL."""

from __future__ import annotations

import importlib.util
import sqlite3
from pathlib import Path
from types import ModuleType

import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config

import nas.store.migrations
from nas.search.simulator import SimulatedPool
from nas.service import LaunchError, Request, Result, launch
from nas.store import StorageError, Store, schema
from search_spaces import SearchSpace
from search_spaces.designs import Fixed, candidate
from search_spaces.loading import parse_space

DATA = Path(__file__).parent / "data"
TABLES = ("nas_studies", "nas_study_meta", "nas_trials", "nas_measurements")


def builder() -> ModuleType:
    """tests/store/data/build_study.py, which holds the space of the old studies."""
    spec = importlib.util.spec_from_file_location("build_study", DATA / "build_study.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SPACE: str = builder().SPACE


@pytest.fixture
def old(url: str) -> str:
    """The URL of a database at revision 0001 with the two studies of revision_0001_study.db."""
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).write_bytes((DATA / "revision_0001_study.db").read_bytes())
        return url
    engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection, sqlite3.connect(DATA / "revision_0001_study.db") as source:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(Path(nas.store.migrations.__file__).parent))
        command.upgrade(config, "0001")
        for table in TABLES:
            rows = source.execute(f"SELECT * FROM {table}")
            names = [description[0] for description in rows.description]
            values = ", ".join(f":{name}" for name in names)
            insert = sqlalchemy.text(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({values})")
            connection.execute(insert, [dict(zip(names, row, strict=True)) for row in rows])
        connection.execute(sqlalchemy.text("SELECT setval(pg_get_serial_sequence('nas_studies', 'id'), 100)"))
    source.close()
    engine.dispose()
    return url


def resume(storage: str, space: SearchSpace, trials: int) -> Result:
    return launch(
        Request(space=space, study="small", storage=storage, trials=trials), pool=lambda plan: SimulatedPool(2)
    )


def test_an_old_study_keeps_the_sizes_it_was_searched_with(old: str) -> None:
    with Store.open(old) as store:
        info = store.study("small")
        space = SearchSpace.model_validate(info.space)
        rows = store.trials(info.id)
    assert space.sizing.parameters == "free"
    assert info.space_digest == space.digest
    assert len(rows) == 10
    assert sum(row.prior == "sampled" for row in rows) == 7
    for row in rows:
        assert row.candidate["architecture"]["intermediate_size"] == 128
        if row.params:
            assert candidate(space, Fixed(row.params)).digest == row.candidate_digest


def test_an_old_study_goes_on(old: str) -> None:
    free = parse_space(SPACE + "sizing: {parameters: free}\n", "small")
    records = resume(old, free, trials=14).records
    assert len(records) == 14
    assert len({record["candidate_digest"] for record in records}) == 14
    assert {record["state"] for record in records} <= {"complete", "pruned"}


def test_its_file_without_the_new_field_is_another_space(old: str) -> None:
    with pytest.raises(LaunchError, match=r"another space \(sizing\.parameters: free -> matched\)"):
        resume(old, parse_space(SPACE, "small"), trials=14)


def test_no_positions_are_found_again(old: str) -> None:
    nope = parse_space(SPACE.replace("layers: 4", "layers: 4, rope_theta: null") + "sizing: {parameters: free}\n", "x")
    with Store.open(old) as store:
        info = store.study("nope")
    assert SearchSpace.model_validate(info.space) == nope
    assert info.space_digest == nope.digest


def test_opening_again_changes_nothing(old: str) -> None:
    with Store.open(old) as store:
        first = store.studies()
    with Store.open(old) as store:
        assert store.studies() == first


def test_a_reader_asks_for_the_migration(old: str) -> None:
    with pytest.raises(StorageError, match=f"has schema revision 0001, not {schema.HEAD}: run `nas launch`"):
        Store.open(old, read_only=True)
