"""Designs for the tests of cross-layer routing, and a stack of routed layers written out from the definitions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.architecture import Architecture, LayerSpec, Routing
from nas.models.configuration import HybridConfig
from nas.models.modeling import HybridForCausalLM

# four value heads of 16 each, so that CLER can add one layer's values to another's
DELTA: dict[str, dict[str, Any]] = {
    "deltanet": {"heads": 4, "head_dim": 8, "expand_v": 2.0, "conv_size": 4},
    "gated_deltanet": {"heads": 2, "value_heads": 4, "conv_size": 4},
    "kda": {"heads": 2, "value_heads": 4, "conv_size": 4},
    "gated_deltanet2": {"heads": 2, "value_heads": 4, "conv_size": 4},
}
OTHERS: dict[str, dict[str, Any]] = {
    "softmax": {"rope_theta": 10000.0},
    "window": {"mixer": "softmax", "window": 24},
    "gla": {"expand_v": 0.5, "conv_size": 4},
    "hgrn2": {},
    "hgrn2_four": {"mixer": "hgrn2", "heads": 4, "head_dim": 8, "conv_size": 4},
    "hgrn": {"conv_size": 4},
    "retnet": {"expand_v": 2.0},
    "mamba2": {"heads": 1, "value_heads": 4, "conv_size": 4},
    "rwkv6": {},
}
BARE = {f"{kind}_bare": {"mixer": kind, **spec, "conv_size": 0} for kind, spec in DELTA.items()}
SPECS = DELTA | BARE | OTHERS
STACK = ("gated_deltanet", "softmax", "deltanet", "gla", "kda", "gated_deltanet2")
MIXED = (*STACK, "window", "hgrn2", "rwkv6", "hgrn", "hgrn2_four", "mamba2", "retnet", "hgrn", "deltanet_bare")
ROUTINGS = (
    *("clvr", "clvr:3", "cler:scalar", "cler:head", "cler:channel", "cler_h", "cler_h:3"),
    *("self_transform", "self_transform:3", "clvr+linear", "clvr:3+linear", "self_transform+linear"),
)
WIDE = ("wide_ffn", "wide_ffn+linear")


def design(*kinds: str, label: str = "none", **fields: Any) -> Architecture:
    layers = tuple(LayerSpec(**{"mixer": kind, "heads": 2, "head_dim": 16} | SPECS[kind]) for kind in kinds)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "embedding_std": 0.5}
    return Architecture(
        **sizes | {"initializer_range": 0.2, "layers": layers, "routing": Routing.parse(label)} | fields
    )


def build(*kinds: str, label: str = "none", opened: bool = False) -> HybridForCausalLM:
    """The model in evaluation mode; `opened` gives what is zero at initialisation other values."""
    torch.manual_seed(0)
    model: HybridForCausalLM = HybridForCausalLM(HybridConfig(architecture=design(*kinds, label=label).canonical()))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if opened and name.endswith(("route.gamma", "route.up.weight", "widening.down_proj.weight")):
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    return model.eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


def projected(mixer: nn.Module, name: str, x: Tensor) -> Tensor:
    """Projection, causal convolution of 4 where there is one, SiLU."""
    return F.silu(convolved(mixer, name, x))


def convolved(mixer: nn.Module, name: str, x: Tensor) -> Tensor:
    y = mixer.get_submodule(f"{name}_proj")(x)
    if hasattr(mixer, f"{name}_conv1d"):
        weight = mixer.get_submodule(f"{name}_conv1d").weight  # [D, 1, 4]
        padded = F.pad(y, (0, 0, 3, 0))
        y = sum(padded[:, i : i + y.shape[1]] * weight[:, 0, i] for i in range(4))
    return y


def _gates(mixer: Any, kind: str, x: Tensor, key_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decay [B, T, heads, K], erase and write strength, both broadcast over channels or not."""
    b = mixer.b_proj(x).sigmoid()
    if kind == "gated_deltanet2":
        g = F.softplus(mixer.f_proj(x) + mixer.dt_bias).unflatten(-1, (-1, key_size))
        write = mixer.w_proj(x).sigmoid().unflatten(-1, (4, 16))
        return (-mixer.A_log.exp()[:, None] * g).exp(), b.unflatten(-1, (-1, key_size)), write
    if kind == "kda":
        g = F.softplus(mixer.f_proj(x) + mixer.dt_bias).unflatten(-1, (-1, key_size))
        return (-mixer.A_log.exp()[:, None] * g).exp(), b[..., None], b[..., None]
    if kind == "gated_deltanet":
        g = F.softplus(mixer.a_proj(x) + mixer.dt_bias)
        return (-mixer.A_log.exp() * g).exp()[..., None], b[..., None], b[..., None]
    return torch.ones_like(b)[..., None], b[..., None], b[..., None]


