"""Alembic's environment: runs on the connection, and in the transaction, that nas.store.schema hands over."""

from __future__ import annotations

from alembic import context

from nas.store.schema import VERSION_TABLE
from nas.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
context.run_migrations()
