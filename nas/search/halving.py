"""Asynchronous successive halving on two objectives (design.md 5).

ASHA (Li et al., arXiv:1810.05934, algorithm 2) with its ranking by one loss replaced by non-dominated sorting. A rung
compares the negative log-likelihood at the labelled recall positions with the log2 of kv_cache_ratio, both to be
small. Accuracy would not do: it is a step function of training, and noise at chance.
"""

from __future__ import annotations

import heapq
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

    Designs that beat chance come first, by non-dominated front. Inside a front they are in the reverse order of
    taking out the least hypervolume contributor, one at a time (SMS-EMOA: Beume et al., EJOR 181, 2007), with reference
    (ln(answers), 0): contributions taken all at once would put two good designs that are close to each other both last.
    The others follow by nll: at chance the cheapest would always win. Further ties go to the lower nll, then to the
    lower trial number, so that the order of `standings` does not matter.
    """
    ordered = sorted(standings, key=lambda s: (s.nll, s.trial))
    learned = [s for s in ordered if s.beats_chance(answers)]
    guessing = [s for s in ordered if not s.beats_chance(answers)]
    if not learned:
        return [s.trial for s in guessing]
    points = np.array([(s.nll, s.log2_ratio) for s in learned])
    fronts = moocore.pareto_rank(points)
    best: list[int] = []
    for front in range(fronts.max() + 1):
        members = np.flatnonzero(fronts == front).tolist()
        order = _by_contribution([learned[i] for i in members], math.log(answers))
        best += [learned[members[i]].trial for i in order]
    return best + [s.trial for s in guessing]


def promotable(
    standings: Iterable[Standing], promoted: Collection[int], reduction: float, answers: int, final: bool
) -> list[int]:
    """Trials that may go on to the next rung and have not yet, best first.

    Of the n trials that finished the rung these are the best floor(n / reduction), and every protected one. If none
    of the n beats chance, the rung is too early to tell: it waits for more trials and, once final, all go on.
    A promotion is never revoked, even where later trials push it out of the best; a trial left behind may still be
    returned when n has grown.

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
        quota = len(ranking) if final else 0
    going = set(ranking[:quota]) | {s.trial for s in standings if s.protected}
    return [trial for trial in ranking if trial in going and trial not in promoted]


def _by_contribution(front: list[Standing], chance: float) -> list[int]:
    """Indices into `front` (rising nll, hence falling memory), best first: the least contributor leaves, repeatedly.

    Only the two neighbours of one that leaves contribute differently afterwards, so this takes O(n log n). Of equal
    designs all but the first leave early; designs no cheaper than full attention contribute nothing.
    """
    n = len(front)
    nll: list[float] = [*(s.nll for s in front), chance]
    ratio: list[float] = [*(min(s.log2_ratio, 0.0) for s in front), 0.0]
    before: list[int] = [*range(-1, n)]  # slot n, which is also slot -1, is the reference
    after: list[int] = [*range(1, n + 1), 0]

    def contribution(i: int) -> float:
        return (nll[after[i]] - nll[i]) * (ratio[before[i]] - ratio[i])

    current = [contribution(i) for i in range(n)]
    heap = [(gain, -i) for i, gain in enumerate(current)]  # of equal contributors the last leaves first
    heapq.heapify(heap)
    left: list[int] = []
    gone: set[int] = set()
    while heap:
        gain, negative = heapq.heappop(heap)
        i = -negative
        if i in gone or gain != current[i]:
            continue
        left.append(i)
        gone.add(i)
        after[before[i]], before[after[i]] = after[i], before[i]
        for j in {before[i], after[i]} - {-1, n}:
            current[j] = contribution(j)
            heapq.heappush(heap, (current[j], -j))
    return left[::-1]
