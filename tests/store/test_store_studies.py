"""Every store passes these: studies, metadata, and what a trial holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy

from nas.messages import TrialState
from nas.store import (
    DuplicateCandidate,
    InvalidValue,
    StorageError,
    Store,
    StudyExists,
    StudyInfo,
    StudyNotFound,
    TrialNotFound,
    TrialRow,
)

Add = Callable[..., TrialRow]


def test_a_study_comes_back_as_it_was_created(store: Store) -> None:
    space = {"b": [1, 2], "a": {"lr": [1e-4, 1e-2]}, "name": "größe"}
    created = store.create_study("demo", space, "digest", seed=2**62)
    assert created == store.study("demo")
    assert (created.name, created.space, created.space_digest, created.seed) == ("demo", space, "digest", 2**62)
    assert list(created.space) == ["b", "a", "name"], "the order of a space's keys decides the sampler's choices"


def test_the_latest_study_is_the_default_and_comes_first(store: Store) -> None:
    for name in ("one", "two", "three"):
        store.create_study(name, {}, "digest", seed=0)
    assert store.study().name == "three"
    assert [study.name for study in store.studies()] == ["three", "two", "one"]


def test_a_name_is_taken_once(store: Store, study: StudyInfo) -> None:
    with pytest.raises(StudyExists, match="study 'demo' exists already"):
        store.create_study("demo", {}, "other", seed=1)
    assert store.studies() == [study]


def test_a_name_must_fit_a_file_and_a_trial_id(store: Store) -> None:
    for name in ("", "a/b", ".hidden", "a b", "x" * 65, "line\n"):
        with pytest.raises(InvalidValue, match="study="):
            store.create_study(name, {}, "digest", seed=0)


def test_an_unknown_study_names_the_known_ones(store: Store) -> None:
    with pytest.raises(StudyNotFound, match="the storage holds no study yet"):
        store.study()
    for name in ("one", "two"):
        store.create_study(name, {}, "digest", seed=0)
    with pytest.raises(StudyNotFound, match="study 'three' does not exist; known: two, one"):
        store.study("three")
    with pytest.raises(StudyNotFound, match="known: two, one"):
        store.set_meta(99, "key", 1)


def test_metadata_is_json_by_key(store: Store, study: StudyInfo) -> None:
    other = store.create_study("other", {}, "digest", seed=0)
    assert store.get_meta(study.id, "front") is None
    store.set_meta(study.id, "front", {"reference": [1.5, None], "ok": True})
    store.set_meta(study.id, "front", {"reference": [2.5, None], "ok": True})
    assert store.get_meta(study.id, "front") == {"reference": [2.5, None], "ok": True}
    assert store.get_meta(other.id, "front") is None


def test_times_are_aware_utc_of_the_database(store: Store, add: Add) -> None:
    before = store.now()
    trial = add()
    after = store.now()
    assert before <= trial.created_at <= after
    assert trial.created_at.utcoffset() == timedelta(0)
    assert trial.created_at.tzinfo is UTC
    assert abs(trial.created_at - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_new_trial_waits_and_holds_what_it_was_given(store: Store, study: StudyInfo, add: Add) -> None:
    trial = add(prior="baseline", params={"lr": 0.1 + 0.2, "heads": 4}, facts={"kv_cache_bytes": 2**40})
    assert trial == store.trial(study.id, 0)
    assert (trial.number, trial.state, trial.prior) == (0, TrialState.WAITING, "baseline")
    assert trial.params == {"lr": 0.1 + 0.2, "heads": 4}
    assert trial.facts == {"kv_cache_bytes": 2**40}
    assert trial.sampler_state == {"generation": 0}
    assert (trial.rung, trial.target_rung, trial.step, trial.attempt, trial.seconds) == (-1, -1, 0, 0, 0.0)
    assert (trial.started_at, trial.finished_at, trial.recall, trial.failure) == (None, None, None, None)


def test_numbers_count_from_zero_in_each_study(store: Store, study: StudyInfo, add: Add) -> None:
    assert [add().number for _ in range(3)] == [0, 1, 2]
    other = store.create_study("other", {}, "digest", seed=0)
    documents: dict[str, Any] = {"candidate": {}, "params": {}, "sampler_state": {}, "facts": {}}
    first = store.add_trial(
        other.id, candidate_digest="candidate-0", architecture_digest="a", prior="grid", **documents
    )
    assert first.number == 0, "another study counts by itself and may hold the same candidate"
    assert [trial.number for trial in store.trials(study.id)] == [0, 1, 2]


def test_a_candidate_is_tried_once(store: Store, study: StudyInfo, add: Add) -> None:
    add(), add(candidate_digest="twin")
    with pytest.raises(DuplicateCandidate, match="candidate twin was tried already, as trial 1") as refused:
        add(candidate_digest="twin")
    assert refused.value.number == 1
    assert len(store.trials(study.id)) == 2


def test_the_database_itself_refuses_a_second_candidate(store: Store, study: StudyInfo, add: Add) -> None:
    add(), add()
    with pytest.raises(StorageError, match=r"(?i)unique"), store._write() as connection:
        connection.execute(sqlalchemy.text("UPDATE nas_trials SET candidate_digest = 'same'"))


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, "\ud800"], ids=ascii)
def test_what_json_cannot_hold_is_refused(store: Store, study: StudyInfo, add: Add, value: object) -> None:
    for field in ("candidate", "params", "sampler_state", "facts"):
        with pytest.raises(InvalidValue, match=rf"^{field}: .*only finite JSON values"):
            add(**{field: {"deep": [value]}})
    assert store.trials(study.id) == []
    with pytest.raises(InvalidValue, match="key: "):
        store.set_meta(study.id, "key", value)
    with pytest.raises(InvalidValue, match="space: "):
        store.create_study("other", {"deep": [value]}, "digest", seed=0)


def test_trials_are_filtered_by_state(store: Store, study: StudyInfo, add: Add) -> None:
    for _ in range(4):
        add()
    store.set_states(study.id, [3, 1], TrialState.PRUNED)
    assert [trial.number for trial in store.trials(study.id, {TrialState.PRUNED})] == [1, 3]
    assert [trial.number for trial in store.trials(study.id, [TrialState.WAITING])] == [0, 2]
    assert store.trials(study.id, []) == []


def test_an_unknown_trial_says_which_there_are(store: Store, study: StudyInfo, add: Add) -> None:
    with pytest.raises(TrialNotFound, match="trial 0 does not exist in study 'demo'; it has no trials yet"):
        store.trial(study.id, 0)
    add(), add()
    with pytest.raises(TrialNotFound, match="it has trials 0 to 1"):
        store.trial(study.id, 2)
    with pytest.raises(TrialNotFound, match="trial 2 does not exist"):
        store.set_states(study.id, [1, 2], TrialState.PRUNED)
    assert store.trial(study.id, 1).state is TrialState.WAITING, "all or none"


def test_the_repr_hides_the_password() -> None:
    address = sqlalchemy.make_url("postgresql://user:secret@host/name")
    store = Store(address, sqlalchemy.create_engine("sqlite://"), read_only=True)
    assert repr(store) == "Store('postgresql://user:***@host/name', read_only=True)"
    assert store.url == "postgresql://user:secret@host/name"
    store.close()
