"""The Front: non-dominated Architectures, each at its best recipe, and its hypervolume. Pure functions on records.

A record is one trial as `nas trials --json` prints it (design.md, Conventions): a dict in which absent is None.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import moocore
import numpy as np

from nas.messages import TrialState

Record = Mapping[str, Any]

AT_CHANCE = 1.5
"""A recall up to this multiple of chance counts as chance: records do not carry the number of answers scored."""

_KEYS = {"recall": ("recall", True), "kv_cache": ("kv_cache_bytes", False), "loss": ("loss", False)}
"""Objective -> (key of the record, whether more is better)."""


def at_chance(record: Record) -> bool:
    """Whether a design recalls nothing: its recall is at most `AT_CHANCE` times chance (design.md 12)."""
    recall, chance = record["recall"], record["recall_chance"]
    return recall is not None and chance is not None and recall <= AT_CHANCE * chance


def best_recipes(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every architecture at its best recipe, in order of trial number.

    Only COMPLETE trials with a finite recall count. Runs of one architecture and recipe that differ in their seed
    are one: `recall` and `loss` are their means, `recall_sd` the sample standard deviation of recall (None for one
    run), `seeds` their number; the rest is of the first trial. Best is the highest recall, then the lowest loss, then
    the lowest trial number.

    Returns:
        Copies, with `recipes` (how many the architecture had) and `uninformative` (`at_chance`) added.
    """
    runs: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in _scored(records):
        runs[record["architecture_digest"], record["recipe_digest"]].append(record)
    recipes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for (architecture, _), repeats in runs.items():
        recipes[architecture].append(_averaged(repeats))
    best = [min(tried, key=_preference) | {"recipes": len(tried)} for tried in recipes.values()]
    return sorted(best, key=_trial)


def front(records: Iterable[Record], objectives: Sequence[str] = ("recall", "kv_cache")) -> list[dict[str, Any]]:
    """The non-dominated rows of `best_recipes`, from the smallest kv_cache_bytes to the largest.

    Of designs equal in every objective one stays, the lowest in loss, then in trial number: recall saturates at 1 and
    placements of equal memory are many, so that keeping all would fill the Front with copies of one point. A design
    that lacks an objective is not comparable and stays out. Designs at chance leave only if full attention is at
    chance too: then the proxy is to blame, otherwise the design (design.md 12). Baselines over the memory budget are
    there to compare with and stay out.

    Args:
        objectives: any of "recall", "kv_cache", "loss".

    Raises:
        ValueError: an objective is unknown, or there is none.
    """
    if not objectives or any(name not in _KEYS for name in objectives):
        raise ValueError(f"objectives={[*objectives]}; allowed: one or more of {', '.join(_KEYS)}")
    keys, maximise = zip(*(_KEYS[name] for name in objectives), strict=True)
    eligible = [record for record in _informative(list(records)) if record.get("within_budget", True)]
    rows = [row for row in best_recipes(eligible) if all(_finite(row[key]) for key in keys)]
    rows.sort(key=_loss_then_trial)
    if not rows:
        return []
    points = np.array([[row[key] for key in keys] for row in rows], dtype=float)
    kept = moocore.is_nondominated(points, maximise=list(maximise))  # of equal points it keeps the first
    chosen = [row for row, keep in zip(rows, kept, strict=True) if keep]
    return sorted(chosen, key=lambda row: (row["kv_cache_bytes"] or 0, row["trial"]))


def full_attention(records: Iterable[Record]) -> dict[str, Any] | None:
    """The full-attention baseline at its best recipe, or None while no run of it is complete."""
    scored = _scored(records)
    digests = (r["architecture_digest"] for r in scored if r["prior"] == "baseline" and r["placement"] == "full")
    digest = next(digests, None)
    rows = best_recipes(record for record in scored if record["architecture_digest"] == digest)
    return rows[0] if rows else None


def reference(records: Iterable[Record]) -> dict[str, Any] | None:
    """`full_attention` where it can be compared with: None while it recalls less than half of what the best complete
    design does. Then it has not learnt the task at this budget, and a ratio to it says nothing."""
    scored = _scored(records)
    baseline = full_attention(scored)
    if baseline is None or 2 * baseline["recall"] < max(record["recall"] for record in scored):
        return None
    return baseline


