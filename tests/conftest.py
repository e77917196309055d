"""What every test stands on: no network, no reports to anyone, one thread a process, none of the user's settings."""

import os
import sys
from collections.abc import Iterator

import pytest

# Set before torch, ray and datasets are imported, which read them once; worker processes inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
)
for _name in [name for name in os.environ if name.startswith("NAS_")]:
    del os.environ[_name]


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenised text is cached for the session and never in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Training flushes denormals to zero for its whole process: no test after it may see that."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)
