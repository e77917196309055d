"""The tables, all prefixed `nas_` so that Optuna or MLflow can live in the same database (mlflow#2923).

Times are UTC of the database's clock. No NaN and no infinity can be stored: SQLite turns NaN into NULL, PostgreSQL
orders it above every number, so numbers that must be there are NOT NULL and every number has a range check.
A change here needs a new file in migrations/versions; a test compares the two.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class UtcDateTime(TypeDecorator[datetime]):
    """Comes back as a timezone-aware UTC datetime from both databases. Written by `UtcNow()` only."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_result_value(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class UtcNow(FunctionElement[datetime]):
    """The database's clock, in milliseconds on SQLite and microseconds on PostgreSQL."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(UtcNow, "sqlite")
def _sqlite_now(_element: UtcNow, _compiler: SQLCompiler, **_: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f', 'now')"


@compiles(UtcNow, "postgresql")
def _postgresql_now(_element: UtcNow, _compiler: SQLCompiler, **_: Any) -> str:
    return "clock_timestamp()"  # now() is the transaction's start, which may have waited for a lock


def _finite(table: str, column: str) -> CheckConstraint:
    return CheckConstraint(f"{column} BETWEEN -1e308 AND 1e308", name=f"ck_{table}_finite_{column}")


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
    }
)

studies = Table(
    "nas_studies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("space", Text, nullable=False),
    Column("space_digest", String(64), nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

study_meta = Table(
    "nas_study_meta",
    metadata,
    Column("study_id", ForeignKey("nas_studies.id", ondelete="CASCADE"), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

trials = Table(
    "nas_trials",
    metadata,
    Column("study_id", ForeignKey("nas_studies.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("state", String(16), nullable=False),
    Column("failure", String(16)),
    Column("message", Text),
    Column("traceback", Text),
    Column("candidate", Text, nullable=False),
    Column("candidate_digest", String(64), nullable=False),
    Column("architecture_digest", String(64), nullable=False),
    Column("params", Text, nullable=False),
    Column("sampler_state", Text, nullable=False),
    Column("facts", Text, nullable=False),
    Column("prior", String(16), nullable=False),
    Column("rung", Integer, nullable=False),
    Column("target_rung", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("checkpoint", Text),
    Column("recall", Double),
    Column("recall_nll", Double),
    Column("loss", Double),
    Column("seconds", Double, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    UniqueConstraint("study_id", "candidate_digest", name="uq_nas_trials_candidate_digest"),
    Index("ix_nas_trials_state", "study_id", "state"),
    *(_finite("nas_trials", column) for column in ("recall", "recall_nll", "loss", "seconds")),
)

measurements = Table(
    "nas_measurements",
    metadata,
    Column("study_id", Integer, primary_key=True, autoincrement=False),
    Column("trial", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("name", String(128), primary_key=True),
    Column("value", Double, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    ForeignKeyConstraint(["study_id", "trial"], ["nas_trials.study_id", "nas_trials.number"], ondelete="CASCADE"),
    _finite("nas_measurements", "value"),
    sqlite_with_rowid=False,
)