def delta_layer(mixer: Any, kind: str, x: Tensor, injected: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """One delta-rule layer, token by token: output, own values v and errors r = v - vbar, both [B, T, 64]."""
    v = projected(mixer, "v", x).unflatten(-1, (4, 16))
    q, k = (projected(mixer, name, x).unflatten(-1, (SPECS[kind]["heads"], -1)) for name in "qk")
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    q, k, decay, erase, write = (
        z.repeat_interleave(4 // z.shape[2], 2) for z in (q, k, *_gates(mixer, kind, x, q.shape[-1]))
    )
    written = v if injected is None else v + injected
    state = x.new_zeros(x.shape[0], 4, k.shape[-1], 16)
    outputs, errors = [], []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, :, None]
        errors.append(v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        erased = torch.einsum("bhkv,bhk->bhv", state, erase[:, t] * k[:, t])
        state = state + k[:, t, :, :, None] * (write[:, t] * written[:, t] - erased)[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * k.shape[-1] ** -0.5)
    o, r = torch.stack(outputs, 1), torch.stack(errors, 1)
    gate = () if kind == "deltanet" else (mixer.g_proj(x).unflatten(-1, (4, 16)),)
    return mixer.o_proj(mixer.o_norm(o, *gate).flatten(2)), v.flatten(2), r.flatten(2)


def by_definition(model: HybridForCausalLM, kinds: tuple[str, ...], label: str, ids: Tensor) -> Tensor:
    """Logits of a stack whose delta-rule layers are routed, written out from the definitions."""
    kind, _, argument = label.partition(":")
    h, below = model.model.embeddings(ids), None
    for name, block in zip(kinds, model.model.layers, strict=True):
        x, source = block.attn_norm(h), None
        if name.removesuffix("_bare") in DELTA:
            injected = None
            if kind == "cler" and below is not None:
                shape = {"scalar": (1, 1), "head": (4, 1), "channel": (4, 16)}[argument]
                injected = block.route.gamma.view(shape) * below.unflatten(-1, (4, 16))
            mixed, v, r = delta_layer(block.attn, name.removesuffix("_bare"), x, injected)
            source, below = {"clvr": v, "cler_h": r}.get(kind), r
        else:
            mixed = block.attn(x)[0]
        h = h + mixed
        h = h + block.mlp(block.mlp_norm(h))
        if name.removesuffix("_bare") in DELTA and kind != "cler":
            matrix = block.route.up.weight
            if argument:
                matrix = matrix @ block.route.down.weight
            h = h + (h if source is None else source) @ matrix.T
    return model.lm_head(model.model.norm(h))


def mamba2_x(mixer: Any, x: Tensor) -> Tensor:
    """64 channels of x after the output gate's 64 of the input projection, convolved, with bias, SiLU."""
    y = mixer.in_proj(x)[..., 64:128]
    padded = F.pad(y, (0, 0, 3, 0))
    mixed = sum(padded[:, i : i + y.shape[1]] * mixer.conv1d.weight[:64, 0, i] for i in range(4))
    return F.silu(mixed + mixer.conv1d.bias[:64])
