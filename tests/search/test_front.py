"""The Front and its hypervolume on hand-made records, and against brute force on random ones."""

import math
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nas.search.front import (
    AT_CHANCE,
    at_chance,
    best_recipes,
    front,
    full_attention,
    hypervolume,
    hypervolume_over_trials,
    reference,
    relative_recall,
)

CHANCE = 1 / 16
PROPERTY = settings(deadline=None, max_examples=80)  # the machine may be busy
FULL_BYTES = 1 << 40


def record(trial: int, recall: float | None, ratio: float = 0.5, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "trial": trial,
        "state": "complete",
        "architecture_digest": f"a{trial}",
        "recipe_digest": "r",
        "candidate_digest": f"c{trial}",
        "recall": recall,
        "recall_sd": None,
        "recall_chance": CHANCE,
        "loss": 3.0,
        "kv_cache_bytes": round(ratio * FULL_BYTES),
        "kv_cache_ratio": ratio,
        "prior": None,
        "placement": "interleaved",
        "seeds": 1,
    }
    return row | more


def full(trial: int, recall: float | None, **more: Any) -> dict[str, Any]:
    return record(trial, recall, 1.0, architecture_digest="full", prior="baseline", placement="full", **more)


def trials(rows: list[dict[str, Any]]) -> list[int]:
    return [row["trial"] for row in rows]


@st.composite
def studies(draw: st.DrawFn, repeats: bool = True) -> list[dict[str, Any]]:
    row = st.tuples(
        st.integers(0, 7),
        st.integers(0, 2),
        st.sampled_from([0.0, CHANCE, 0.3, 0.5, 1.0]) | st.floats(0, 1),
        st.floats(1, 5),
    )
    unique = None if repeats else (lambda drawn: (drawn[0], drawn[1]))
    rows = draw(st.lists(row, max_size=30, unique_by=unique))
    ratios = draw(st.lists(st.sampled_from([0.02, 0.1, 0.3, 1.0, 1.2]) | st.floats(0.01, 1), min_size=8, max_size=8))
    records = [
        record(i, recall, ratios[a], architecture_digest=f"a{a}", recipe_digest=f"r{r}", loss=loss)
        for i, (a, r, recall, loss) in enumerate(rows)
    ]
    return draw(st.permutations(records))


def test_best_recipe_is_by_recall_then_loss_then_trial() -> None:
    same: dict[str, Any] = {"architecture_digest": "a"}
    rows = [
        record(0, 0.5, recipe_digest="low", **same),
        record(1, 0.8, recipe_digest="late", loss=2.5, **same),
        record(2, 0.8, recipe_digest="lossy", loss=2.9, **same),
        record(3, 0.8, recipe_digest="twin", loss=2.5, **same),
        record(4, 0.1),
    ]
    best = best_recipes(rows[::-1])
    assert trials(best) == [1, 4]
    assert [row["recipes"] for row in best] == [4, 1]
    assert "recipes" not in rows[1]


def test_repeated_seeds_are_one_row() -> None:
    runs = [record(t, recall, architecture_digest="a", loss=t) for t, recall in [(5, 0.9), (3, 0.6), (9, 0.9)]]
    [row] = best_recipes(runs)
    assert (row["trial"], row["candidate_digest"], row["seeds"], row["recipes"]) == (3, "c3", 3, 1)
    assert row["recall"] == pytest.approx(0.8)
    assert row["recall_sd"] == pytest.approx(math.sqrt(0.03))
    assert row["loss"] == pytest.approx(17 / 3)
    assert best_recipes(runs[:1])[0]["recall_sd"] is None


def test_the_mean_of_the_seeds_decides_between_recipes() -> None:
    lucky = [record(t, r, architecture_digest="a", recipe_digest="lucky") for t, r in [(0, 1.0), (1, 0.2)]]
    steady = record(2, 0.7, architecture_digest="a", recipe_digest="steady")
    assert trials(best_recipes([*lucky, steady])) == [2]


