"""The card of a trial with windows and routing, and of one stored before the record had its deployed diagram."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dashboard import data, details, style
from nas.registry import linear_mixers
from nas.search.records import facts
from nas.store import Store
from search_spaces.designs import Fixed, candidate
from search_spaces.loading import parse_space, read_text


@pytest.fixture
def snapshot(tmp_path: Path) -> data.Snapshot:
    """A study of two trials: one with windows, and one whose facts lack the key `deployed_diagram`."""
    content = yaml.safe_load(read_text("cpu-demo").replace("4:1", "'4:1'").replace("2:1", "'2:1'").replace('"', ""))
    content["backbones"] = ["gated_deltanet", ["kda", "sliding_window"]]
    content["proxy"]["mixers"]["sliding_window"] = {"window": 16}
    content["proxy"]["intermediate_size"] = 128
    content["routing"] = ["none", "cler:head"]
    space = parse_space(yaml.safe_dump(content), "windows")
    url = f"sqlite:///{tmp_path}/nas.db"
    with Store.open(url) as store:
        info = store.create_study("windows", space.canonical(), space.digest, 0)
        for backbone, routing in (("kda+sliding_window", "cler:head"), ("gated_deltanet", "none")):
            params = {"backbone": backbone, "ratio": "4:1", "placement": "late", "kv_groups": 1, "routing": routing}
            found = candidate(space, Fixed({**params, "optimizer": "muon", "lr_muon": 1e-2}))
            known = facts(space, found)
            if backbone == "gated_deltanet":
                del known["deployed_diagram"]
            store.add_trial(
                info.id,
                candidate=found.canonical(),
                candidate_digest=found.digest,
                architecture_digest=found.architecture.digest,
                params=params,
                sampler_state={},
                facts=known,
                prior="sampled",
            )
    return data.snapshot(url, data.studies(url)[0])


def blocks(card: str, record: style.Record) -> list[str]:
    """The colours of every layer drawn: of the proxy, then at the Deployment."""
    rows = card.split('<div class="nas-blocks">')[1:]
    return [row.split("</div></div>")[0] for row in rows]


def test_windows_are_drawn_at_both_scales_and_the_routing_is_named(snapshot: data.Snapshot) -> None:
    record = snapshot.records[0]
    card = details.card(record, snapshot)
    proxy, deployed = blocks(card, record)
    assert proxy.count(style.FAINT) == 1
    assert deployed.count(style.FAINT) == record["deployed_diagram"].count("w") > 1
    assert deployed.count("background:") == 24
    assert "Window attention" in card
    assert "cler:head" in card


def test_a_trial_without_the_key_is_drawn_by_its_full_layers(snapshot: data.Snapshot) -> None:
    record = snapshot.records[1]
    assert "deployed_diagram" not in record
    _, deployed = blocks(details.card(record, snapshot), record)
    assert deployed.count(style.colour(())) == len(record["full_attention_layers"]) == 6
    assert deployed.count(style.colour(["gated_deltanet"])) == 18


def test_every_mixer_of_ours_has_a_colour_of_its_own() -> None:
    assert len({style.colour([name]) for name in linear_mixers()}) == len(linear_mixers())
