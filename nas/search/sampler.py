"""Optuna, behind one seam: proposes parameters and learns from results. Its study lives in memory and is rebuilt from
our store at start, so there is no second truth (design.md 1).

The stated rules:

* Every parameter of the space is suggested in every trial, used or not: NSGA-II and multivariate TPE model only
  parameters that all trials share, and fall back to random draws for the others without saying so (traps.md 9).
* A proposal over the memory budget, or a Candidate tried before, never becomes a trial: Optuna is told that it failed
  and asked again, at most `MAX_REJECTIONS` times in a row, the second half of them uniformly at random.
* A trial's values are its recall and log2 of kv_cache_ratio (and loss where the space says so) at the last rung it
  finished. Paused and pruned trials are told too, so that every sampler moves away from designs that lose early. A
  trial that diverged or ran out of memory is told the worst: recall 0, and the loss of a uniform guess.
* The seed of the n-th ask is a function of (study seed, trial number, rejections), so a resumed study repeats nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from nas.architecture import Candidate, derive_seed
from nas.messages import Failure
from nas.messages import TrialState as State
from nas.store import TrialRow
from search_spaces.designs import Fixed, Value, backbone_labels, candidate
from search_spaces.schema import LogRange, SearchSpace, ratio_label

MAX_REJECTIONS = 100
STALE_SHARE = 0.02
"""Optuna cannot change a value it was told; the study is rebuilt once this share of its values is out of date."""

WORST = (Failure.DIVERGED, Failure.OOM)
"""The design's fault: it is told the worst."""

_GENERATION = "NSGAIISampler:generation"


class NoProposal(Exception):
    """The sampler found nothing new within the budget in `MAX_REJECTIONS` asks."""


@dataclass(frozen=True)
class Proposal:
    params: dict[str, Value]
    state: dict[str, Any]
    """What Optuna keeps beside the parameters (NSGA-II: the generation); restored at a rebuild."""
    candidate: Candidate


@dataclass
class Told:
    """One trial as the sampler knows it; `values` is None until its first rung."""

    params: Mapping[str, Value]
    state: Mapping[str, Any] = field(default_factory=dict)
    values: tuple[float, ...] | None = None


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """The flat Optuna space: names as in `search_spaces.designs.candidate`."""
    flat: dict[str, BaseDistribution] = {
        "backbone": CategoricalDistribution(backbone_labels(space)),
        "ratio": CategoricalDistribution([ratio_label(ratio) for ratio in space.ratios]),
        "placement": CategoricalDistribution(space.placements),
        "kv_groups": CategoricalDistribution(space.kv_groups),
        "routing": CategoricalDistribution(space.routing),
        "optimizer": CategoricalDistribution(list(space.optimizers)),
    }
    for name, optimizer in space.optimizers.items():
        rates = optimizer.lr
        flat[f"lr_{name}"] = (
            FloatDistribution(rates.low, rates.high, log=True)
            if isinstance(rates, LogRange)
            else CategoricalDistribution(rates)
        )
    return flat


def objective_values(space: SearchSpace, row: TrialRow) -> tuple[float, ...] | None:
    """What the sampler learns of a trial, in the order of the space's objectives; None where there is nothing yet."""
    worst = row.state is State.FAILED and row.failure in WORST
    if not worst and row.recall is None:
        return None
    known = {
        "recall": 0.0 if worst else row.recall,
        "kv_cache": math.log2(row.facts["kv_cache_ratio"]),
        "loss": math.log(space.workload.vocab_size) if worst or row.loss is None else row.loss,
    }
    return tuple(float(known[name] or 0.0) for name in space.objectives)


def complete_params(space: SearchSpace, partial: Mapping[str, Value]) -> dict[str, Value]:
    """`partial` with every other parameter of the flat space at its first choice or middle."""
    filled: dict[str, Value] = {}
    for name, distribution in distributions(space).items():
        if name in partial:
            filled[name] = partial[name]
        elif isinstance(distribution, FloatDistribution):
            filled[name] = math.sqrt(distribution.low * distribution.high)
        else:
            assert isinstance(distribution, CategoricalDistribution)
            filled[name] = distribution.choices[0]  # type: ignore[assignment]  # never None or bool here
    return filled


