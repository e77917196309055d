"""Cross-layer routing: silent at initialisation, to the letter of its definitions, the same in every mode."""

import copy
import itertools
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nas.architecture import Recipe
from nas.cost import parameters
from nas.models import cpu_kernels, routing
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
from nas.training.optimizers import HybridOptimizer
from tests.models.routing_reference import (
    BARE,
    DELTA,
    MIXED,
    ROUTINGS,
    STACK,
    WIDE,
    build,
    by_definition,
    convolved,
    delta_layer,
    design,
    mamba2_x,
    projected,
    tokens,
)


@pytest.mark.parametrize("label", ROUTINGS + WIDE)
def test_bit_equal_at_initialisation(label: str) -> None:
    ids = tokens(2, 70)
    plain, routed = build(*STACK), build(*STACK, label=label)
    weights = dict(routed.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, weights.pop(name)), name
    assert {name.split(".")[3] for name in weights} == {"widening" if label in WIDE else "route"}
    assert torch.equal(plain(ids).logits, routed(ids).logits)
    assert torch.equal(plain.train()(ids).logits, routed.train()(ids).logits)
    random = ("gate_proj", "up_proj", "route.down")
    assert all(p.std() > 0.1 if any(x in name for x in random) else torch.all(p == 0) for name, p in weights.items())
    drawn = [p for name, p in weights.items() if any(x in name for x in random)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2) if a.shape == b.shape)
    again = dict(build(*STACK, label=label).named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in weights.items())


@pytest.mark.parametrize("label", ROUTINGS + WIDE)
def test_parameters_equal_the_formula(label: str) -> None:
    for kinds in (STACK, MIXED, ("softmax", "kda_bare")):
        model = build(*kinds, label=label)
        assert sum(p.numel() for p in model.parameters()) == parameters(design(*kinds, label=label)), kinds


def test_the_wide_control_is_as_large_as_value_routing() -> None:
    """To within 1.5 hidden sizes a routed layer, and only there."""
    plain, wide, routed = (build(*STACK, label=label) for label in ("none", "wide_ffn", "clvr"))
    for i, (a, b, c) in enumerate(zip(plain.model.layers, wide.model.layers, routed.model.layers, strict=True)):
        count = [sum(p.numel() for p in block.parameters()) for block in (a, b, c)]
        assert (count[1] > count[0]) == (STACK[i] in DELTA)
        assert abs(count[1] - count[2]) <= 48


