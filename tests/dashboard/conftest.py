"""A filled study, made once and only read."""

from pathlib import Path

import demo_store
import pytest


@pytest.fixture(scope="session")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('dashboard') / 'demo.db'}"
    demo_store.fill(url)
    return url


@pytest.fixture
def fresh_url(tmp_path: Path) -> str:
    """The URL of a database that does not exist yet."""
    return f"sqlite:///{tmp_path / 'nas.db'}"
