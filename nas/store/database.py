"""Opening SQLite or PostgreSQL, and the transactions that everything else is made of."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, select
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from nas.store import schema
from nas.store.errors import StorageError
from nas.store.tables import UtcNow

_DRIVERS = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}
_BUSY_SECONDS = 30
"""How long a SQLite transaction waits for another writer before it fails."""


class Database:
    """An open database: `_read()` and `_write()` are its transactions. Safe to share between threads."""

    def __init__(self, url: URL, engine: Engine, *, read_only: bool) -> None:
        self._url = url
        self._engine = engine
        # SQLite: a transaction that reads first and writes later fails at once when another one has written between
        self._writer = engine.execution_options(nas_begin="BEGIN IMMEDIATE")
        self.read_only = read_only

    @classmethod
    def open(cls, url: str, *, read_only: bool = False) -> Self:
        """Opens `sqlite:///FILE` or `postgresql://USER@HOST/NAME`; creates or migrates the tables.

        With read_only it never creates, migrates or writes anything. Raises StorageError: a URL that is neither, a
        file or folder that is missing or not writable, a server that does not answer, a schema newer than this code.
        """
        address = parse_url(url)
        if address.get_backend_name() == "sqlite":
            check_file(address, read_only)
        with one_line(address):
            database = cls(address, _engine(address, read_only), read_only=read_only)
            try:
                if read_only:
                    schema.check(database._engine, repr(address))
                else:
                    schema.migrate(database._writer, repr(address))
            except BaseException:  # nothing is handled: whatever ends the opening, no connection stays open
                database.close()
                raise
        return database

    @property
    def url(self) -> str:
        """As given to `open`, password included; `repr(store)` hides it."""
        return self._url.render_as_string(hide_password=False)

    @property
    def backend(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._url.get_backend_name()

    def now(self) -> datetime:
        """The database's clock, UTC."""
        with self._read() as connection:
            return cast(datetime, connection.scalar(select(UtcNow())))

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({repr(self._url)!r}, read_only={self.read_only})"

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        """One consistent snapshot on SQLite, one statement each on PostgreSQL; keep it short."""
        with one_line(self._url), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """One transaction: committed at the end, rolled back by any exception."""
        if self.read_only:
            raise StorageError(f"storage {self._url!r} is open for reading only")
        with one_line(self._url), self._writer.begin() as connection:
            yield connection


@contextmanager
def one_line(url: URL) -> Iterator[None]:
    """Turns the driver's errors into StorageError."""
    try:
        yield
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        raise StorageError(f"storage {url!r}: {reason}") from error


def parse_url(url: str) -> URL:
    """The URL of a database that we support.

    Raises:
        StorageError: it is none.
    """
    shown = re.sub(r":[^:/@]+@", ":***@", url)
    allowed = "sqlite:///FILE or postgresql://USER@HOST/NAME"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StorageError(f"storage {shown!r} is not a database URL; allowed: {allowed}") from None
    driver = _DRIVERS.get(parsed.get_backend_name())
    if driver is None or parsed.drivername not in (driver, driver.partition("+")[0]):
        raise StorageError(f"storage {shown!r}: {parsed.drivername} is not supported; allowed: {allowed}")
    if driver == _DRIVERS["sqlite"] and (parsed.host or parsed.query or parsed.database in (None, "", ":memory:")):
        raise StorageError(f"storage {shown!r} names no file; allowed: sqlite:///FILE (four slashes: absolute path)")
    return parsed


def check_file(url: URL, read_only: bool) -> None:
    """Says plainly what SQLite would call `unable to open database file` or notice only at the first write."""
    path = Path(url.database or "")
    if read_only:
        if not path.is_file():
            raise StorageError(f"storage {url!r}: there is no file {path}")
        return
    if not path.parent.is_dir():
        raise StorageError(f"storage {url!r}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise StorageError(f"storage {url!r}: the folder {path.parent} is not writable")
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise StorageError(f"storage {url!r}: {path} is not a writable file")


def _engine(url: URL, read_only: bool) -> Engine:
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, read_only)
    try:
        return create_engine(
            url.set(drivername=_DRIVERS["postgresql"]),
            connect_args={"connect_timeout": 10},
            pool_pre_ping=True,  # a study outlives a restart of the server
            execution_options={"postgresql_readonly": read_only},
        )
    except ImportError:
        raise StorageError(f"storage {url!r} needs psycopg: pip install 'hybrid-nas[postgres]'") from None


def _sqlite(url: URL, read_only: bool) -> Engine:
    if read_only:  # a reader that could write may lock out the study (optuna-dashboard#545)
        query = {"mode": "ro", "uri": "true"}
        if not os.access(Path(url.database or "").parent, os.W_OK):
            query["immutable"] = "1"  # SQLite makes -wal and -shm beside the file even to read; here it cannot
        address = url.set(database=f"file:{quote(url.database or '')}", query=query)
    else:
        address = url
    engine = create_engine(address, connect_args={"timeout": _BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def set_up(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # sqlite3 must not begin transactions by itself: ours cover DDL too
        connection.execute("PRAGMA foreign_keys = ON")
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options: dict[str, Any] = dict(connection.get_execution_options())
        connection.exec_driver_sql(options.get("nas_begin", "BEGIN"))

    return engine
