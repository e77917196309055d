"""The model as a whole: sizes, initialisation, configuration, saving, loss, checkpointing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nas import registry
from nas.architecture import Architecture
from nas.cost import parameters
from nas.models import mixers
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
from nas.models.softmax import SoftmaxAttention
from tests.models.layouts import stack

Make = Callable[..., HybridForCausalLM]


@pytest.mark.parametrize("tie", [False, True])
def test_parameters_equal_the_formula(
    kinds: tuple[str, ...], tie: bool, make_model: Make, make_design: Callable[..., Architecture]
) -> None:
    model = make_model(*kinds, tie_word_embeddings=tie)
    expected = parameters(make_design(*kinds, tie_word_embeddings=tie))
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("name", registry.mixers())
def test_parameters_of_every_layout(name: str, tie: bool) -> None:
    """Layer by layer, and of the whole stack."""
    design = stack(name, tie_word_embeddings=tie)
    model = HybridForCausalLM(HybridConfig(architecture=design.canonical()))
    for layer, x, block in zip(design.layers, design.dims(), model.model.layers, strict=True):
        found = sum(p.numel() for p in block.attn.parameters())
        assert found == layer.entry.parameters(x), layer.canonical()
    assert sum(p.numel() for p in model.parameters()) == parameters(design)


def test_the_hybrid_has_every_mixer(make_design: Callable[..., Architecture], hybrid: tuple[str, ...]) -> None:
    assert {layer.mixer for layer in make_design(*hybrid).layers} == set(registry.mixers())


def test_trains(kinds: tuple[str, ...], make_model: Make) -> None:
    """Every parameter but an unused bound gets a finite gradient, and a step lowers the loss."""
    model, ids = make_model(*kinds).train(), torch.randint(50, (4, 20))
    loss = model(ids, labels=ids).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.02 * parameter.grad / (parameter.grad.norm() + 1e-6))
    assert model(ids, labels=ids).loss < loss


@torch.no_grad()
def test_initialisation(make_model: Make) -> None:
    model = make_model("gated_deltanet", "gla", "hgrn2", hidden_size=32, initializer_range=0.03, embedding_std=0.7)
    block = model.model.layers[0]
    assert model.lm_head.weight.std() == pytest.approx(0.03, rel=0.1)
    assert block.attn.q_proj.weight.std() == pytest.approx(0.03, rel=0.15)
    assert model.model.embeddings.weight.std() == pytest.approx(0.7, rel=0.1)
    assert torch.all(model.model.layers[1].attn.gk_proj[1].bias == 0)
    assert torch.all(block.mlp_norm.weight == 1)
    assert torch.all(model.model.lower_bounds["hgrn2"] == 0)
    # fla's own: A in (0, 16), dt in (.001, .1), convolutions as torch makes them
    assert torch.all(block.attn.A_log.exp() < 16)
    assert torch.all((F.softplus(block.attn.dt_bias) > 0.9e-3) & (F.softplus(block.attn.dt_bias) < 0.11))
    assert block.attn.v_conv1d.weight.std() == pytest.approx(0.5 / 3**0.5, rel=0.2)
    exempt = {name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert exempt == {"model.layers.0.attn.A_log", "model.layers.0.attn.dt_bias"}


def test_save_and_load(kinds: tuple[str, ...], make_model: Make, tmp_path: Path) -> None:
    model, ids = make_model(*kinds, clvr="deltanet" in kinds), torch.randint(50, (2, 70))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("up.weight"):
                parameter.normal_()
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded = HybridForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.architecture == model.config.architecture
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert getattr(ours, "_no_weight_decay", False) == getattr(theirs, "_no_weight_decay", False), name


def test_configuration_round_trip(make_design: Callable[..., Architecture], tmp_path: Path) -> None:
    design = make_design("gated_deltanet", "softmax", tie_word_embeddings=True)
    config = HybridConfig(architecture=design.canonical(), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config.save_pretrained(tmp_path)
    loaded = HybridConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert Architecture(**loaded.architecture) == design
    assert (loaded.vocab_size, loaded.hidden_size, loaded.num_hidden_layers) == (50, 32, 2)
    assert (loaded.tie_word_embeddings, loaded.initializer_range, loaded.pad_token_id) == (True, 0.2, 0)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nas_hybrid"


def test_configuration_refuses_contradictions(make_design: Callable[..., Architecture]) -> None:
    architecture = make_design("softmax").canonical()
    with pytest.raises(ValueError, match="hidden_size=64 disagrees with the architecture; allowed: 32"):
        HybridConfig(architecture=architecture, hidden_size=64)
    with pytest.raises(ValueError, match="architecture=None"):
        HybridConfig()


def test_loss_is_shifted_and_ignores(make_model: Make) -> None:
    model, ids = make_model("gla"), torch.randint(50, (2, 10))
    labels = ids.clone()
    labels[:, 4:7] = -100
    outputs = model(ids, labels=labels)
    scores = outputs.logits[:, :-1].log_softmax(-1)
    kept = labels[:, 1:] != -100
    picked = scores.gather(-1, ids[:, 1:, None])[..., 0][kept]
    torch.testing.assert_close(outputs.loss, -picked.mean())
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=5).loss, -picked.sum() / 5)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, outputs.logits[:, -3:])
    with pytest.raises(ValueError, match="labels need all logits"):
        model(ids, labels=labels, logits_to_keep=1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool, make_model: Make) -> None:
    kinds, ids = ("gated_deltanet", "hgrn2", "softmax", "hgrn2", "deltanet"), torch.randint(50, (2, 20))
    gradients = []
    for checkpointing in (False, True):
        model = make_model(*kinds, clvr=True, rank=3).train()
        if checkpointing:
            # transformers renamed it within our range of versions
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        with torch.no_grad():
            for block in (model.model.layers[0], model.model.layers[4]):
                block.route.up.weight.fill_(0.1)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_lower_bounds_of_a_mixed_stack(make_model: Make) -> None:
    model = make_model("hgrn", "softmax", "hgrn2", "hgrn", "hgrn2", "hgrn")
    with torch.no_grad():
        for table in model.model.lower_bounds.values():
            table.normal_()
    bounds = model.model._lower_bounds()
    assert [bound is not None for bound in bounds] == [False, False, False, True, True, True]
    weights = model.model.lower_bounds["hgrn"].softmax(0)
    torch.testing.assert_close(bounds[3], weights[1])
    torch.testing.assert_close(bounds[5], weights[1] + weights[2])
    torch.testing.assert_close(bounds[4], model.model.lower_bounds["hgrn2"].softmax(0)[1])


def test_float64(kinds: tuple[str, ...], make_model: Make) -> None:
    model, ids = make_model(*kinds), torch.randint(50, (1, 70))
    single = model(ids).logits
    double = model.double()(ids).logits
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, atol=1e-3, rtol=1e-3)


def test_autocast_on_a_cpu(kinds: tuple[str, ...], make_model: Make) -> None:
    model, ids = make_model(*kinds), torch.randint(50, (2, 70))
    expected = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(ids, labels=ids)
    outputs.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert (outputs.logits.float() - expected).norm() / expected.norm() < 0.1


def test_shapes_that_do_not_fit_are_refused(make_model: Make) -> None:
    model, ids = make_model("gla", "softmax"), torch.randint(50, (2, 12))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask=\[2, 1\]; allowed: \[B, past \+ T\] = \[2, 13\]"):
        model(ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask=\[2, 1, 12, 12\]"):
        model(ids, attention_mask=torch.ones(2, 1, 12, 12))
    with pytest.raises(ValueError, match="cu_seqlens with a batch of 2"):
        model(ids, cu_seqlens=torch.tensor([0, 12]))


def test_checkpointing_and_a_cache_exclude_each_other(make_model: Make) -> None:
    model, ids = make_model("gla").train(), torch.randint(50, (1, 12))
    cache = model.eval()(ids, use_cache=True).past_key_values
    getattr(model.train(), "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="past_key_values does not go with gradient checkpointing"):
        model(ids, past_key_values=cache)


def test_another_mixer_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_BUILDERS", dict(mixers._BUILDERS))
    with pytest.raises(ValueError, match="'softmax' is registered already"):
        mixers.register("softmax", mixers.build_softmax)
    mixers.register("mine", mixers.build_softmax)
    layer = {"mixer": "mine", "heads": 2, "head_dim": 4}
    assert isinstance(mixers.build_mixer(layer, 8, 0, 1e-6), SoftmaxAttention)
    with pytest.raises(ValueError, match="'other' has no builder; allowed: softmax, .*mine"):
        mixers.build_mixer({**layer, "mixer": "other"}, 8, 0, 1e-6)
