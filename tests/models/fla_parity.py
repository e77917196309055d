"""Our stack beside fla's own model classes, with the same weights: what tests/models and tests/gpu compare.

fla has a model for seven of the linear mixers, with full attention at chosen layers (`attn`). Gated DeltaNet-2 exists
there as a layer only; the blocks of Mamba-2 and RWKV-6 have another norm and MLP. Those three are compared as layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fla import layers as fla_layers
from fla import models as fla_models
from fla.layers import attn as fla_attention
from torch import Tensor, nn

from nas.architecture import Architecture, LayerSpec, Recipe
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM
from nas.training.optimizers import HybridOptimizer

HIDDEN = 64
LAYERS: dict[str, LayerSpec] = {
    "softmax": LayerSpec(mixer="softmax", heads=4, head_dim=16, kv_heads=2, rope_theta=5e5),
    "window": LayerSpec(mixer="softmax", heads=4, head_dim=16, window=24, rope_theta=1e4),
    "deltanet": LayerSpec(mixer="deltanet", heads=4, head_dim=32, conv_size=4),
    "gated_deltanet": LayerSpec(mixer="gated_deltanet", heads=2, head_dim=32, value_heads=4, conv_size=4),
    "kda": LayerSpec(mixer="kda", heads=2, head_dim=32, value_heads=4, conv_size=4),
    "gated_deltanet2": LayerSpec(mixer="gated_deltanet2", heads=2, head_dim=32, value_heads=4, conv_size=4),
    "hgrn": LayerSpec(mixer="hgrn", heads=2, head_dim=32, conv_size=4),
    "hgrn2": LayerSpec(mixer="hgrn2", heads=2, head_dim=32, conv_size=4),
    "gla": LayerSpec(mixer="gla", heads=2, head_dim=32, conv_size=4),
    "retnet": LayerSpec(mixer="retnet", heads=2, head_dim=32, expand_v=2.0),
    "mamba2": LayerSpec(mixer="mamba2", heads=1, head_dim=32, value_heads=4, conv_size=4),
    "rwkv6": LayerSpec(mixer="rwkv6", heads=2, head_dim=32),
}
"""The twelve kinds of layer at the sizes these tests use: fla's GPU kernels need heads of at least 16."""
ALL = (*LAYERS, "hgrn", "hgrn2")
"""Every kind in one stack; HGRN and HGRN-2 twice, as the first layer of each has no lower bound to learn."""
LINEAR = tuple(name for name in LAYERS if name not in ("softmax", "window"))
MODELS = {
    "gated_deltanet": "GatedDeltaNet",
    "deltanet": "DeltaNet",
    "gla": "GLA",
    "hgrn": "HGRN",
    "hgrn2": "HGRN2",
    "retnet": "RetNet",
    "kda": "KDA",
}
"""Mixers that have a model in fla, and its name."""
LAYER_ONLY = ("gated_deltanet2", "mamba2", "rwkv6")


def stack(*kinds: str, **fields: Any) -> Architecture:
    """A design of width 64 over 64 symbols; each kind is a key of LAYERS.

    Weights are drawn wide enough for every layer to matter to the logits.
    """
    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 96, "embedding_std": 0.5}
    layers = tuple(LAYERS[kind] for kind in kinds)
    return Architecture(**sizes | {"initializer_range": 0.15} | fields, layers=layers)


def build(design: Architecture, seed: int = 0, initial: bool = False) -> HybridForCausalLM:
    """A model whose every part shows in its logits: parameters that start at zero are drawn too, unless `initial`."""
    torch.manual_seed(seed)
    model: HybridForCausalLM = HybridForCausalLM(HybridConfig(architecture=design.canonical()))
    with torch.no_grad():
        for parameter in model.parameters():
            if not initial and not parameter.any():
                parameter.normal_(std=0.3)
    return model.eval()


