"""The Optuna seam: nothing repeated, nothing over budget, every sampler learns, rebuilt at any size."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from nas.search.sampler import NoProposal, Sampler, Told, complete_params, distributions
from search_spaces import SearchSpace


def with_sampler(space: SearchSpace, name: str, **changes: object) -> SearchSpace:
    return space.model_validate(space.canonical() | {"sampler": name} | changes)


@pytest.mark.parametrize("name", ["tpe", "nsga2", "random"])
def test_proposals_are_new_and_a_function_of_seed_and_number(space: SearchSpace, name: str) -> None:
    chosen = with_sampler(space, name)
    one, two, other = Sampler(chosen, seed=1), Sampler(chosen, seed=1), Sampler(chosen, seed=2)
    first = [one.ask(n).candidate.digest for n in range(30)]
    assert len(set(first)) == 30
    assert [two.ask(n).candidate.digest for n in range(30)] == first
    assert [other.ask(n).candidate.digest for n in range(30)] != first


@pytest.mark.parametrize("name", ["tpe", "nsga2"])
def test_samplers_move_away_from_backbones_that_lose_early(space: SearchSpace, name: str) -> None:
    """RetNet and GLA are told a poor recall, as pruned trials are; later proposals avoid them."""
    sampler = Sampler(with_sampler(space, name), seed=0)
    late: Counter[object] = Counter()
    for number in range(200):
        proposal = sampler.ask(number)
        backbone = proposal.params["backbone"]
        sampler.tell(number, (0.9 if backbone in ("deltanet", "gated_deltanet") else 0.1, -2.0))
        if number >= 140:
            late[backbone] += 1
    assert late["deltanet"] + late["gated_deltanet"] > 0.75 * late.total()


@pytest.mark.parametrize("name", ["tpe", "nsga2"])
def test_samplers_avoid_what_diverges(space: SearchSpace, name: str) -> None:
    sampler = Sampler(with_sampler(space, name), seed=0)
    late: Counter[object] = Counter()
    for number in range(160):
        proposal = sampler.ask(number)
        optimizer = proposal.params["optimizer"]
        sampler.tell(number, (0.0, -2.0) if optimizer == "muon" else (0.5, -2.0))
        if number >= 110:
            late[optimizer] += 1
    assert late["adamw"] > 0.7 * late.total()


@pytest.mark.parametrize("name", ["tpe", "nsga2"])
def test_a_rebuilt_sampler_goes_on_as_the_old_one(space: SearchSpace, name: str) -> None:
    chosen = with_sampler(space, name)
    sampler = Sampler(chosen, seed=3)
    past: dict[int, Told] = {}
    digests = []
    for number in range(120):
        proposal = sampler.ask(number)
        values = (len(proposal.candidate.architecture.full_attention_layers) / 4, -float(number % 7))
        sampler.tell(number, values)
        past[number] = Told(proposal.params, proposal.state, values)
        digests.append(proposal.candidate.digest)
    rebuilt = Sampler(chosen, seed=3, past=past, tried=digests)
    proposals = [rebuilt.ask(number) for number in range(120, 130)]
    assert not {p.candidate.digest for p in proposals} & set(digests)
    if name == "nsga2":
        generations = [told.state["NSGAIISampler:generation"] for told in past.values()]
        assert max(generations) == 2
        assert proposals[0].state["NSGAIISampler:generation"] >= max(generations)
        assert proposals[0].params == sampler.ask(120).params


def test_nsga2_is_rebuilt_at_ten_thousand_trials(space: SearchSpace) -> None:
    """Plain NSGA-II recurses through all 200 generations then (design.md 1)."""
    chosen = with_sampler(space, "nsga2")
    params = complete_params(space, {})
    past = {
        n: Told(
            params | {"lr_adamw": 2e-3 + n * 1e-7}, {"NSGAIISampler:generation": n // 50}, (n % 17 / 17, -float(n % 5))
        )
        for n in range(10_000)
    }
    began = time.perf_counter()
    proposal = Sampler(chosen, seed=0, past=past).ask(10_000)
    assert time.perf_counter() - began < 30
    assert proposal.state["NSGAIISampler:generation"] == 200


def test_a_later_rung_replaces_an_earlier_value(space: SearchSpace) -> None:
    sampler = Sampler(space, seed=0)
    for number in range(20):
        sampler.ask(number)
        sampler.tell(number, (0.1, -1.0))
    for number in range(20):
        sampler.tell(number, (0.8, -1.0))
    sampler.ask(20)  # rebuilds
    told = [t.values for t in sampler._study.get_trials(deepcopy=False) if t.values]
    assert told == [[0.8, -1.0]] * 20


def test_a_running_trial_is_known_but_has_no_value(space: SearchSpace) -> None:
    sampler = Sampler(space, seed=0, past={0: Told(complete_params(space, {}))})
    sampler.tell(0, (0.5, -1.0))
    sampler.tell(99, (0.5, -1.0))  # unknown to the sampler: full attention
    assert [t.values for t in sampler._study.get_trials(deepcopy=False)] == [[0.5, -1.0]]


def test_the_budget_bounds_proposals(space: SearchSpace) -> None:
    tight = space.model_validate(space.canonical() | {"budget": {"kv_cache": "13%"}})
    sampler = Sampler(tight, seed=0)
    for number in range(25):
        assert tight.deployment.kv_cache_ratio(sampler.ask(number).candidate.architecture) <= 0.13


def test_nothing_left_is_said(space: SearchSpace) -> None:
    tiny = space.model_validate(
        space.canonical()
        | {
            "backbones": ["gla"],
            "ratios": ["pure"],
            "kv_groups": [1],
            "optimizers": {"adamw": {"lr": [1e-3]}},
        }
    )
    sampler = Sampler(tiny, seed=0)
    sampler.ask(0)
    with pytest.raises(NoProposal, match="100 proposals"):
        sampler.ask(1)


def test_every_parameter_is_in_every_trial(space: SearchSpace) -> None:
    proposal = Sampler(space, seed=0).ask(0)
    assert set(proposal.params) == set(distributions(space)) == set(complete_params(space, {}))
