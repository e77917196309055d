"""Spaces of patterns, windows and routings, searched on a simulated pool, and designs of them enqueued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nas.architecture import Candidate
from nas.checks import LaunchError, read_designs
from nas.export.card import drawing
from nas.search.sampler import complete_params
from nas.search.simulator import SimulatedPool
from nas.service import Request, Result, launch
from search_spaces import SearchSpace
from search_spaces.designs import Fixed, architectures, candidate, labelled_baselines

LABELS = {"gla", "gated_deltanet+gla", "kda+kda+sliding_window"}


@pytest.fixture
def patterns(space: SearchSpace) -> SearchSpace:
    """cpu-demo with patterns, a window and every kind of routing."""
    content = space.canonical() | {
        "backbones": ["gla", ["gated_deltanet", "gla"], ["kda", "kda", "sliding_window"]],
        "routing": ["none", "clvr", "cler:head", "clvr:4+linear", "wide_ffn"],
    }
    content["proxy"]["mixers"]["sliding_window"] = {"window": 16}
    content["proxy"]["intermediate_size"] = 128
    return SearchSpace.model_validate(content)


def run(space: SearchSpace, folder: Path, trials: int) -> Result:
    request = Request(space=space, study="s", storage=f"sqlite:///{folder}/nas.db", trials=trials, seed=1)
    return launch(request, pool=lambda plan: SimulatedPool(2))


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_a_study_of_patterns_runs_and_goes_on(patterns: SearchSpace, tmp_path: Path, sampler: str) -> None:
    space = patterns.model_copy(update={"sampler": sampler})
    first = run(space, tmp_path, 12)
    result = run(space, tmp_path, 20)
    assert len(result.records) == 20
    assert [r["candidate_digest"] for r in result.records[:12]] == [r["candidate_digest"] for r in first.records]
    assert len({r["candidate_digest"] for r in result.records}) == 20
    names = [r["name"] for r in result.records[:4]]
    assert names == [
        "Full attention",
        "GLA pure",
        "Gated DeltaNet + GLA pure",
        "2 Kimi Delta Attention + SWA16 pure",
    ]
    assert {r["routing"] for r in result.records} <= set(space.routing)
    assert {tuple(r["backbones"]) for r in result.records} > {(), ("gla",), ("gated_deltanet", "gla"), ("kda",)} - {()}


def test_what_is_stored_gives_the_designs_again(patterns: SearchSpace, tmp_path: Path) -> None:
    from nas.store import Store

    run(patterns, tmp_path, 16)
    with Store.open(f"sqlite:///{tmp_path}/nas.db", read_only=True) as store:
        info = store.study("s")
        rows = store.trials(info.id)
    again = SearchSpace.model_validate(info.space)
    assert again == patterns
    assert {row.params["backbone"] for row in rows if row.params} == LABELS
    for row in rows:
        if row.params:
            assert candidate(again, Fixed(row.params)).digest == row.candidate_digest


@pytest.mark.parametrize("ratios", [["pure", "2:1"], ["2:1"]])
@pytest.mark.parametrize("routing", [["clvr", "none"], ["clvr"]])
def test_a_baselines_parameters_give_the_baseline(patterns: SearchSpace, routing: list[str], ratios: list[str]) -> None:
    fields = {"kv_groups": [2], "routing": routing, "ratios": ratios, "placements": ["early", "interleaved"]}
    space = SearchSpace.model_validate(patterns.canonical() | fields)
    known = 0
    for params, baseline in labelled_baselines(space):
        kv_heads = {x.kv_heads for x in baseline.architecture.layers if x.is_softmax}
        assert kv_heads <= {baseline.architecture.layers[0].heads // 2, space.proxy.heads // 2}
        if params:
            known += 1
            assert candidate(space, Fixed(complete_params(space, params))).digest == baseline.digest
    # all pure backbones where the space has pure stacks and "none"; else only those that take no routing anyway
    assert (known > 1) == (ratios[0] == "pure" and "none" in routing)


def enqueue(space: SearchSpace, folder: Path, text: str) -> Candidate:
    (folder / "designs.yaml").write_text(f"- {text}\n")
    ((found, _),) = read_designs(str(folder / "designs.yaml"), space)
    return found


def test_designs_are_enqueued_by_their_labels(patterns: SearchSpace, tmp_path: Path) -> None:
    found = enqueue(patterns, tmp_path, '{backbone: gated_deltanet+gla, ratio: "4:1", routing: clvr:4+linear}')
    assert found.architecture.backbones == ("gated_deltanet", "gla")
    assert found.architecture.routing.label == "clvr:4+linear"
    found = enqueue(patterns, tmp_path, "{backbone: kda+kda+sliding_window, ratio: pure, kv_groups: 2}")
    assert (found.architecture.diagram, found.architecture.layers[2].kv_heads) == ("--w-", 1)


@pytest.mark.parametrize(
    ("design", "message"),
    [
        ("{backbone: gla, routing: clvr}", "enqueue[0].routing clvr does not apply to backbone gla"),
        ("{backbone: kda}", "enqueue[0].backbone='kda' is not in this space; allowed: gla, gated_deltanet+gla, kda+"),
        ("{backbone: [kda, gla]}", "enqueue[0].backbone=['kda', 'gla'] is not in this space"),
        ("{backbone: gla, ratio: pure, kv_groups: 1}", "enqueue[0].kv_groups does not apply to ratio pure"),
        ("{routing: clvr:8}", "enqueue[0].routing='clvr:8' is not in this space; allowed: none, clvr, cler:head"),
    ],
)
def test_designs_that_cannot_be_are_refused(patterns: SearchSpace, tmp_path: Path, design: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        enqueue(patterns, tmp_path, design)
    assert message in str(caught.value)


def test_a_plain_none_may_be_given_to_a_delta_rule_backbone(space: SearchSpace, tmp_path: Path) -> None:
    plain = SearchSpace.model_validate(space.canonical() | {"routing": ["none"]})
    assert enqueue(plain, tmp_path, "{backbone: gated_deltanet, routing: none}").architecture.routing.kind == "none"


def test_a_model_card_draws_windows_and_routing(patterns: SearchSpace) -> None:
    wanted: dict[str, Any] = {"backbone": "kda+kda+sliding_window", "ratio": "4:1", "placement": "late", "kv_groups": 2}
    params = wanted | {"routing": "cler:head", "optimizer": "muon", "lr_muon": 1e-2}
    lines = drawing(candidate(patterns, Fixed(params)).architecture).splitlines()
    assert lines[0] == "  0 -------- Kimi Delta Attention (2 x 32) -> cler:head"
    assert lines[2] == "  2 wwwwwwww Softmax attention (2 x 32, 1 KV head, window 16)"
    assert lines[3] == "  3 ######## Softmax attention (2 x 32, 1 KV head)"


def test_all_designs_of_a_space_of_patterns_differ(patterns: SearchSpace) -> None:
    found = architectures(patterns)
    assert len({design.digest for design in found}) == len(found)
    assert {design.routing.label for design in found} == set(patterns.routing)
