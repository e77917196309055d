"""Asynchronous successive halving on two objectives (design.md 5).

ASHA (Li et al., arXiv:1810.05934, algorithm 2) with its ranking by one loss replaced by non-dominated sorting. A rung
compares the negative log-likelihood at the labelled recall positions with the log2 of kv_cache_ratio, both to be
small. Accuracy would not do: it is a step function of training, and noise at chance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import moocore
import numpy as np

CHANCE_MARGIN = 0.05
"""Nats by which a design must be under ln(answers) to beat chance: below it lies the noise of an evaluation."""


@dataclass(frozen=True)
class Standing:
    """Where a trial stands at a rung.

    `nll` in nats per labelled position; `log2_ratio` of kv_cache_ratio; `protected` trials (baselines) always go on,
    and take part in the ranking.

    Raises:
        ValueError: a score is not finite.
    """

    trial: int
    nll: float
    log2_ratio: float
    protected: bool = False

    def __post_init__(self) -> None:
        for name in ("nll", "log2_ratio"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} of trial {self.trial} must be finite")

    def beats_chance(self, answers: int) -> bool:
        """Whether it does better than guessing among `answers` symbols."""
        return self.nll < math.log(answers) - CHANCE_MARGIN


def rank(standings: Iterable[Standing], answers: int) -> list[int]:
    """Trial numbers, best first.

    Designs that beat chance come first, by non-dominated front, inside a front by hypervolume contribution with
    reference (ln(answers), 0), then by nll. The others follow by nll: at chance the cheapest would always win. The
    last tie is the trial number, so that the order of `standings` does not matter.
    """
    ordered = sorted(standings, key=lambda s: (s.nll, s.trial))
    learned = [s for s in ordered if s.beats_chance(answers)]
    guessing = [s for s in ordered if not s.beats_chance(answers)]
    if not learned:
        return [s.trial for s in guessing]
    points = np.array([(s.nll, s.log2_ratio) for s in learned])
    fronts = moocore.pareto_rank(points)
    gains = np.zeros(len(learned))
    for front in range(fronts.max() + 1):
        members = np.flatnonzero(fronts == front)
        gains[members] = _contributions(points[members], answers)
    best = np.lexsort((-gains, fronts))  # stable: equals keep the order of `ordered`
    return [learned[i].trial for i in best] + [s.trial for s in guessing]


def promotable(
    standings: Iterable[Standing], promoted: Collection[int], reduction: float, answers: int, final: bool
) -> list[int]:
    """Trials that may go on to the next rung and have not yet, best first.

    Of the n trials that finished the rung these are the best floor(n / reduction), and every protected one. If none
    of the n beats chance, all go on: the rung is too early to tell. A promotion is never revoked, even where later
    trials push it out of the best; a trial left behind may still be returned when n has grown.

    Args:
        standings: all trials that finished the rung, those promoted earlier included.
        promoted: trials that have gone on.
        reduction: above 1; the share that goes on is its inverse.
        answers: symbols an answer is one of; chance is its inverse.
        final: no more trials will finish this rung; then at least one goes on.

    Raises:
        ValueError: `reduction` is not above 1, or a trial stands twice.
    """
    if not reduction > 1:
        raise ValueError(f"reduction={reduction} must be above 1")
    standings = list(standings)
    if len({s.trial for s in standings}) < len(standings):
        raise ValueError(f"standings hold a trial twice: {sorted(s.trial for s in standings)}")
    ranking = rank(standings, answers)
    quota = math.floor(len(ranking) / reduction + 1e-9)  # 33 / 1.1 is 29.999999999999996
    if final:
        quota = max(1, quota)
    if not any(s.beats_chance(answers) for s in standings):
        quota = len(ranking)
    going = set(ranking[:quota]) | {s.trial for s in standings if s.protected}
    return [trial for trial in ranking if trial in going and trial not in promoted]


def _contributions(points: np.ndarray, answers: int) -> np.ndarray:
    """Hypervolume contribution of each point of a front, shape (n, 2) -> (n,); of equal points the first has it."""
    unique, first = np.unique(points, axis=0, return_index=True)  # moocore gives equals 0 each
    gains = np.zeros(len(points))
    gains[first] = moocore.hv_contributions(unique, ref=[math.log(answers), 0.0])
    return gains
