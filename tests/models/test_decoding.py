"""What a cache must keep: prefill and decoding equal one pass, padding changes nothing, nothing looks ahead.

Bounds are fractions of the largest logit, in float32.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nas.architecture import ROUTINGS, LayerSpec, Routing
from nas.models.modeling import HybridForCausalLM
from nas.registry import get_mixer, mixers

Make = Callable[..., HybridForCausalLM]

DELTA = [name for name, mixer in mixers().items() if mixer.delta_rule]
LABELS = (*ROUTINGS, "clvr:3", "cler_h:3", "self_transform:3", "clvr+linear", "self_transform+linear")


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def in_pieces(model: HybridForCausalLM, ids: Tensor, lengths: list[int]) -> Tensor:
    """Logits of a prefill, of prompts and of single tokens on top of the cache."""
    cache, pieces = None, []
    for part in ids.split(lengths, 1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    return torch.cat(pieces, 1)


def padded(model: HybridForCausalLM, ids: Tensor, mask: Tensor, prompt: int) -> Tensor:
    """Logits of a left-padded prompt and of single tokens after it."""
    outputs = model(ids[:, :prompt], attention_mask=mask[:, :prompt], use_cache=True)
    pieces, cache = [outputs.logits], outputs.past_key_values
    for t in range(prompt, ids.shape[1]):
        step = model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)
        pieces.append(step.logits)
    return torch.cat(pieces, 1)


def assert_causal(model: HybridForCausalLM, length: int) -> None:
    """Another token at t moves the logits at t and none before."""
    ids = torch.randint(50, (1, length))
    before = model(ids).logits
    for t in (1, length // 2, length - 2):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 1) % 50
        after = model(changed).logits
        assert error(after[:, :t], before[:, :t]) < 1e-6, t
        assert error(after[:, t], before[:, t]) > 1e-3, t


def routed_stack(label: str) -> dict[str, Any]:
    """Every delta-rule layer with equal value heads, as CLER needs, between layers that have no delta rule."""
    layers = [
        LayerSpec(mixer=name, heads=2, head_dim=16, conv_size=get_mixer(name).conv_size, value_heads=values)
        for name in (*DELTA, "softmax", "gla", *DELTA[:1])
        for values in [2 if "value_heads" in get_mixer(name).options else None]
    ]
    return {"layers": tuple(layers), "routing": Routing.parse(label)}


@torch.no_grad()
def test_prefill_and_decoding_equal_one_pass(kinds: tuple[str, ...], make_awake: Make) -> None:
    model, ids = make_awake(*kinds), torch.randint(50, (2, 90))
    assert error(in_pieces(model, ids, [33, 40, *[1] * 7, 10]), model(ids).logits) < 1e-5


@torch.no_grad()
def test_left_padding_changes_nothing(kinds: tuple[str, ...], make_awake: Make) -> None:
    model, ids = make_awake(*kinds), torch.randint(50, (3, 80))
    mask = (torch.arange(80) >= 80 - torch.tensor([80, 51, 7])[:, None]).long()
    together = padded(model, ids, mask, 75)
    for row, keep, logits in zip(ids, mask.bool(), together, strict=True):
        assert error(logits[keep], model(row[keep][None]).logits[0]) < 1e-5


@torch.no_grad()
def test_no_position_sees_the_future(kinds: tuple[str, ...], make_awake: Make) -> None:
    assert_causal(make_awake(*kinds), 70)


@torch.no_grad()
def test_generates_greedily(kinds: tuple[str, ...], make_awake: Make) -> None:
    """Two prompts, one of them padded on the left, give what each gives without a cache or padding."""
    model, ids = make_awake(*kinds), torch.randint(1, 50, (2, 12))
    mask = torch.ones_like(ids)
    ids[1, :5], mask[1, :5] = 0, 0
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row, keep, text in zip(ids, mask.bool(), generated, strict=True):
        expected = row[keep][None]
        for _ in range(6):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(text[-expected.shape[1] :], expected[0])


@torch.no_grad()
@pytest.mark.parametrize("label", LABELS)
def test_routing_decodes_pads_and_looks_back_only(label: str, make_awake: Make) -> None:
    model, ids = make_awake(**routed_stack(label)), torch.randint(50, (2, 70))
    if label != "none":
        assert error(make_awake(**routed_stack("none"))(ids).logits, model(ids).logits) > 1e-3, "routing does nothing"
    whole = model(ids).logits
    assert error(in_pieces(model, ids, [30, *[1] * 5, 35]), whole) < 1e-5
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    together = padded(model, ids, mask, 67)
    assert error(together[1], whole[1]) < 1e-5
    assert error(together[0, 9:], model(ids[:1, 9:]).logits[0]) < 1e-5
    assert_causal(model, 70)


@torch.no_grad()
def test_window_forgets(make_model: Make) -> None:
    """One windowed layer of 24: token 24 is beyond the reach of token 0, token 23 is not."""
    model, ids = make_model("windowed"), torch.randint(50, (1, 40))
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 50
    moved = (model(ids).logits - model(changed).logits).abs().amax(-1)[0]
    assert moved[23] > 0
    assert torch.all(moved[24:] == 0)


def test_packed_sequences_are_refused_by_softmax(make_model: Make) -> None:
    with pytest.raises(ValueError, match="cu_seqlens is not supported by softmax layers"):
        make_model("softmax")(torch.randint(50, (1, 8)), cu_seqlens=torch.tensor([0, 3, 8]))


@torch.no_grad()
def test_a_cache_that_is_given_is_extended_by_every_layer(make_model: Make) -> None:
    model, ids = make_model("gated_deltanet", "softmax", "rwkv6"), torch.randint(50, (1, 30))
    whole = model(ids).logits
    cache = model(ids[:, :20], use_cache=True).past_key_values
    cache = model(ids[:, 20:25], past_key_values=cache, use_cache=False).past_key_values
    torch.testing.assert_close(model(ids[:, 25:], past_key_values=cache).logits, whole[:, 25:], atol=1e-4, rtol=1e-4)
