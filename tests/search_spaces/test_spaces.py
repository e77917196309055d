"""Search spaces: presets, strict reading, and the Candidates they hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from search_spaces import SpaceError, load_space
from search_spaces.designs import Fixed, architectures, baselines, candidate, count
from search_spaces.loading import parse_space, read_text


def altered(old: str, new: str, preset: str = "cpu-demo") -> str:
    text = read_text(preset)
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  heads: 2", "  head: 2", "proxy.head: unknown key 'head'; did you mean 'heads'?"),
        ("gla", "glaa", "backbones: 'glaa' is unknown; did you mean 'gla'?"),
        ('"4:1"', '"5:1"', "ratios: '5:1' needs at least 5 layers; proxy.layers=4"),
        ('"4:1"', '"4/1"', "ratios: '4/1' is unknown; allowed: pure, N:1"),
        ('"4:1"', "[1, 4]", "ratios: [1, 4] must be increasing layer positions from 0 to 3"),
        ('"4:1"', '"2:1"', "holds a value twice"),
        ("middle", "centre", "placements: 'centre' is unknown"),
        ("trials: 24", "trials: many", "trials='many'"),
        ("trials: 24", "trials: 0", "trials=0"),
        ("keys: 16", "key: 16", "unknown key 'key'; did you mean 'keys'?"),
        ("keys: 16", "keys: 8", "pairs=16 needs as many different keys; keys=8"),
        ("low: 1.5e-3", "low: 7e-3", "low=0.007 must be below high=0.006"),
        ("low: 1.5e-3", "low: .nan", "finite"),
        ("rungs: {steps: [100, 200, 300]", "rungs: {steps: [100, 300, 200]", "must increase"),
        ("name: cpu-demo", "name: cpu-demo\nname: other", "key 'name' is given twice"),
        ("name: cpu-demo", "name: cpu-demo\nbudget: {kv_cache: lots}", "'lots' is not a memory size"),
        ("kv_groups: [1, 2]", "kv_groups: [1, 3]", "kv_groups: 3 must divide the softmax heads of the proxy, 2"),
        ("sequence_length: 64", "sequence_length: 32", "mqar needs"),
        ("adamw:", "adam:", "optimizers.adam"),
        ("lr: {low: 1.5e-3, high: 6e-3}", "lr: [.inf]", "optimizers.adamw.lr.0=inf: Input should be a finite number"),
        ("lr: {low: 1.5e-3, high: 6e-3}", "lr: {low: 0, high: 1}", "optimizers.adamw.lr.low=0: Input should be gr"),
        ("  layers: 4", "  layers: 1025", "proxy.layers=1025: Input should be less than or equal to 1024"),
        ("hidden_size: 64", "hidden_size: 100000000", "proxy.hidden_size=100000000: Input should be less than"),
        ("head_dim: 32", "head_dim: 33", "proxy: softmax does not fit its sizes: head_dim=33 must be even"),
        ("heads: 2", "heads: 2\n  heads: 2", "key 'heads' is given twice"),
        ("keys: 16", "keys: 65537", "keys=65537: Input should be less than or equal to 65536"),
        ("trials: 24", "trials: " + "9" * 5000, "not valid YAML"),
        ("trials: 24", "trials: 1000001", "trials=1000001: Input should be less than or equal to 1000000"),
        ("trials: 24", "trials: " + "x" * 5000, "trials='xxx"),
        ("trials: 24", "? [1]\n: 2", "key [1] is no name"),
        ("trials: 24", "<<: {trials: 24}", "<<: unknown key '<<'"),
        ("trials: 24", "trials: " + "[" * 3000, "nested too deeply"),
        ("trials: 24", "deployment: {context: 99999999999}", "deployment.context=99999999999 is too large"),
        ("trials: 24", "budget: {kv_cache: " + "9" * 400 + "GiB}", "is not a memory size"),
        ("name: cpu-demo", "name: " + "x" * 65, "name='xxx"),
    ],
)
def test_mistakes_are_one_line_that_names_the_field(old: str, new: str, message: str) -> None:
    with pytest.raises(SpaceError) as caught:
        parse_space(altered(old, new), "mine.yaml")
    text = str(caught.value)
    assert text.startswith("mine.yaml: ")
    assert message in text
    assert "\n" not in text
    assert "http" not in text
    assert len(text) < 600


def test_unknown_preset_and_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match="'cpu-dem' is unknown; did you mean 'cpu-demo'"):
        load_space("cpu-dem")
    with pytest.raises(SpaceError, match="cannot be read"):
        load_space(str(tmp_path / "none.yaml"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpaceError, match="cannot be read"):
        load_space(str(binary))
    for content in ("", "- a", "just text", "{a: b", "a: !!python/object:os.system x"):
        with pytest.raises(SpaceError):
            parse_space(content, "x")


def test_ratios_are_strings_and_rates_numbers_without_quotes() -> None:
    space = parse_space(altered('"4:1"', "4:1"), "x")
    assert space.ratios == ("pure", "4:1", "2:1")


def test_budget_forms() -> None:
    def limit(value: str) -> int:
        space = parse_space(altered("name: cpu-demo", f"name: cpu-demo\nbudget: {{kv_cache: {value}}}"), "x")
        assert space.budget.kv_cache is not None
        return space.budget.kv_cache.limit(space.deployment)

    assert limit("25%") == 1536 * 2**20
    assert limit("512MiB") == 512 * 2**20
    assert limit("1024") == 1024


def test_grid_needs_ladders() -> None:
    with pytest.raises(SpaceError, match="a grid needs a list of learning rates"):
        parse_space(altered("name: cpu-demo", "name: cpu-demo\ngrid: true"), "x")


def test_candidates_follow_their_parameters() -> None:
    space = load_space("cpu-demo")
    params = {
        "backbone": "gated_deltanet",
        "ratio": "2:1",
        "placement": "early",
        "kv_groups": 2,
        "routing": "clvr",
        "optimizer": "muon",
        "lr_muon": 0.01,
    }
    found = candidate(space, Fixed(params))
    assert found.architecture.diagram == "FF--"
    assert found.architecture.kv_heads == 1
    assert found.architecture.routing.kind == "clvr"
    assert found.recipe.optimizer == "muon"
    assert (found.recipe.lr, found.recipe.scalar_lr, found.recipe.total_steps) == (0.01, 3e-3, 300)
    assert found.architecture.layers[2].conv_size == 4
    with pytest.raises(ValueError, match=r"lr_muon=1.0 is not in this space; allowed: 0\.005 to 0\.03"):
        candidate(space, Fixed(params | {"lr_muon": 1.0}))
    with pytest.raises(ValueError, match="backbone='rwkv' is not in this space; allowed: gated_deltanet"):
        candidate(space, Fixed(params | {"backbone": "rwkv"}))


def test_routing_is_only_for_delta_rule_backbones() -> None:
    space = load_space("cpu-demo")
    kinds = {(design.backbones, design.routing.kind) for design in architectures(space) if design.backbones}
    assert (("gated_deltanet",), "clvr") in kinds
    assert (("gla",), "clvr") not in kinds


def test_explicit_positions_and_count() -> None:
    space = parse_space(altered('"4:1"', "[0, 3]"), "x")
    assert (0, 3) in {design.full_attention_layers for design in architectures(space)}
    assert count(space) == math.inf


def test_baselines_are_full_attention_and_each_pure_backbone() -> None:
    space = load_space("cpu-demo")
    found = baselines(space)
    assert found[0].architecture.diagram == "FFFF"
    assert [base.architecture.backbones for base in found[1:]] == [(name,) for name in space.backbones]
    assert all(base.architecture.diagram == "----" for base in found[1:])
    assert [base.recipe.lr for base in found] == pytest.approx([3e-3] * 5)
