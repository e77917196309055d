"""What the store refuses, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


class StoreError(Exception):
    """Base of every error that the store raises on purpose; its text is one line for the user."""


class StorageError(StoreError):
    """The database cannot be opened, read or written."""


class InvalidValue(StoreError):
    """A value that may not enter the database: NaN, infinity, what JSON cannot hold, a name or state not allowed."""


class StudyExists(StoreError):
    def __init__(self, name: str) -> None:
        super().__init__(f"study {name!r} exists already")


class StudyNotFound(StoreError):
    def __init__(self, wanted: str | int | None, known: Sequence[str]) -> None:
        what = "the storage holds no study yet" if wanted is None else f"study {wanted!r} does not exist"
        super().__init__(what + (f"; known: {', '.join(known)}" if known else ""))


class TrialNotFound(StoreError):
    def __init__(self, study: str, number: int, count: int) -> None:
        known = f"it has trials 0 to {count - 1}" if count else "it has no trials yet"
        super().__init__(f"trial {number} does not exist in study {study!r}; {known}")


class DuplicateCandidate(StoreError):
    """The study has tried this candidate already, as trial `number`."""

    def __init__(self, digest: str, number: int) -> None:
        super().__init__(f"candidate {digest} was tried already, as trial {number}")
        self.number = number


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a study's lock; `since` is UTC of the database."""

    pid: int
    host: str
    since: datetime


class StudyBusy(StoreError):
    """Another dispatcher runs the study. `holder` is None in the instant before it has written its name."""

    def __init__(self, study: str, holder: Holder | None) -> None:
        who = "another process"
        if holder is not None:
            who = f"process {holder.pid} on {holder.host} since {holder.since:%Y-%m-%d %H:%M:%S} UTC"
        super().__init__(f"study {study!r} is being run by {who}")
        self.holder = holder