@pytest.mark.parametrize("state", ["waiting", "running", "paused", "pruned", "failed", "infeasible"])
def test_only_complete_trials_count(state: str) -> None:
    rows = [record(0, 0.4), record(1, 0.9, state=state)]
    assert trials(best_recipes(rows)) == trials(front(rows)) == [0]
    assert [trial for trial, _ in hypervolume_over_trials(rows)] == [0]


@pytest.mark.parametrize("recall", [None, math.nan, math.inf])
def test_only_finite_recalls_count(recall: float | None) -> None:
    rows = [record(0, 0.4), record(1, recall, 0.1)]
    assert trials(front(rows)) == [0]
    assert len(hypervolume_over_trials(rows)) == 1


def test_front_is_sorted_by_memory_and_drops_the_dominated() -> None:
    rows = [record(0, 0.9, 0.5), record(1, 0.5, 0.1), record(2, 0.8, 0.6), record(3, 0.95, 0.9), record(4, 0.5, 0.2)]
    assert trials(front(rows)) == [1, 0, 3]


def test_of_equal_designs_one_stays() -> None:
    rows = [record(0, 1.0, loss=3.1), record(1, 1.0, loss=2.9), record(2, 1.0, loss=2.9), record(3, 1.0, loss=None)]
    assert trials(front(rows)) == trials(front(rows[::-1])) == [1]


def test_loss_as_a_third_objective() -> None:
    rows = [
        record(0, 0.9, 0.1),
        record(1, 0.5, 0.5, loss=2.0),
        record(2, 0.4, 0.6, loss=2.5),
        record(3, 1.0, loss=None),
    ]
    assert trials(front(rows, ("recall", "kv_cache", "loss"))) == [0, 1]
    assert trials(front(rows)) == [0, 3]


@pytest.mark.parametrize("objectives", [(), ("recall", "speed")])
def test_unknown_objectives_are_refused(objectives: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"objectives=.*allowed: .*recall, kv_cache, loss"):
        front([], objectives)


def test_empty() -> None:
    assert best_recipes([]) == front([]) == []
    assert hypervolume_over_trials([]) == []
    assert hypervolume([], CHANCE) == 0
    assert full_attention([]) is None


def test_at_chance() -> None:
    assert at_chance(record(0, CHANCE * AT_CHANCE))
    assert not at_chance(record(0, CHANCE * AT_CHANCE + 1e-9))
    assert not at_chance(record(0, None))
    assert not at_chance(record(0, 0.01, recall_chance=None))


def test_a_design_at_chance_stays_where_full_attention_learned() -> None:
    rows = front([full(0, 0.9), record(1, CHANCE, 0.1)])
    assert [(row["trial"], row["uninformative"]) for row in rows] == [(1, True), (0, False)]


def test_a_design_at_chance_leaves_where_full_attention_is_at_chance() -> None:
    rows = [full(0, CHANCE), record(1, CHANCE, 0.1), record(2, 0.5, 0.3)]
    assert trials(front(rows)) == [2]
    [(trial, area)] = hypervolume_over_trials(rows)
    assert trial == 2
    assert area == pytest.approx((0.5 - CHANCE) * -math.log2(0.3))


def test_without_a_finished_baseline_nothing_leaves() -> None:
    assert trials(front([full(0, None, state="running"), record(1, CHANCE, 0.1)])) == [1]


def test_full_attention_is_judged_at_its_best_recipe() -> None:
    searched = record(3, 0.8, 1.0, architecture_digest="full", recipe_digest="better", placement="full")
    rows = [full(0, CHANCE), searched, record(4, 0.4, 0.1), record(5, 0.9, 0.9, prior="baseline", placement="pure")]
    baseline = full_attention(rows)
    assert baseline is not None
    assert baseline["trial"] == 3
    assert relative_recall(rows[2], rows) == pytest.approx(0.5)
    assert relative_recall(rows[2], [baseline | {"prior": "baseline"}]) == pytest.approx(0.5)


