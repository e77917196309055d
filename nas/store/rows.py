"""What the store hands out, and the way between rows and objects."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Row

from nas.messages import Failure, Measurement, TrialState
from nas.store.errors import InvalidValue
from nas.store.tables import measurements, studies, trials


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyInfo:
    """One study. `revision` grows with every write to the study or its trials: cache by it."""

    id: int
    name: str
    space: dict[str, Any]
    space_digest: str
    seed: int
    revision: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial as it stands; `number` counts from 0 in its study.

    `candidate` is the canonical JSON of a Candidate, `params` what the sampler chose, `sampler_state` Optuna's system
    attributes (NSGA-II's generation and parents), `facts` what is known before training (kv_cache_bytes, ...),
    `prior` where the design came from: baseline, enqueued, sampled, grid or repeat.
    """

    study_id: int
    number: int
    state: TrialState
    failure: Failure | None
    """Why the last segment ended early; None once another one starts. `message` is one line."""
    message: str | None
    traceback: str | None
    candidate: dict[str, Any]
    candidate_digest: str
    architecture_digest: str
    params: dict[str, Any]
    sampler_state: dict[str, Any]
    facts: dict[str, Any]
    prior: str
    rung: int
    """The highest rung finished; -1 before the first."""
    target_rung: int
    """The rung of the current or last segment; above `rung`, a waiting trial is to be continued to it."""
    step: int
    """The training step of `checkpoint`; of a failed trial, where it ended."""
    attempt: int
    """How many segments were started; messages of an earlier one are dropped."""
    checkpoint: str | None
    recall: float | None
    """Scores of the highest rung finished, as `recall_nll` and `loss` (nats); None where not measured."""
    recall_nll: float | None
    loss: float | None
    seconds: float
    """Worker time of all segments."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRow:
    """One number about trial `trial` at a training step; names as in nas.messages.Measurement."""

    trial: int
    step: int
    name: str
    value: float
    at: datetime


STUDY_COLUMNS = [studies.c[field.name] for field in fields(StudyInfo)]
TRIAL_COLUMNS = [trials.c[field.name] for field in fields(TrialRow)]
MEASUREMENT_COLUMNS = [measurements.c[field.name] for field in fields(MeasurementRow)]


def study_info(row: Row[Any]) -> StudyInfo:
    values = row._asdict()
    values["space"] = from_json(values["space"])
    return StudyInfo(**values)


def trial_row(row: Row[Any]) -> TrialRow:
    values = row._asdict()
    values["state"] = TrialState(values["state"])
    values["failure"] = Failure(values["failure"]) if values["failure"] else None
    for name in ("candidate", "params", "sampler_state", "facts"):
        values[name] = from_json(values[name])  # twice as fast as json.loads, which counts at 10,000 trials
    return TrialRow(**values)


def measurement_row(row: Row[Any]) -> MeasurementRow:
    return MeasurementRow(**row._asdict())


def to_json(field: str, value: object) -> str:
    """Compact JSON in the given key order (a space's order decides the sampler's choices); no NaN, no infinity."""
    try:
        document = json.dumps(value, allow_nan=False, separators=(",", ":"))
        from_json(document)  # which refuses lone surrogates: nothing is written that cannot be read
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{field}: {error}; only finite JSON values can be stored") from None
    return document


def finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidValue(f"{field}={value} is not a finite number")
    return value


def plain(text: str) -> str:
    """Text that both databases take: PostgreSQL refuses NUL, neither takes lone surrogates."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def measurement_values(study_id: int, trial: int, batch: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Rows to upsert, one per (step, name): the last of a batch wins."""
    latest = {(item.step, item.name): finite(item.name, item.value) for item in batch}
    return [
        {"study_id": study_id, "trial": trial, "step": step, "name": name, "value": value}
        for (step, name), value in latest.items()
    ]
