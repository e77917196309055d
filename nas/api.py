"""The Python API behind `from nas import ...`: launch a search, load a study, look at its trials.

Everything here reads the store and opens it for the moment of a call only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nas.settings import storage as default_storage

if TYPE_CHECKING:
    import pandas as pd

    from nas.architecture import Candidate
    from nas.store import MeasurementRow
    from search_spaces import SearchSpace


def launch(
    space: str | SearchSpace | None = None,
    *,
    study: str | None = None,
    storage: str | None = None,
    trials: int | None = None,
    workers: int | None = None,
    gpus: float | None = None,
    timeout: float | None = None,
    seed: int | None = None,
    ray_address: str | None = None,
    enqueue: str | None = None,
    checkpoints: str | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Study:
    """Runs a search to its end, or goes on with one; what `nas launch` does, without its terminal.

    Args:
        space: a preset's name, a YAML file or a SearchSpace.
        storage: SQLAlchemy URL; by default as the command line takes it (NAS_STORAGE, nas.toml, ./nas.db).
        timeout: seconds.
        log: called with one line for every event worth telling.
        others: as the options of `nas launch`.

    Raises:
        ValueError: refused (an unknown preset, a bad value, another space under this name); nothing was written.
        StoreError: the storage cannot be used, or another process runs the study.
        RuntimeError: trials keep failing.
    """
    from nas.service import Request
    from nas.service import launch as run

    request = Request(
        space=space,
        study=study,
        storage=default_storage(storage),
        trials=trials,
        workers=workers,
        gpus=gpus,
        timeout=timeout,
        seed=seed,
        ray_address=ray_address,
        enqueue=enqueue,
        checkpoints=checkpoints,
    )
    result = run(request, log=log)
    return Study(result.info.name, request.storage)


def load_study(name: str | None = None, storage: str | None = None) -> Study:
    """A study of the storage, the latest if `name` is None.

    Raises:
        StoreError: no such database or study.
    """
    from nas.store import Store

    url = default_storage(storage)
    with Store.open(url, read_only=True) as store:
        return Study(store.study(name).name, url)


@dataclass(frozen=True)
class Study:
    """One search, as it stands in the storage at each call."""

    name: str
    storage: str

    @cached_property
    def space(self) -> SearchSpace:
        """What is searched; it never changes."""
        from nas.store import Store
        from search_spaces import SearchSpace

        with Store.open(self.storage, read_only=True) as store:
            return SearchSpace.model_validate(store.study(self.name).space)

    def trials(self) -> list[Trial]:
        """All trials in the order of their numbers."""
        return self._trials(self._records())

    def front(self) -> list[Trial]:
        """The Front from the smallest cache to the largest; recall and loss are means over seeds."""
        from nas.search.front import front

        return self._trials(front(self._records(), self.space.objectives))

    def best(self, at_memory: float = 1.0) -> Trial | None:
        """The design of highest recall on the Front that keeps at most this share of full attention's cache."""
        within = [trial for trial in self.front() if trial.kv_cache_ratio <= at_memory]
        return max(within, key=lambda trial: trial.recall, default=None)

    def frame(self) -> pd.DataFrame:
        """One row a trial, one column a key of its record, indexed by trial number.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("Study.frame() needs pandas: pip install 'hybrid-nas[dashboard]'") from error
        records = self._records()
        return pd.DataFrame(records).set_index("trial") if records else pd.DataFrame()

    def _records(self) -> list[dict[str, Any]]:
        from nas.search.records import load
        from nas.store import Store

        with Store.open(self.storage, read_only=True) as store:
            return load(store, self.name)

    def _trials(self, records: Iterable[Mapping[str, Any]]) -> list[Trial]:
        return [Trial(record, self.storage) for record in records]


@dataclass(frozen=True)
class Trial:
    """One trial; every key of its record is an attribute: `trial.recall`, `trial.kv_cache_bytes`, `trial.state`.

    `record` is what `nas trials --json` prints; absent values are None.
    """

    record: Mapping[str, Any]
    storage: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.record:  # the first also while unpickling, without a record yet
            raise AttributeError(f"a trial has no {name!r}")
        return self.record[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.record})

    def __repr__(self) -> str:
        known = self.record
        return f"<Trial {known['study']}/{known['trial']} {known['name']}, {known['state']}, recall {known['recall']}>"

    @cached_property
    def candidate(self) -> Candidate:
        """What was tried: Architecture, Recipe and seed."""
        from nas.architecture import Candidate
        from nas.store import Store

        with Store.open(self.storage, read_only=True) as store:
            row = store.trial(store.study(self.record["study"]).id, self.record["trial"])
        return Candidate.model_validate(row.candidate)

    def measurements(self) -> list[MeasurementRow]:
        """Every Measurement by step: loss, recall by task and size, tokens per second, ..."""
        from nas.store import Store

        with Store.open(self.storage, read_only=True) as store:
            return store.measurements(store.study(self.record["study"]).id, self.record["trial"])
