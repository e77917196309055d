"""Who may go on when no more trials come: a rung is complete once nothing can still reach it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

from nas.messages import Measurement, TrialState
from nas.search.board import Board
from search_spaces import SearchSpace


def put(board: Board, number: int, state: TrialState, rung: int, nlls: tuple[float, ...], target: int = -1) -> None:
    row = SimpleNamespace(
        number=number,
        state=state,
        rung=rung,
        target_rung=max(rung, target),
        facts={"kv_cache_ratio": 0.25},
        prior="sampled",
    )
    board.put(cast(Any, row))
    steps = (100, 200, 300)
    board.note(number, [Measurement(step=steps[i], name="recall_nll", value=nll) for i, nll in enumerate(nlls)])


def test_the_only_one_at_a_rung_goes_on_though_others_stay_paused_below(space: SearchSpace) -> None:
    board = Board(space)  # reduction 3: one of four goes on to rung 1, where a quota of 1/3 is none
    for number in range(3):
        put(board, number, TrialState.PAUSED, 0, (2.0 + number / 10,))
    put(board, 3, TrialState.PAUSED, 1, (1.0, 0.5))
    assert board.next_promotion(final=False) is None
    assert board.next_promotion(final=True) == (3, 1)


def test_a_higher_rung_at_chance_prunes_nothing_though_others_stay_paused_below(space: SearchSpace) -> None:
    board = Board(space)
    chance = math.log(16)
    for number in range(4):
        put(board, number, TrialState.PAUSED, 0, (2.5 + number / 100,))
    for number in (4, 5):
        put(board, number, TrialState.PAUSED, 1, (2.0, chance))
    assert board.next_promotion(final=True) in ((4, 1), (5, 1))


def test_a_rung_waits_for_those_on_their_way_to_it(space: SearchSpace) -> None:
    board = Board(space)
    put(board, 0, TrialState.PAUSED, 1, (1.0, 0.5))
    put(board, 1, TrialState.RUNNING, 0, (1.1,), target=1)
    assert board.next_promotion(final=True) is None
    put(board, 1, TrialState.PAUSED, 1, (1.1, 0.6))
    assert board.next_promotion(final=True) == (0, 1)


def test_below_comes_first_once_no_more_trials_come(space: SearchSpace) -> None:
    board = Board(space)
    put(board, 0, TrialState.PAUSED, 0, (1.0,))
    put(board, 1, TrialState.PAUSED, 1, (1.5, 0.5))
    assert board.next_promotion(final=True) == (0, 0)