def test_full_attention_that_has_not_learnt_is_no_reference() -> None:
    assert reference([full(0, 0.2), record(1, 0.9)]) is None
    found = reference([full(0, 0.5), record(1, 0.9)])
    assert found is not None
    assert found["trial"] == 0
    assert reference([record(1, 0.9)]) is None


def test_at_chance_is_nobody_if_full_attention_failed() -> None:
    broken = full(0, 0.5) | {"state": "failed", "recall": None}
    assert front([broken, record(1, 0.0)]) == []
    assert [row["trial"] for row in front([broken, record(1, 0.9)])] == [1]


def test_designs_over_the_budget_stay_out_of_the_front() -> None:
    rows = [record(0, 0.9) | {"within_budget": False}, record(1, 0.5) | {"within_budget": True}]
    assert [row["trial"] for row in front(rows)] == [1]


def test_relative_recall_is_none_where_it_cannot_be_said() -> None:
    assert relative_recall(record(1, 0.5), [record(1, 0.5)]) is None
    assert relative_recall(record(1, None), [full(0, 0.5)]) is None
    assert relative_recall(record(1, 0.5), [full(0, 0.0)]) is None


def test_hypervolume_by_hand() -> None:
    points = [(0.5, -3.0), (1.0, -1.0), (0.4, -2.0)]
    assert hypervolume(points, chance=0.25) == pytest.approx(0.25 * 3 + 0.5 * 1)
    assert hypervolume([(0.2, -3.0), (0.25, -3.0), (0.9, 0.0), (0.9, 0.5)], chance=0.25) == 0


def test_hypervolume_over_trials_by_hand() -> None:
    rows = [
        record(0, 0.5625, 0.25),
        record(1, 0.5, 0.5),  # dominated
        record(2, 1.0, 0.25, architecture_digest="a0"),  # another seed of trial 0: no new point
        record(4, 1.0, 0.5),
    ]
    curve = hypervolume_over_trials(rows[::-1])
    assert [trial for trial, _ in curve] == [0, 1, 2, 4]
    assert [area for _, area in curve] == pytest.approx([1.0, 1.0, 1.0, 1.4375])


def test_fast_at_ten_thousand_trials_that_are_all_on_the_front() -> None:
    draw = random.Random(0)
    ratios = sorted(draw.uniform(0.01, 1) for _ in range(10_000))
    rows = [record(i, 0.1 + 0.8 * i / 10_000, ratio) for i, ratio in enumerate(ratios)]
    draw.shuffle(rows)
    start = time.process_time()
    assert len(front(rows)) == 10_000
    curve = hypervolume_over_trials(rows)
    assert time.process_time() - start < 2
    points = [(row["recall"], math.log2(row["kv_cache_ratio"])) for row in rows]
    assert curve[-1][1] == pytest.approx(hypervolume(points, CHANCE))


@PROPERTY
@given(studies())
def test_front_is_exactly_the_non_dominated_pairs(records: list[dict[str, Any]]) -> None:
    pairs = {(row["recall"], row["kv_cache_bytes"]) for row in best_recipes(records)}
    best = {p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] <= p[1] for q in pairs)}
    rows = front(records)
    assert [(row["recall"], row["kv_cache_bytes"]) for row in rows] == sorted(best, key=lambda pair: pair[1])
    assert front(sorted(records, key=lambda row: row["trial"])) == rows


@PROPERTY
@given(studies(repeats=False))
def test_the_curve_of_hypervolume_ends_at_the_front_and_never_falls(records: list[dict[str, Any]]) -> None:
    points = [(row["recall"], math.log2(row["kv_cache_ratio"])) for row in records]
    curve = hypervolume_over_trials(records)
    areas = [area for _, area in curve]
    assert [trial for trial, _ in curve] == sorted(row["trial"] for row in records)
    assert areas == sorted(areas)
    if records:
        assert areas[-1] == pytest.approx(hypervolume(points, CHANCE))
        best = [(row["recall"], math.log2(row["kv_cache_ratio"])) for row in best_recipes(records)]
        assert areas[-1] == pytest.approx(hypervolume(best, CHANCE))
