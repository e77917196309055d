"""Our softmax layer equals transformers' Qwen3 attention, which takes the same parameter names, and its plain forms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from nas.models.softmax import SoftmaxAttention

CASES: dict[str, dict[str, Any]] = {
    "multi-head": {"num_kv_heads": 4},
    "grouped": {"num_kv_heads": 2, "qk_norm": True},
    "multi-query": {"num_kv_heads": 1},
    "another base": {"num_kv_heads": 4, "rope_theta": 5e5, "qk_norm": True},
    "no positions": {"num_kv_heads": 4, "rope_theta": None},
    "no positions, normed": {"num_kv_heads": 2, "rope_theta": None, "qk_norm": True},
    "window": {"num_kv_heads": 2, "window": 7},
    "window of one": {"num_kv_heads": 4, "window": 1, "qk_norm": True},
    "window, no positions": {"num_kv_heads": 1, "window": 7, "rope_theta": None, "qk_norm": True},
}


def reference(ours: SoftmaxAttention, x: Tensor, kv_heads: int) -> Tensor:
    """Qwen3's eager attention with the weights of `ours`; NoPE is a rotation by nothing, no norm the identity."""
    config = Qwen3Config(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta or 1.0},
        attn_implementation="eager",
    )
    theirs = Qwen3Attention(config, 0).double().eval()
    if not ours.qk_norm:
        theirs.q_norm = theirs.k_norm = nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    cos, sin = Qwen3RotaryEmbedding(config).double()(x, torch.arange(x.shape[1])[None])
    if ours.rope_theta is None:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (distance >= 0) & (distance < (ours.window or x.shape[1]))
    mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -torch.inf)[None, None]
    output: Tensor = theirs(x, (cos, sin), mask)[0]
    return output


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_qwen3s_attention(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = SoftmaxAttention(
        **{"hidden_size": 24, "num_heads": 4, "head_dim": 8, "layer_idx": 0, "rope_theta": 1e4, "norm_eps": 1e-3} | case
    ).double()
    for norm in (ours.q_norm, ours.k_norm) if ours.qk_norm else ():
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    x, weight = torch.randn(2, 19, 24).double(), torch.randn(2, 19, 24).double()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = ours(a)[0], reference(ours, b, case["num_kv_heads"])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)  # their rotary tables are in float32
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)