@torch.no_grad()
def test_the_wide_control_is_one_wider_mlp() -> None:
    block = build("kda", label="wide_ffn").model.layers[0]
    torch.nn.init.normal_(block.widening.down_proj.weight)
    x, more = torch.randn(2, 5, 32), block.widening
    gate, up = (torch.cat([getattr(m, n).weight for m in (block.mlp, more)]) for n in ("gate_proj", "up_proj"))
    down = torch.cat([block.mlp.down_proj.weight, more.down_proj.weight], 1)
    torch.testing.assert_close(block.mlp(x) + more(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    hidden, _ = block(x)
    block.widening = None
    assert (hidden - block(x)[0]).abs().max() > 0.1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("label", [label for label in ROUTINGS if "+" not in label])
def test_equals_its_definition(label: str, training: bool) -> None:
    """At lengths of both kinds of kernel, in float64 but for Gated DeltaNet-2's decay, which fla rounds to float32.

    CLER's error, and in training its gradient, is carried over softmax and GLA.
    """
    kinds = (*STACK, "gated_deltanet_bare", "softmax", "kda_bare")
    model = build(*kinds, label=label, opened=True).double().train(training)
    for length in (1, 70):
        ids = tokens(2, length)
        with torch.set_grad_enabled(training):
            found, expected = model(ids).logits, by_definition(model, kinds, label, ids)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    if training:
        both = [torch.autograd.grad(x.square().mean(), list(model.parameters())) for x in (found, expected)]
        for (name, _), got, want in zip(model.named_parameters(), *both, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4, msg=name)
    assert (found - build(*kinds).double()(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("kind", DELTA)
def test_error_has_the_gradients_of_its_definition(kind: str) -> None:
    block = build(kind, kind, label="cler:head", opened=True).double().model.layers[0]
    x = torch.randn(2, 67, 32, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 67, 64, dtype=torch.float64)
    used = [x, *(p for p in block.attn.parameters())]
    _, error = block(x)
    _, _, expected = delta_layer(block.attn, kind, block.attn_norm(x), None)
    torch.testing.assert_close(error, expected, atol=1e-6, rtol=1e-5)
    for got, want in zip(
        torch.autograd.grad((error * weights).sum(), used, allow_unused=True),
        torch.autograd.grad((expected * weights).sum(), used, allow_unused=True),
        strict=True,
    ):
        assert (got is None or torch.all(got == 0)) if want is None else torch.allclose(got, want, 1e-5, 1e-6)


def test_other_linear_layers_route_the_value_of_their_kernel() -> None:
    """`scope: linear`: GLA's and RetNet's value projection, HGRN's gated input, Mamba-2's x."""
    model = build(*MIXED, label="clvr+linear", opened=True).double()
    hidden = torch.randn(2, 70, 32, dtype=torch.float64)
    for kind, block in zip(MIXED, model.model.layers, strict=True):
        x, mixer = block.attn_norm(hidden), block.attn
        if kind == "gla":
            value = projected(mixer, "v", x)
        elif kind == "retnet":
            value = mixer.v_proj(x)
        elif kind == "hgrn":
            value = projected(mixer, "i", x) * (1 - convolved(mixer, "f", x).sigmoid())
        elif kind == "mamba2":
            value = mamba2_x(mixer, x)
        else:
            assert (block.route is not None) == (kind not in ("softmax", "window"))
            continue
        routed, route, block.route = block(hidden)[0], block.route, None
        expected = block(hidden)[0] + value @ route.up.weight.T
        torch.testing.assert_close(routed, expected, atol=1e-9, rtol=1e-9, msg=kind)


@torch.no_grad()
@pytest.mark.parametrize("label", ROUTINGS)
def test_decoding_and_padding(label: str) -> None:
    kinds = MIXED if "linear" in label else (*STACK, "deltanet_bare", "window")
    model, ids = build(*kinds, label=label, opened=True).double(), tokens(3, 80)
    whole, mask = model(ids).logits, torch.arange(80) >= 80 - torch.tensor([80, 51, 9])[:, None]
    cache, pieces = None, []
    for part in ids.split([33, 1, 1, 40, 5], 1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-8, rtol=1e-8)
    alone = [model(row[keep][None]).logits[0] for row, keep in zip(ids, mask, strict=True)]
    outputs = model(ids[:, :77], attention_mask=mask[:, :77].long(), use_cache=True)
    pieces, cache = [outputs.logits], outputs.past_key_values
    for t in range(77, 80):
        step = model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1].long(), past_key_values=cache, use_cache=True)
        pieces.append(step.logits)
    for row, keep, expected in zip(torch.cat(pieces, 1), mask, alone, strict=True):
        torch.testing.assert_close(row[keep], expected, atol=1e-8, rtol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("label", ROUTINGS)
def test_no_position_sees_the_future(label: str) -> None:
    model, ids = build(*MIXED, label=label, opened=True), tokens(1, 70)
    changed = ids.clone()
    changed[:, 41:] = (changed[:, 41:] + 1) % 50
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :41], after[:, :41], atol=1e-5, rtol=1e-5)
    assert (before[:, 41:] - after[:, 41:]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("label", ["clvr", "cler:channel", "cler_h"])
def test_packed_sequences_are_separate(label: str) -> None:
    ids = tokens(1, 60)
    for kinds, bounds in ((DELTA, [0, 7, 8, 60]), (DELTA, [0, 7, 7, 8, 60, 60]), (BARE, [0, 0, 7, 8, 60])):
        model = build(*kinds, label=label, opened=True).double()
        alone = torch.cat([model(part).logits for part in ids.split([7, 1, 52], 1)], 1)
        packed = model(ids, cu_seqlens=torch.tensor(bounds)).logits
        torch.testing.assert_close(packed, alone, atol=1e-8, rtol=1e-8)


@torch.no_grad()
def test_half_precision() -> None:
    model, ids = build(*STACK, label="cler_h", opened=True), tokens(2, 70)
    single = model(ids).logits
    half = copy.deepcopy(model).bfloat16()(ids).logits
    assert half.dtype == torch.bfloat16
    assert (half.float() - single).norm() / single.norm() < 0.1
    torch.testing.assert_close(single, model.double()(ids).logits.float(), atol=1e-3, rtol=1e-3)


def _gradients(model: HybridForCausalLM, ids: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model.train()(ids, labels=ids).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("label", ["clvr:3", "cler:channel", "cler_h", "self_transform+linear"])
def test_gradient_checkpointing_changes_nothing(label: str, reentrant: bool) -> None:
    model, ids = build(*STACK, "window", "deltanet_bare", label=label, opened=True).double(), tokens(2, 20)
    plain = _gradients(model, ids)
    # transformers renamed it within our range of versions
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    for name, a, b in zip(dict(model.named_parameters()), plain, _gradients(model, ids), strict=True):
        torch.testing.assert_close(a, b, msg=name)
        assert a is not None and a.norm() > 0, name
    # on CUDA the backward pass, and with it the second forward pass, runs in another thread
    loss = model(ids, labels=ids).loss
    model.zero_grad()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    for a, parameter in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad)


@pytest.mark.parametrize("label", ROUTINGS + WIDE)
def test_every_kind_trains(label: str) -> None:
    """Its own weights get gradients from the first step on, and a few steps lower the loss of the mixed stack."""
    model, ids = build(*MIXED, label=label).train(), tokens(4, 20)
    losses = []
    for step in range(3):
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            if "route" in name:
                assert (parameter.grad.norm() > 0) == (step > 0 or "down" not in name), name
            parameter.data -= 0.02 * parameter.grad / (parameter.grad.norm() + 1e-6)
    assert losses[0] > losses[1] > losses[2]


def test_optimisers_tell_matrices_from_gains() -> None:
    recipe = Recipe(
        optimizer="muon", lr=0.01, weight_decay=0.1, warmup_steps=1, total_steps=9, batch_size=1, sequence_length=8
    )
    for label, part in (("clvr:3", "muon"), ("cler_h", "muon"), ("self_transform", "muon"), ("cler:channel", "adamw")):
        model = build(*STACK, label=label)
        optimizer = HybridOptimizer(model, recipe, model.lm_head)
        placed = {
            p: (name, g["weight_decay"])
            for name, groups in optimizer.groups.items()
            for g in groups
            for p in g["params"]
        }
        ours = [p for name, p in model.named_parameters() if "route" in name]
        assert ours
        assert {placed[p] for p in ours} == {(part, 0.1 if part == "muon" else 0.0)}


@pytest.mark.parametrize("label", ["clvr:3", "cler:scalar", "cler:channel", "cler_h", "self_transform", "wide_ffn"])
def test_save_and_load(label: str, tmp_path: Path) -> None:
    model, ids = build(*STACK, label=label, opened=True), tokens(2, 20)
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded = HybridForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("label", ["clvr", "cler:head", "cler_h"])
def test_a_copy_is_independent(label: str) -> None:
    model, ids = build(*STACK, label=label, opened=True), tokens(1, 20)
    twin = copy.deepcopy(model)
    expected = model(ids).logits
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(twin(ids).logits, expected)


@pytest.fixture
def second_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The model room's files as another package in this process, as transformers imports those of an export."""
    shutil.copytree(
        Path(routing.__file__).parent, tmp_path / "second_room", ignore=shutil.ignore_patterns("__pycache__")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "second_room"
    for name in [name for name in sys.modules if name.startswith("second_room")]:
        del sys.modules[name]


def test_a_second_copy_of_the_code_routes_too(second_room: str) -> None:
    kinds, ids = ("gated_deltanet", "mamba2", "gla"), tokens(1, 20)
    model = build(*kinds, label="clvr+linear", opened=True)
    config = import_module(f"{second_room}.configuration").HybridConfig(architecture=model.config.architecture)
    twin = import_module(f"{second_room}.modeling").HybridForCausalLM(config).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(ids).logits, model(ids).logits)


def test_a_tap_is_gone_after_an_error_and_seen_in_its_own_thread_only() -> None:
    model, ids = build("gated_deltanet", "deltanet", label="clvr", opened=True), tokens(1, 20)
    expected, calls = model(ids).logits, []

    def tap(kernel: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        calls.append(arguments["v"].shape)
        raise KeyError("stop")

    mixer = build("deltanet").model.layers[0].attn
    thread = threading.Thread(target=lambda: calls.append(mixer(torch.randn(1, 5, 32))[0].shape))

    def here_and_there() -> None:
        with cpu_kernels.tapped(tap):
            thread.start()
            thread.join()
            mixer(torch.randn(1, 5, 32))

    with pytest.raises(KeyError, match="stop"):
        here_and_there()
    assert calls == [(1, 5, 32), (1, 5, 4, 16)]
    assert torch.equal(model(ids).logits, expected)
    with cpu_kernels.tapped(tap), pytest.raises(TypeError, match="4 arguments by position"):
        import_module("fla.layers.delta_net").chunk_delta_rule(*torch.zeros(4, 1, 1, 1, 1))


def test_a_mixer_without_a_kernel_of_fla_is_refused() -> None:
    block = build("gated_deltanet", label="clvr").model.layers[0]
    block.attn.forward = lambda hidden_states, **_: (hidden_states, None, None)
    with pytest.raises(RuntimeError, match="kind='clvr' with mixer 'gated_deltanet': it made 0 calls .*; allowed: 1"):
        block(torch.randn(1, 5, 32))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kind": "clever"}, "kind='clever'; allowed: none, clvr, cler, cler_h, self_transform, wide_ffn"),
        ({"kind": "cler", "gamma": "head"}, "kind='cler' with the layers gla, softmax: needs a delta-rule layer"),
        ({"kind": "cler_h"}, "kind='cler_h' with the layers gla, softmax: needs a delta-rule layer"),
        ({"kind": "cler_h", "scope": "linear"}, "scope='linear' with kind='cler_h'; allowed: 'linear', with clvr"),
        ({"kind": "clvr", "scope": "all"}, "scope='all' with kind='clvr'; allowed: 'linear'"),
        ({"kind": "cler"}, "gamma=None with kind='cler'; allowed: scalar, head, channel"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, str], problem: str) -> None:
    architecture = design("gla", "softmax").canonical() | {"routing": change}
    with pytest.raises(ValueError, match=problem):
        HybridForCausalLM(HybridConfig(architecture=architecture))


def test_cler_refuses_values_of_different_shapes() -> None:
    layers = design("gated_deltanet", "deltanet").canonical()["layers"]
    layers[1]["expand_v"] = 1.0
    with pytest.raises(ValueError, match="kind='cler' needs equal value heads and value head sizes"):
        routing.routed_layers({"layers": layers, "routing": {"kind": "cler", "gamma": "head"}})