@contextmanager
def sdpa_as_flash_attention() -> Iterator[None]:
    """fla's `Attention` on PyTorch's SDPA within the block: flash-attn has no build for most machines."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
        """q [B, T, H, D] behind k, v [B, past + T, H, D]; `window_size` counts keys before the query, -1 for all."""
        assert causal
        key = torch.arange(k.shape[1], device=k.device)
        back = key[-q.shape[1] :, None] - key
        mask = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return o.transpose(1, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla_attention, "flash_attn_func", attend)
        yield


def _attention(index: int, layer: LayerSpec) -> dict[str, Any]:
    return {
        "layers": [index],
        "num_heads": layer.heads,
        "num_kv_heads": layer.kv_heads or layer.heads,
        "window_size": layer.window,
        "rope_theta": layer.rope_theta,
    }


def _sizes(design: Architecture, layer: LayerSpec) -> dict[str, Any]:
    """The configuration of one linear layer by fla's names."""
    key = layer.heads * layer.head_dim / design.hidden_size
    value = key * layer.expand_v
    convolution = {"use_short_conv": layer.conv_size > 0, "conv_size": layer.conv_size}
    by_head = {"num_heads": layer.heads, "num_v_heads": layer.value_heads, "head_dim": layer.head_dim}
    by_width = {"num_heads": layer.heads, "expand_k": key, "expand_v": value}
    sizes: dict[str, dict[str, Any]] = {
        "gated_deltanet": by_head | convolution | {"expand_v": layer.expand_v},
        "kda": by_head | convolution | {"expand_v": layer.expand_v},
        "gated_deltanet2": by_head | convolution | {"expand_v": layer.expand_v},
        "deltanet": by_width | convolution,
        "gla": by_width | convolution,
        "retnet": by_width,  # fla's model has no convolution to switch on
        "rwkv6": by_width,
        "hgrn": convolution | {"expand_ratio": round(key), "attn_mode": "fused_recurrent"},
        "hgrn2": convolution | {"expand_ratio": layer.head_dim},
        "mamba2": {
            "n_groups": layer.heads,
            "state_size": layer.head_dim,
            "head_dim": round(layer.head_dim * layer.expand_v),
            "expand": (layer.value_heads or layer.heads) * layer.head_dim * layer.expand_v / design.hidden_size,
            "conv_kernel": layer.conv_size,
        },
    }
    return sizes[layer.mixer]


def to_fla(design: Architecture, state: dict[str, Tensor], absent: float = -1e4) -> dict[str, Tensor]:
    """Our weights (or, with `absent=0`, their gradients) under fla's names: the one map between the two.

    All names are equal but one. We keep a table of lower bounds for each mixer that has them, with a row for each of
    its layers; fla keeps one with a row for every layer of the stack, softmax layers too. Those rows get `absent`, so
    low that the softmax over layers leaves them nothing: then both mean the same where the first layer is linear.
    """
    mapped = {name: x for name, x in state.items() if not name.startswith("model.lower_bounds.")}
    for mixer in ("hgrn", "hgrn2"):
        rows = state.get(f"model.lower_bounds.{mixer}")
        if rows is not None:
            linear = [i for i, layer in enumerate(design.layers) if layer.mixer == mixer]
            assert linear[0] == 0
            table = rows.new_full((len(design.layers), rows.shape[1]), absent)
            table[linear] = rows
            mapped["model.lower_bounds"] = table
    return mapped


