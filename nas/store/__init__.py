"""The SQL store: the only truth about studies, trials and measurements (design.md 1 and 2)."""

from nas.store.errors import (
    DuplicateCandidate,
    Holder,
    InvalidValue,
    StorageError,
    StoreError,
    StudyBusy,
    StudyExists,
    StudyNotFound,
    TrialNotFound,
)
from nas.store.locking import StudyLock
from nas.store.rows import MeasurementRow, StudyInfo, TrialRow
from nas.store.store import Store

__all__ = [
    "DuplicateCandidate",
    "Holder",
    "InvalidValue",
    "MeasurementRow",
    "StorageError",
    "Store",
    "StoreError",
    "StudyBusy",
    "StudyExists",
    "StudyInfo",
    "StudyLock",
    "StudyNotFound",
    "TrialNotFound",
    "TrialRow",
]
