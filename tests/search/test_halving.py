"""Successive halving: the ranking, the quota, and what may never happen whatever the standings."""

import math
import random
import time

import moocore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nas.search.halving import CHANCE_MARGIN, Standing, promotable, rank

ANSWERS = 16
CHANCE = math.log(ANSWERS)
PROPERTY = settings(deadline=None, max_examples=80)  # the machine may be busy
REDUCTIONS = st.sampled_from([1.1, 1.5, 2.0, 3.0, 4.0])


@st.composite
def rungs(draw: st.DrawFn) -> list[Standing]:
    """Up to 30 trials; few distinct scores, so that ties are common."""
    scores = st.tuples(
        st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 2.6, CHANCE - CHANCE_MARGIN, CHANCE, 3.5]) | st.floats(0, 4),
        st.sampled_from([-5.0, -3.0, -1.5, 0.0, 0.2]) | st.floats(-8, 1),
        st.booleans(),
    )
    rows = draw(st.lists(scores, min_size=1, max_size=30))
    numbers = draw(st.permutations(range(len(rows))))
    return [Standing(trial, *row) for trial, row in zip(numbers, rows, strict=True)]


def dominates(a: Standing, b: Standing) -> bool:
    return a.nll <= b.nll and a.log2_ratio <= b.log2_ratio and (a.nll, a.log2_ratio) != (b.nll, b.log2_ratio)


def test_fronts_then_contribution_then_guessers_by_nll() -> None:
    standings = [
        Standing(0, 2.9, -9.0),  # at chance: last, however cheap
        Standing(1, 0.1, -2.0),  # first front, large area of its own
        Standing(2, 2.0, -4.0),  # first front
        Standing(3, 1.99, -3.9),  # first front, crowded by 2
        Standing(4, 2.1, -3.0),  # dominated
        Standing(5, CHANCE, -1.0),  # at chance, nearer than 0
    ]
    assert rank(standings, ANSWERS) == [1, 2, 3, 4, 5, 0]


def test_of_equal_designs_the_first_trial_carries_the_contribution() -> None:
    standings = [Standing(7, 1.0, -2.0), Standing(3, 1.0, -2.0), Standing(5, 0.999, -1.99)]
    assert rank(standings, ANSWERS) == [3, 5, 7]


def test_close_neighbours_do_not_pull_each_other_down() -> None:
    good, nearly_the_same, cheap = Standing(0, 0.1, -3.0), Standing(1, 0.101, -3.001), Standing(2, 2.5, -3.2)
    assert rank([nearly_the_same, cheap, good], ANSWERS) == [0, 2, 1]


def test_full_attention_and_dearer_rank_by_nll_where_neither_contributes() -> None:
    assert rank([Standing(0, 0.5, 0.0), Standing(1, 0.2, 0.5)], ANSWERS) == [1, 0]


def test_chance_needs_a_margin() -> None:
    assert not Standing(0, CHANCE - CHANCE_MARGIN / 2, -1.0).beats_chance(ANSWERS)
    assert Standing(0, CHANCE - 2 * CHANCE_MARGIN, -1.0).beats_chance(ANSWERS)


def test_asynchronous_quota_grows_with_the_rung() -> None:
    arriving = [Standing(0, 1.0, -2.0), Standing(1, 0.9, -2.1), Standing(2, 0.8, -2.2), Standing(3, 2.0, -1.0)]
    promoted: set[int] = set()
    went = []
    for n in range(1, 5):
        new = promotable(arriving[:n], promoted, 2, ANSWERS, final=False)
        went.append(new)
        promoted |= set(new)
    assert went == [[], [1], [2], []]  # 1 and 2 are the best two of four


def test_the_last_trial_of_a_rung_goes_on_only_when_final() -> None:
    standings = [Standing(0, 1.0, -2.0)]
    assert promotable(standings, set(), 3, ANSWERS, final=False) == []
    assert promotable(standings, set(), 3, ANSWERS, final=True) == [0]


def test_a_rung_at_chance_prunes_nothing() -> None:
    standings = [Standing(i, CHANCE + i / 10, -float(i)) for i in range(5)]
    assert promotable(standings, {1}, 2, ANSWERS, final=True) == [0, 2, 3, 4]
    assert promotable(standings, {1}, 2, ANSWERS, final=False) == [], "a rung at chance waits for more trials"
    assert promotable([*standings, Standing(5, 1.0, -1.0)], set(), 3, ANSWERS, final=True) == [5, 0]


def test_protected_go_on_though_last() -> None:
    standings = [Standing(i, 1.0 + i / 10, -2.0, protected=i == 3) for i in range(4)]
    assert promotable(standings, set(), 4, ANSWERS, final=False) == [0, 3]