def relative_recall(record: Record, records: Iterable[Record]) -> float | None:
    """Recall as a share of the full-attention baseline's; None where either is missing or the baseline's is 0.

    For many records, call `full_attention` once and pass `[baseline]` as `records`.
    """
    baseline = full_attention(records)
    if baseline is None or not baseline["recall"] or not _finite(record["recall"]):
        return None
    return float(record["recall"] / baseline["recall"])


def hypervolume(points: Iterable[tuple[float, float]], chance: float) -> float:
    """Area between a set of designs and the reference (recall at chance, full attention's memory).

    Args:
        points: (recall, log2 kv_cache_ratio) each; dominated points and those beyond the reference add nothing.
        chance: recall at chance.

    Returns:
        Recall above chance times halvings of the cache: at most (1 - chance) * -log2(smallest ratio).
    """
    array = np.array(list(points), dtype=float).reshape(-1, 2)
    return float(moocore.hypervolume(array, ref=[chance, 0.0], maximise=[True, False])) if len(array) else 0.0


def hypervolume_over_trials(records: Iterable[Record]) -> list[tuple[int, float]]:
    """(trial, hypervolume of the trials up to it) at every complete trial, in order of trial number.

    Repeats of a recipe with another seed add no point, so that the curve never falls and luck is not counted twice.
    Takes O(n log n) for n trials.
    """
    curve: list[tuple[int, float]] = []
    steps: _Staircase | None = None
    seen: set[tuple[str, str]] = set()
    for record in sorted(_scored(_informative(list(records))), key=_trial):
        design = record["architecture_digest"], record["recipe_digest"]
        ratio, chance = record["kv_cache_ratio"], record["recall_chance"]
        if not ratio or not _finite(ratio) or not _finite(chance):
            continue
        steps = steps or _Staircase(chance)
        if design not in seen:
            steps.add(record["recall"], math.log2(ratio))
        seen.add(design)
        curve.append((record["trial"], steps.area))
    return curve


class _Staircase:
    """A two-objective front that grows: its area is kept up to date at each point instead of being recomputed."""

    def __init__(self, chance: float) -> None:
        self.area = 0.0
        self._chance = chance
        self._costs: list[float] = []  # log2 ratios, rising
        self._recalls: list[float] = []  # of the same points, rising too

    def add(self, recall: float, cost: float) -> None:
        right = bisect_right(self._costs, cost)
        if recall <= self._chance or cost >= 0 or (right and self._recalls[right - 1] >= recall):
            return
        first = bisect_left(self._costs, cost)
        last = bisect_right(self._recalls, recall, lo=first)  # first..last - 1 are dominated by the new point
        edges = [cost, *self._costs[first:last], self._costs[last] if last < len(self._costs) else 0.0]
        below = [self._recalls[first - 1] if first else self._chance, *self._recalls[first:last]]
        for left, end, height in zip(edges, edges[1:], below, strict=False):
            self.area += (end - left) * (recall - height)
        self._costs[first:last] = [cost]
        self._recalls[first:last] = [recall]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _scored(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["state"] == TrialState.COMPLETE and _finite(record["recall"])]


def _informative(records: list[Record]) -> list[Record]:
    """The records, without designs at chance if full attention is at chance too, or failed."""
    baseline = full_attention(records)
    failed = any(r["prior"] == "baseline" and r["placement"] == "full" and r["state"] == "failed" for r in records)
    if not (failed if baseline is None else at_chance(baseline)):
        return records
    silent = {row["architecture_digest"] for row in best_recipes(records) if row["uninformative"]}
    return [record for record in records if record["architecture_digest"] not in silent]


def _averaged(repeats: list[Record]) -> dict[str, Any]:
    """Runs of one design and recipe as one row."""
    recalls = [record["recall"] for record in repeats]
    losses = [record["loss"] for record in repeats if _finite(record["loss"])]
    first: Record = min(repeats, key=_trial)
    row = dict(first)
    row["recall"] = fmean(recalls)
    row["recall_sd"] = stdev(recalls) if len(recalls) > 1 else None
    row["loss"] = fmean(losses) if losses else None
    row["seeds"] = len(repeats)
    row["uninformative"] = at_chance(row)
    return row


def _trial(record: Record) -> int:
    return int(record["trial"])


def _loss_then_trial(row: Record) -> tuple[float, int]:
    return (row["loss"] if row["loss"] is not None else math.inf, row["trial"])


def _preference(row: Record) -> tuple[float, float, int]:
    return (-row["recall"], *_loss_then_trial(row))
