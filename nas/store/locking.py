"""One dispatcher per study (design.md 2): a lock that the system frees when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from sqlalchemy import Connection, Engine, text

from nas.store.database import one_line
from nas.store.errors import Holder, StorageError, StudyBusy


class StudyLock(Protocol):
    """Held from `with` to its end, or to the end of the process; entering raises StudyBusy when another holds it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FileLock:
    """flock on `<database>.<study>.lock`. The file stays: removing it would let two processes lock two files."""

    def __init__(self, database: str, study: str, since: datetime) -> None:
        self._path = Path(f"{database}.{study}.lock")
        self._study = study
        self._me = _me(since)
        self._descriptor = -1

    def __enter__(self) -> Self:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"lock {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held_by = _read_holder(descriptor)
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise StudyBusy(self._study, held_by) from None
            raise StorageError(f"lock {self._path}: {error.strerror}") from error
        os.ftruncate(descriptor, 0)
        holder = {"pid": self._me.pid, "host": self._me.host, "since": self._me.since.isoformat()}
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


class AdvisoryLock:
    """PostgreSQL's session lock, on a connection of its own whose application_name says who holds it."""

    def __init__(self, engine: Engine, study: str, since: datetime) -> None:
        self._engine = engine
        self._study = study
        self._me = _me(since)
        self._key = int.from_bytes(hashlib.sha256(f"nas study {study}".encode()).digest()[:8], "big", signed=True)
        self._session = ExitStack()

    def __enter__(self) -> Self:
        with one_line(self._engine.url), ExitStack() as stack:
            connection = stack.enter_context(self._engine.connect())
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.detach()  # closing it ends the session, and so the lock
            name = f"nas {self._me.since:%Y-%m-%dT%H:%M:%S} {self._me.pid} {self._me.host}"
            connection.execute(text("SELECT set_config('application_name', :name, false)"), {"name": name[:63]})
            if not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": self._key}):
                raise StudyBusy(self._study, self._holder(connection))
            self._session = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()

    def _holder(self, connection: Connection) -> Holder | None:
        """None when the lock has just been freed, or belongs to another database user."""
        name = connection.scalar(
            text(
                "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
                " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND a.datname = current_database()"
                " AND l.database = a.datid AND (l.classid::bigint << 32 | l.objid::bigint) = :key"
            ),
            {"key": self._key},
        )
        if not name or not name.startswith("nas "):
            return None
        _, since, pid, host = name.split(" ", 3)
        return Holder(pid=int(pid), host=host, since=datetime.fromisoformat(since).replace(tzinfo=UTC))


def _me(since: datetime) -> Holder:
    return Holder(pid=os.getpid(), host=socket.gethostname(), since=since)


def _read_holder(descriptor: int) -> Holder | None:
    content = os.pread(descriptor, 4096, 0)
    if not content:  # locked, not yet written
        return None
    holder = json.loads(content)
    return Holder(pid=holder["pid"], host=holder["host"], since=datetime.fromisoformat(holder["since"]))
