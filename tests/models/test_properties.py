"""Properties of any architecture: its JSON, digest, other depths and memory; a model of it survives a round trip."""

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nas.architecture import ROUTINGS, Architecture, LayerSpec, Routing
from nas.cost import cache_bytes, cost, parameters
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
from nas.registry import get_mixer, mixers

LABELS = (*ROUTINGS, "clvr:3", "cler_h:2", "self_transform:1", "clvr+linear", "wide_ffn+linear")
lean = settings(max_examples=50, deadline=None, derandomize=True)


@st.composite
def layer_specs(draw: st.DrawFn, hidden: int) -> LayerSpec:
    """Any layer that `hidden` allows."""
    mixer = get_mixer(draw(st.sampled_from(list(mixers()))))
    heads = draw(st.sampled_from([1, 2, 4]))
    fields: dict[str, Any] = {"heads": heads, "head_dim": draw(st.sampled_from([2, 4, 6, 16]))}
    if mixer.square_heads:
        fields["head_dim"] = hidden // heads
    elif mixer.family == "linear":
        fields["expand_v"] = draw(st.sampled_from([0.5, 1.0, 1.5, 2.0]))
    if mixer.takes_convolution:
        fields["conv_size"] = draw(st.sampled_from([1, 4] if mixer.needs_convolution else [0, 2, 4]))
    choices = {
        "value_heads": st.sampled_from([None, heads, 3 * heads]),
        "kv_heads": st.sampled_from([None, 1, heads]),
        "window": st.sampled_from([None, None, 1, 5, 1000]),
        "rope_theta": st.sampled_from([None, 1e4, 5e5]),
        "qk_norm": st.sampled_from([None, True]),
    }
    fields |= {name: draw(choice) for name, choice in choices.items() if name in mixer.options}
    return LayerSpec(mixer=mixer.name, **fields)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Any stack of 1 to 8 layers with any routing that it can have."""
    hidden = draw(st.sampled_from([8, 16, 48]))
    fields = {
        "vocab_size": draw(st.integers(1, 40)),
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(1, 30)),
        "layers": tuple(draw(st.lists(layer_specs(hidden), min_size=1, max_size=8))),
        "tie_word_embeddings": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
    }
    return Architecture(**fields, routing=draw(st.sampled_from([x for x in routings() if fits(fields, x)])))


def routings() -> list[Routing]:
    return [Routing.parse(label) for label in LABELS]


def fits(fields: dict[str, Any], routing: Routing) -> bool:
    try:
        Architecture(**fields, routing=routing)
    except ValidationError:
        return False
    return True


def reordered(value: Any) -> Any:
    """The same JSON with the keys of every object in the other order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(x) for x in value] if isinstance(value, list) else value


@lean
@given(architectures())
def test_json_round_trip(design: Architecture) -> None:
    assert Architecture.model_validate_json(design.canonical_json()) == design
    again = Architecture.model_validate(reordered(design.canonical()))
    assert again == design
    assert again.digest == design.digest
    assert Routing.parse(design.routing.label) == design.routing


@settings(lean, max_examples=3)
@given(st.lists(architectures(), min_size=12, max_size=12))
def test_digests_are_equal_in_another_process(designs: list[Architecture]) -> None:
    code = (
        "import sys; from nas.architecture import Architecture\n"
        "for line in sys.stdin: print(Architecture.model_validate_json(line).digest)"
    )
    lines = "\n".join(design.canonical_json() for design in designs)
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=lines, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [design.digest for design in designs]


@lean
@given(architectures(), st.integers(1, 40))
def test_other_depths(design: Architecture, depth: int) -> None:
    layers = len(design.layers)
    assert design.at(layers) == design
    if depth < layers:  # the layers that are routed may be lost, which at() refuses: see test_architecture.py
        design = design.model_copy(update={"routing": Routing()})
    other = design.at(depth)
    assert len(other.layers) == depth
    assert other.model_copy(update={"layers": design.layers}) == design
    assert set(other.layers) <= set(design.layers)
    full = len(design.full_attention_layers)
    assert len(other.full_attention_layers) == (max(1, full * depth // layers) if full else 0)


@lean
@given(
    architectures(), st.lists(st.integers(1, 2000), min_size=2, max_size=5), st.sampled_from(["float32", "bfloat16"])
)
def test_memory_grows_with_the_context(design: Architecture, contexts: list[int], dtype: Any) -> None:
    held = [cost(design, context, dtype).kv_cache_bytes for context in sorted(contexts)]
    assert held == sorted(held)
    assert held[0] == sum(cache_bytes(design, min(contexts), dtype))


@lean
@given(architectures(), st.randoms(use_true_random=False))
def test_memory_grows_with_the_full_layers(design: Architecture, random: Any) -> None:
    """Layer by layer becomes full attention, at a context at which that outweighs any state drawn here."""
    full = LayerSpec(mixer="softmax", heads=1, head_dim=2)
    layers, held = list(design.layers), []
    others = [i for i, layer in enumerate(layers) if not layer.is_full_attention]
    random.shuffle(others)
    for index in [None, *others]:
        if index is not None:
            layers[index] = full
        stack = Architecture(vocab_size=8, hidden_size=design.hidden_size, intermediate_size=8, layers=tuple(layers))
        held.append(cost(stack, 2**20).kv_cache_bytes)
    assert held == sorted(set(held))


@settings(lean, max_examples=10)
@given(architectures())
def test_a_model_survives_saving_and_loading(design: Architecture) -> None:
    torch.manual_seed(0)
    model = HybridForCausalLM(HybridConfig(architecture=design.canonical())).eval()
    assert sum(p.numel() for p in model.parameters()) == parameters(design)
    ids = torch.randint(design.vocab_size, (2, 9))
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
        expected = model(ids).logits
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = HybridForCausalLM.from_pretrained(folder).eval()
        assert Architecture.model_validate(loaded.config.architecture) == design
        assert torch.isfinite(expected).all()
        assert torch.equal(loaded(ids).logits, expected)
