"""What a cache must keep: prefill and decoding equal one pass, padding changes nothing, nothing looks ahead."""

from collections.abc import Callable

import pytest
import torch

from nas.architecture import Architecture
from nas.cost import cost
from nas.models.modeling import HybridForCausalLM

Make = Callable[..., HybridForCausalLM]


@torch.no_grad()
def test_prefill_and_decoding_equal_one_pass(kinds: tuple[str, ...], make_model: Make) -> None:
    model, ids = make_model(*kinds), torch.randint(50, (2, 90))
    whole = model(ids).logits
    cache, pieces = None, []
    for part in ids.split([33, 40, *[1] * 7, 10], 1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_left_padding_changes_nothing(kinds: tuple[str, ...], make_model: Make) -> None:
    model, ids = make_model(*kinds), torch.randint(50, (3, 80))
    mask = torch.arange(80) >= 80 - torch.tensor([80, 51, 7])[:, None]
    alone = [model(row[keep][None]).logits[0] for row, keep in zip(ids, mask, strict=True)]
    outputs = model(ids[:, :75], attention_mask=mask[:, :75].long(), use_cache=True)
    pieces, cache = [outputs.logits], outputs.past_key_values
    for t in range(75, 80):
        step = model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1].long(), past_key_values=cache, use_cache=True)
        pieces.append(step.logits)
    together = torch.cat(pieces, 1)
    for row, keep, expected in zip(together, mask, alone, strict=True):
        torch.testing.assert_close(row[keep], expected, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_no_position_sees_the_future(kinds: tuple[str, ...], make_model: Make) -> None:
    model, ids = make_model(*kinds), torch.randint(50, (1, 70))
    changed = ids.clone()
    changed[:, 41:] = (changed[:, 41:] + 1) % 50
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :41], after[:, :41], atol=1e-5, rtol=1e-5)
    assert (before[:, 41:] - after[:, 41:]).abs().max() > 1e-3


@torch.no_grad()
def test_generates_greedily(kinds: tuple[str, ...], make_model: Make) -> None:
    model, ids = make_model(*kinds), torch.randint(50, (2, 12))
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated, expected)


@torch.no_grad()
def test_window_forgets(make_model: Make) -> None:
    """One windowed layer of 24: token 30 is beyond the reach of token 0, token 23 is not."""
    model, ids = make_model("windowed"), torch.randint(50, (1, 40))
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 50
    moved = (model(ids).logits - model(changed).logits).abs().amax(-1)[0]
    assert moved[23] > 0
    assert torch.all(moved[24:] == 0)


@torch.no_grad()
def test_cache_holds_what_the_cost_says(make_model: Make, make_design: Callable[..., Architecture]) -> None:
    for kind in ("softmax", "windowed", "gated_deltanet", "deltanet", "gla", "hgrn2", "hgrn", "retnet"):
        model = make_model(kind)
        cache = model(torch.randint(50, (1, 60)), use_cache=True).past_key_values
        held = 0
        for state in cache:
            for value in state.values():
                tensors = [] if value is None else [value] if torch.is_tensor(value) else list(value)
                held += sum(x.numel() * x.element_size() for x in tensors)
                assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in tensors)
        assert held == cost(make_design(kind), 60, "float32").kv_cache_bytes, kind


def test_packed_sequences_are_refused_by_softmax(make_model: Make) -> None:
    with pytest.raises(ValueError, match="cu_seqlens is not supported by softmax layers"):
        make_model("softmax")(torch.randint(50, (1, 8)), cu_seqlens=torch.tensor([0, 3, 8]))
