"""Alembic migrations, run by nas.store.schema when a store is opened."""