def test_whole_quotas_survive_rounding() -> None:
    standings = [Standing(i, 1.0, -2.0 - i / 100) for i in range(33)]
    assert len(promotable(standings, set(), 1.1, ANSWERS, final=False)) == 30


@pytest.mark.parametrize("nll", [math.nan, math.inf])
def test_scores_must_be_finite(nll: float) -> None:
    with pytest.raises(ValueError, match=r"nll=.* of trial 4"):
        Standing(4, nll, -1.0)


def test_refuses_a_reduction_of_one_and_a_trial_twice() -> None:
    with pytest.raises(ValueError, match=r"reduction=1"):
        promotable([Standing(0, 1.0, -1.0)], set(), 1, ANSWERS, final=False)
    with pytest.raises(ValueError, match="twice"):
        promotable([Standing(0, 1.0, -1.0)] * 2, set(), 2, ANSWERS, final=False)


def test_an_empty_rung() -> None:
    assert rank([], ANSWERS) == []
    assert promotable([], set(), 2, ANSWERS, final=True) == []


@pytest.mark.parametrize("one_front", [True, False])
def test_fast_at_ten_thousand_trials(one_front: bool) -> None:
    draw = random.Random(0)
    nlls = [draw.uniform(0, 2.7) for _ in range(10_000)]
    standings = [Standing(i, nll, -6 + nll if not one_front else -nll) for i, nll in enumerate(nlls)]
    start = time.process_time()
    assert len(promotable(standings, set(), 2, ANSWERS, final=False)) == 5000
    assert time.process_time() - start < 2


@PROPERTY
@given(rungs(), st.randoms(use_true_random=False))
def test_rank_is_a_permutation_that_ignores_the_order(standings: list[Standing], draw: random.Random) -> None:
    ranking = rank(standings, ANSWERS)
    assert sorted(ranking) == sorted(s.trial for s in standings)
    shuffled = draw.sample(standings, len(standings))
    assert rank(shuffled, ANSWERS) == ranking


@PROPERTY
@given(rungs())
def test_rank_puts_dominating_designs_and_learners_first(standings: list[Standing]) -> None:
    place = {trial: i for i, trial in enumerate(rank(standings, ANSWERS))}
    for a in standings:
        for b in standings:
            if a.beats_chance(ANSWERS) and (not b.beats_chance(ANSWERS) or dominates(a, b)):
                assert place[a.trial] < place[b.trial]


@PROPERTY
@given(st.lists(st.tuples(st.floats(0, 2), st.floats(-8, 0.5)), min_size=2, max_size=12, unique=True))
def test_inside_a_front_the_last_is_the_least_contributor(points: list[tuple[float, float]]) -> None:
    front = [p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)]
    ranking = rank([Standing(i, *point) for i, point in enumerate(front)], ANSWERS)
    while len(ranking) > 1:
        array = np.array([front[i] for i in ranking])
        gains = moocore.hv_contributions(array, ref=[CHANCE, 0.0])
        assert gains[-1] <= gains.min() + 1e-9
        ranking.pop()


@PROPERTY
@given(rungs(), REDUCTIONS, st.booleans())
def test_quota_and_protection(standings: list[Standing], reduction: float, final: bool) -> None:
    going = promotable(standings, set(), reduction, ANSWERS, final)
    protected = {s.trial for s in standings if s.protected}
    assert protected <= set(going)
    if any(s.beats_chance(ANSWERS) for s in standings):
        assert len(set(going) - protected) <= max(int(final), len(standings) / reduction + 1e-9)
    else:
        assert set(going) == ({s.trial for s in standings} if final else protected)
    assert going == [trial for trial in rank(standings, ANSWERS) if trial in going]
    assert going or not final


@PROPERTY
@given(rungs(), REDUCTIONS, st.booleans())
def test_a_dominated_design_never_goes_before_its_dominator(
    standings: list[Standing], reduction: float, final: bool
) -> None:
    going = promotable(standings, set(), reduction, ANSWERS, final)
    learned = [s for s in standings if s.beats_chance(ANSWERS)]
    for a in learned:
        for b in learned:
            if dominates(a, b) and b.trial in going and not b.protected:
                assert a.trial in going
                assert going.index(a.trial) < going.index(b.trial)


@PROPERTY
@given(rungs(), REDUCTIONS)
def test_as_the_rung_fills_nobody_is_promoted_twice_and_the_best_get_on(
    standings: list[Standing], reduction: float
) -> None:
    promoted: list[int] = []
    for n in range(1, len(standings) + 1):
        promoted += promotable(standings[:n], promoted, reduction, ANSWERS, final=n == len(standings))
    assert len(set(promoted)) == len(promoted)
    assert set(promotable(standings, set(), reduction, ANSWERS, final=True)) <= set(promoted)