class Sampler:
    """Asks Optuna for Candidates and tells it results, by our trial numbers.

    Args:
        space: what may vary.
        seed: the study's seed.
        past: earlier trials of the study by number, when resuming.
        tried: digests of all Candidates of the study, whoever proposed them.
    """

    def __init__(
        self, space: SearchSpace, seed: int, past: Mapping[int, Told] | None = None, tried: Iterable[str] = ()
    ) -> None:
        self._space = space
        self._seed = seed
        self._trials: dict[int, Told] = dict(past or {})
        self._tried = set(tried)
        self._distributions = distributions(space)
        self._limit = space.budget.kv_cache.limit(space.deployment) if space.budget.kv_cache else None
        self._directions = [
            StudyDirection.MAXIMIZE if name == "recall" else StudyDirection.MINIMIZE for name in space.objectives
        ]
        self._rebuild()

    def ask(self, number: int) -> Proposal:
        """A Candidate for trial `number`: within the budget, and not tried before.

        Raises:
            NoProposal: none was found.
        """
        if self._stale > STALE_SHARE * len(self._trials):
            self._rebuild()
        for rejections in range(MAX_REJECTIONS):
            self._study.sampler = self._make(derive_seed(self._seed, number, rejections), rejections)
            trial = self._study.ask(self._distributions)
            found = candidate(self._space, Fixed(trial.params))
            if found.digest not in self._tried and self._affordable(found):
                self._tried.add(found.digest)
                attributes = self._study.get_trials(deepcopy=False)[trial.number].system_attrs
                state = {key: value for key, value in attributes.items() if key == _GENERATION}
                self._trials[number] = Told(trial.params, state)
                self._numbers[number] = trial.number
                return Proposal(trial.params, state, found)
            self._study.tell(trial, state=TrialState.FAIL)
        raise NoProposal(f"no new design within the budget in {MAX_REJECTIONS} proposals")

    def add(self, number: int, params: Mapping[str, Value], digest: str) -> None:
        """Makes a trial known that somebody else proposed (a baseline, an enqueued design)."""
        self._tried.add(digest)
        self._trials[number] = Told(params)
        self._add_to_study(number, self._trials[number])

    def knows(self, found: Candidate) -> bool:
        return found.digest in self._tried

    def tell(self, number: int, values: Sequence[float]) -> None:
        """Values of a trial in the order of the space's objectives; a later rung replaces an earlier one's."""
        if number not in self._trials:
            return  # full attention has no parameters that a sampler could learn from
        told = self._trials[number]
        if told.values is None:
            self._study.tell(self._numbers[number], list(values))
        elif told.values != tuple(values):
            self._stale += 1
        told.values = tuple(values)

    def _affordable(self, found: Candidate) -> bool:
        return self._limit is None or self._space.deployment.cost(found.architecture).kv_cache_bytes <= self._limit

    def _make(self, seed: int, rejections: int = 0) -> optuna.samplers.BaseSampler:
        seed %= 2**32
        if self._space.sampler == "random" or rejections >= MAX_REJECTIONS // 2:
            return optuna.samplers.RandomSampler(seed=seed)
        if self._space.sampler == "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(seed=seed, multivariate=True)

    def _rebuild(self) -> None:
        """The in-memory study from what we know, in trial order: .1 ms a trial."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(directions=self._directions, sampler=self._make(self._seed))
        self._numbers: dict[int, int] = {}
        self._stale = 0
        for number, told in sorted(self._trials.items()):
            self._add_to_study(number, told)
        self._restore_parents()

    def _add_to_study(self, number: int, told: Told) -> None:
        self._numbers[number] = len(self._study.get_trials(deepcopy=False))
        self._study.add_trial(
            create_trial(
                params=dict(told.params),
                distributions=self._distributions,
                values=None if told.values is None else list(told.values),
                state=TrialState.RUNNING if told.values is None else TrialState.COMPLETE,
                system_attrs=dict(told.state),
            )
        )

    def _restore_parents(self) -> None:
        """NSGA-II looks its parents up generation by generation, recursively: too deep at 10,000 trials unless each
        generation's parents are cached in turn."""
        sampler = self._study.sampler
        if isinstance(sampler, optuna.samplers.NSGAIISampler):
            last = max((told.state.get(_GENERATION, 0) for told in self._trials.values()), default=0)
            for generation in range(1, last + 1):
                sampler.get_parent_population(self._study, generation)