def fla_model(design: Architecture, model: HybridForCausalLM) -> nn.Module:
    """fla's own model of the same design with `model`'s weights, on its device; call within
    `sdpa_as_flash_attention` where there is a softmax layer."""
    (backbone,) = design.backbones
    linear = next(layer for layer in design.layers if not layer.is_softmax)
    config = getattr(fla_models, f"{MODELS[backbone]}Config")(
        vocab_size=design.vocab_size,
        hidden_size=design.hidden_size,
        intermediate_size=design.intermediate_size,
        num_hidden_layers=len(design.layers),
        norm_eps=design.norm_eps,
        tie_word_embeddings=design.tie_word_embeddings,
        fuse_cross_entropy=False,
        attn=[_attention(i, layer) for i, layer in enumerate(design.layers) if layer.is_softmax] or None,
        **_sizes(design, linear),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ShortConvolution is crucial")
        theirs: nn.Module = getattr(fla_models, f"{MODELS[backbone]}ForCausalLM")(config)
    theirs.load_state_dict(to_fla(design, model.state_dict()))
    return theirs.to(model.device).train(model.training)


def fla_layer(design: Architecture, mixer: nn.Module) -> nn.Module:
    """fla's own layer of the design's first kind with `mixer`'s weights, on its device and in its dtype."""
    layer = design.layers[0]
    classes = {
        "gated_deltanet2": fla_layers.GatedDeltaNet2,
        "mamba2": fla_layers.Mamba2,
        "rwkv6": fla_layers.RWKV6Attention,
    }
    sizes = _sizes(design, layer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="According to Bo")
        theirs: nn.Module = classes[layer.mixer](
            hidden_size=design.hidden_size, layer_idx=0, norm_eps=design.norm_eps, **sizes
        )
    theirs.load_state_dict(mixer.state_dict())
    weight = next(mixer.parameters())
    for name in ("act", "gate_fn"):  # fla binds its Triton SiLU when the layer is made
        if weight.device.type == "cpu" and hasattr(theirs, name):
            setattr(theirs, name, F.silu)
    return theirs.to(weight.device, weight.dtype).train(mixer.training)


def through_bare_layer(model: HybridForCausalLM, layer: nn.Module, ids: Tensor) -> Tensor:
    """The logits of a stack of one layer, its mixer being `layer`: the block written out once more."""
    block, h = model.model.layers[0], model.model.embeddings(ids)
    h = h + layer(hidden_states=_rms(h, block.attn_norm))[0]
    x = _rms(h, block.mlp_norm)
    h = h + block.mlp.down_proj(F.silu(block.mlp.gate_proj(x)) * block.mlp.up_proj(x))
    logits: Tensor = model.lm_head(_rms(h, model.model.norm))
    return logits


def _rms(x: Tensor, norm: nn.Module) -> Tensor:
    weight = norm.get_parameter("weight")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (wide * scale * weight).to(x.dtype)


def logits_and_gradients(
    run: nn.Module | Any, parameters: dict[str, nn.Parameter], ids: Tensor, narrow: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [B, T, V] of `run(ids)` and the gradients of their next-token loss in `parameters`; see `autocast`."""
    with autocast(ids, narrow):
        out = run(ids)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return logits.detach(), dict(zip(parameters, gradients, strict=True))


def autocast(ids: Tensor, narrow: bool) -> torch.autocast:
    """bf16 by autocast for a forward pass of `ids`, as the trainer has it: on CUDA only, on a CPU all is float32."""
    return torch.autocast(ids.device.type, torch.bfloat16, enabled=narrow and ids.is_cuda)


def relative(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """|found - expected| / max(|expected|, floor), by the Euclidean norm, in float64; infinite where not finite."""
    a, b = (x.detach().to("cpu", torch.float64) for x in (found, expected))
    assert a.shape == b.shape, (a.shape, b.shape)
    error = float((a - b).norm() / max(float(b.norm()), floor, 1e-30))
    return error if error == error else float("inf")


def train(
    model: HybridForCausalLM, optimizer: str, ids: Tensor, steps: int, narrow: bool = False
) -> tuple[list[float], list[str]]:
    """Losses of `steps` updates on one batch, and the parameters whose gradient was absent or not finite."""
    recipe = Recipe.model_validate(
        {
            "optimizer": optimizer, "lr": 1e-3, "warmup_steps": 0, "total_steps": steps, "batch_size": len(ids),
            "sequence_length": ids.shape[1],
        }
    )  # fmt: skip
    updates = HybridOptimizer(model.train(), recipe, head=model.get_submodule("lm_head"))
    losses, missing = [], []
    for _ in range(steps):
        with autocast(ids, narrow):
            logits = model(ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        updates.zero_grad()
        loss.backward()
        missing += [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        updates.step()
        losses.append(loss.item())
    return losses, missing
