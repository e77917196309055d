"""The schema's revision: created, brought up to date or refused when a store is opened."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, column, inspect, select, table, text

from nas.store.errors import StorageError

HEAD = "0002"
"""The newest revision in migrations/versions."""

VERSION_TABLE = "nas_alembic_version"
"""Not alembic's default name: Optuna and MLflow use that one in the same database (mlflow#2923)."""

_MIGRATION_LOCK = 0x6E61735F6D696772  # "nas_migr"; any fixed number does


def check(engine: Engine, name: str) -> None:
    """Refuses, for a reader, whatever is not at HEAD. Writes nothing."""
    with engine.connect() as connection:
        revision = current(connection)
    if revision is None:
        raise StorageError(f"storage {name} holds no study yet")
    if revision != HEAD:
        refuse_unknown(revision, name)
        raise StorageError(f"storage {name} has schema revision {revision}, not {HEAD}: run `nas launch` to migrate it")


def migrate(writer: Engine, name: str) -> None:
    """Creates the tables or migrates them to HEAD, in one transaction; safe when several processes open at once."""
    with writer.begin() as connection:
        if connection.dialect.name == "postgresql":  # on SQLite the writer's BEGIN IMMEDIATE does the same
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        revision = current(connection)
        if revision == HEAD:
            return
        if revision is not None:
            refuse_unknown(revision, name)
        _upgrade(connection)


def current(connection: Connection) -> str | None:
    """The revision that the database is at; None before the first migration."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.scalar(select(column("version_num")).select_from(table(VERSION_TABLE)))


def refuse_unknown(revision: str, name: str) -> None:
    if revision > HEAD:  # revisions are zero-padded numbers
        raise StorageError(
            f"storage {name} has schema revision {revision}, this version knows up to {HEAD}: upgrade hybrid-nas"
        )


def _upgrade(connection: Connection) -> None:
    from alembic import command  # .1 s that a store at HEAD need not pay
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    command.upgrade(config, "head")
