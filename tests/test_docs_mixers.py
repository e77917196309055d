"""docs/mixers.md says what the registry does: names, rules and sources by letter, formulas by value."""

from __future__ import annotations

import itertools
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import ValidationError

from nas import registry
from nas.architecture import ROUTINGS, Architecture, LayerSpec, Routing
from nas.cost import cost, parameters, routing_parameters
from nas.registry import Dims, get_mixer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "mixers.md").read_text(encoding="utf-8")
CONTEXT = 50


def table(first: str) -> list[dict[str, str]]:
    """The rows of the table whose first column is `first`, by column."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    head, _, *body = cells
    assert all(len(row) == len(head) for row in body)
    return [dict(zip(head, row, strict=True)) for row in body]


def spans(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]*)`", cell)


def value(formula: str, x: Dims, **more: int) -> int:
    """A formula of the page at the sizes `x`."""
    names = {"d": x.d, "H": x.heads, "K": x.head, "Hv": x.value_heads, "V": x.value_head, "G": x.kv_heads, "c": x.conv}
    found: int = eval(formula, {"__builtins__": {}, "round": round}, names | more)
    return found


MIXERS = {spans(row["name"])[0]: row for row in table("name")}
ROUTING = {spans(row["kind"])[0]: row for row in table("kind")}


def layers(name: str) -> list[tuple[LayerSpec, int]]:
    """Layers of many sizes that the mixer takes, each with a hidden size."""
    found = []
    axes = ((32, 48), (1, 2, 4), (8, 16, 24), (0.5, 1.0, 2.0), (None, 4), (None, 1, 2), (0, 3), (None, True), (None, 7))
    names = ("head_dim", "expand_v", "value_heads", "kv_heads", "conv_size", "qk_norm", "window")
    for hidden, heads, *sizes in itertools.product(*axes):
        try:
            layer = LayerSpec.model_validate({"mixer": name, "heads": heads, **dict(zip(names, sizes, strict=True))})
            found.append((layer, stack(hidden, layer).hidden_size))
        except ValidationError:
            continue
    assert len(found) >= 6, name
    return found


def stack(hidden: int, *found: LayerSpec, routing: str = "none") -> Architecture:
    return Architecture(
        vocab_size=7, hidden_size=hidden, intermediate_size=40, layers=found, routing=Routing.parse(routing)
    )


def test_every_mixer_has_a_line() -> None:
    assert [*MIXERS] == [mixer.name for mixer in registry._MIXERS]


@pytest.mark.parametrize("name", MIXERS)
def test_names_rules_and_sources(name: str) -> None:
    row, mixer = MIXERS[name], get_mixer(name)
    assert row["title"] == mixer.title
    assert spans(row["update rule"]) == [mixer.update_rule]
    assert row["source"] == mixer.source
    expected = set(mixer.options)
    expected |= {"conv_size"} if mixer.takes_convolution else set()
    expected |= {"expand_v"} if mixer.family == "linear" and not mixer.square_heads else set()
    assert set(spans(row["options"])) == expected
    if mixer.takes_convolution:
        assert row["options"].endswith(f"`conv_size` {mixer.conv_size}")


@pytest.mark.parametrize("name", MIXERS)
def test_formulas(name: str) -> None:
    row, mixer = MIXERS[name], get_mixer(name)
    (state,), (kept,), (flops,) = (spans(row[key]) for key in ("state", "convolution, shift", "P1's FLOPs"))
    own, *more = spans(row["parameters"])
    assert row["state"].endswith(" a token") == (mixer.family == "softmax")
    for layer, hidden in layers(name):
        x = Dims.of(layer, hidden)
        sizes = mixer.attention_state(x) if mixer.family == "softmax" else mixer.recurrent_state(x)
        assert value(state, x) == sizes, layer
        assert value(kept, x) == mixer.convolution_state(x), layer
        norm = value(more[0], x) if layer.qk_norm else 0
        assert value(own, x) + norm == mixer.parameters(x), layer
        bounds = value(more[0], x) if "lower bounds" in row["parameters"] else 0
        assert bounds == mixer.lower_bounds(x), layer
        length = min(CONTEXT, layer.window or CONTEXT)
        assert value(flops, x, L=length) == cost(stack(hidden, layer), CONTEXT).p1_mixer_flops_per_token, layer


@pytest.mark.parametrize("name", MIXERS)
def test_layers_and_tests_exist(name: str) -> None:
    row = MIXERS[name]
    spec = find_spec("fla")  # found, not imported: that takes seconds and torch
    assert spec is not None
    assert spec.origin is not None
    sources = [path.read_text(encoding="utf-8") for path in (Path(spec.origin).parent / "layers").glob("*.py")]
    for layer in spans(row["layer"]):
        assert any(f"class {layer}(" in source for source in sources), layer
    assert bool(spans(row["layer"])) == (name != "softmax")
    for test in row["tests"].split(", "):
        assert (ROOT / "tests" / "models" / f"{test}.py").is_file(), test


def test_what_the_page_names_exists() -> None:
    for name in set(re.findall(r"test_\w+", PAGE)):
        assert [*(ROOT / "tests").rglob(f"{name}.py")], name
    for path in re.findall(r"`((?:tests|nas|examples)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path


def test_every_routing_has_a_line() -> None:
    assert [*ROUTING] == ["none", "clvr", "clvr:RANK", *(label for label in ROUTINGS if label not in ("none", "clvr"))]


@pytest.mark.parametrize("kind", ROUTING)
@pytest.mark.parametrize("name", ["gated_deltanet", "deltanet"])
def test_routing_parameters(kind: str, name: str) -> None:
    own, *lowest = spans(ROUTING[kind]["parameters of a routed layer"])
    for layer, hidden in layers(name):
        design = stack(hidden, layer, layer, routing=kind.replace("RANK", "4"))
        plain = stack(hidden, layer, layer)
        x = Dims.of(layer, hidden)
        first = value(lowest[0] if lowest else own, x, r=4)
        assert parameters(design) - parameters(plain) == first + value(own, x, r=4)
        if kind != "wide_ffn":  # whose parameters are the MLP's
            assert routing_parameters(design, 1, x) == value(own, x, r=4)


def test_delta_rule_layers_are_named() -> None:
    named = re.search(r"Only delta-rule layers are routed:\n?([^.]*)\.", PAGE)
    assert named is not None
    expected = [mixer.name for mixer in registry._MIXERS if mixer.delta_rule]
    assert [name.strip() for name in named[1].split(",")] == expected


def test_the_figures_of_the_text() -> None:
    chunkwise = next(span for span in spans(PAGE) if span.startswith("6*K*K"))
    x = Dims(d=1, heads=1, head=128, value_heads=1, value_head=128, kv_heads=1, conv=0)
    assert f"{value(chunkwise, x, C=64):,} at K = 128" in PAGE
    assert f"the count by state gives {value('8*K*V', x):,}" in PAGE
    sizes = re.search(r"`heads: 1, head_dim: 128, value_heads: 32, expand_v: 0.5`", PAGE)
    assert sizes is not None
    mamba = LayerSpec(mixer="mamba2", heads=1, head_dim=128, value_heads=32, expand_v=0.5, conv_size=4)
    found = Dims.of(mamba, 1024)
    assert (found.value, found.value_head, found.key) == (2 * 1024, 64, 128)
