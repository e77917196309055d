"""Studies, their metadata and their lock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from nas.store.database import Database
from nas.store.errors import InvalidValue, StorageError, StudyExists, StudyNotFound
from nas.store.locking import AdvisoryLock, FileLock, StudyLock
from nas.store.rows import STUDY_COLUMNS, StudyInfo, study_info, to_json
from nas.store.tables import UtcNow, studies, study_meta

STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Studies(Database):
    """Part of Store."""

    def create_study(self, name: str, space: dict[str, Any], space_digest: str, seed: int) -> StudyInfo:
        """Raises StudyExists, or InvalidValue for a name that cannot be part of a file name or of `STUDY/N`."""
        if not STUDY_NAME.fullmatch(name):
            raise InvalidValue(f"study={name!r}: allowed are 1 to 64 letters, digits, '.', '_', '-', not first '.-_'")
        values = {"name": name, "space": to_json("space", space), "space_digest": space_digest, "seed": seed}
        with self._write() as connection:
            try:
                connection.execute(insert(studies).values(**values, revision=1, created_at=UtcNow()))
            except IntegrityError:
                raise StudyExists(name) from None
        return self.study(name)

    def studies(self) -> list[StudyInfo]:
        """All studies, the newest first."""
        with self._read() as connection:
            return [study_info(row) for row in connection.execute(select(*STUDY_COLUMNS).order_by(studies.c.id.desc()))]

    def study(self, name: str | None = None) -> StudyInfo:
        """The study of that name, by default the newest one. Raises StudyNotFound."""
        query = select(*STUDY_COLUMNS).order_by(studies.c.id.desc()).limit(1)
        with self._read() as connection:
            row = connection.execute(query if name is None else query.where(studies.c.name == name)).first()
            if row is None:
                raise StudyNotFound(name, _names(connection))
        return study_info(row)

    def lock(self, study_name: str) -> StudyLock:
        """The dispatcher's lock, for a `with`; the study need not exist yet.

        SQLite: an OS file lock beside the database. PostgreSQL: a session's advisory lock. Both are free as soon as
        the holding process has ended, by SIGKILL too.
        """
        if self.read_only:
            raise StorageError(f"storage {self._url!r} is open for reading only")
        if self.backend == "sqlite":
            return FileLock(self._url.database or "", study_name, self.now())
        return AdvisoryLock(self._engine, study_name, self.now())

    def get_meta(self, study_id: int, key: str) -> Any:
        """The JSON value under that key; None where there is none."""
        query = select(study_meta.c.value).where(study_meta.c.study_id == study_id, study_meta.c.key == key)
        with self._read() as connection:
            value = connection.scalar(query)
        return None if value is None else from_json(value)

    def set_meta(self, study_id: int, key: str, value: object) -> None:
        content = to_json(key, value)
        with self._change(study_id) as connection:  # which serialises the writers of a study
            connection.execute(delete(study_meta).where(study_meta.c.study_id == study_id, study_meta.c.key == key))
            connection.execute(insert(study_meta).values(study_id=study_id, key=key, value=content))

    @contextmanager
    def _change(self, study_id: int) -> Iterator[Connection]:
        """A transaction that writes to a study. Its first statement raises the revision and so locks out others."""
        with self._write() as connection:
            raised = update(studies).where(studies.c.id == study_id).values(revision=studies.c.revision + 1)
            if connection.execute(raised).rowcount == 0:
                raise StudyNotFound(study_id, _names(connection))
            yield connection


def _names(connection: Connection) -> list[str]:
    return list(connection.scalars(select(studies.c.name).order_by(studies.c.id.desc())))
