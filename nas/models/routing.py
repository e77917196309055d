"""Cross-layer routing between delta-rule layers (arXiv:2607.07953) and its controls: `nas.architecture.Routing`.

v_l are a layer's values after projection, short convolution and SiLU, before the kernel: [B, T, value heads, value
size]. r_l = v_l - vbar_l with vbar_l the read-out of the decayed state at the normalised key. Both are seen where the
mixer calls its kernel (`cpu_kernels.tapped`), so that they are the same in training, in decoding and under padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .cpu_kernels import Kernel, tapped
from .cpu_layout import widen
from .cpu_modules import l2norm
from .mixers import Layer, is_delta_rule, is_linear, value_size
from .upstream import get_unpad_indices_and_cu, repad_hidden_states, unpad_hidden_states

_SCOPED = ("clvr", "self_transform", "wide_ffn")
_KINDS = ("none", "clvr", "cler", "cler_h", "self_transform", "wide_ffn")
_GAMMAS = ("scalar", "head", "channel")


def routed_layers(architecture: Mapping[str, Any]) -> list[int]:
    """0-based positions of the layers that the routing touches: delta-rule layers, or with its scope all linear ones.

    Args:
        architecture: canonical JSON of an Architecture as a dict.

    Raises:
        ValueError: the routing is unknown, or does not fit the layers.
    """
    routing, layers = architecture["routing"], architecture["layers"]
    kind = routing["kind"]
    if kind not in _KINDS:
        raise ValueError(f"routing kind={kind!r}; allowed: {', '.join(_KINDS)}")
    if kind == "none":
        return []
    scope = routing.get("scope")
    if scope is not None and (scope != "linear" or kind not in _SCOPED):
        raise ValueError(f"routing scope={scope!r} with kind={kind!r}; allowed: 'linear', with {', '.join(_SCOPED)}")
    if kind == "cler" and routing.get("gamma") not in _GAMMAS:
        raise ValueError(f"routing gamma={routing.get('gamma')!r} with kind='cler'; allowed: {', '.join(_GAMMAS)}")
    touched = is_linear if scope else is_delta_rule
    found = [i for i, layer in enumerate(layers) if touched(layer["mixer"])]
    if not found:
        have = ", ".join(dict.fromkeys(layer["mixer"] for layer in layers))
        needed = "a linear layer" if scope else "a delta-rule layer (clvr with scope='linear' takes any linear layer)"
        raise ValueError(f"routing kind={kind!r} with the layers {have}: needs {needed}")
    if kind == "cler" and len({(_value_heads(layers[i]), value_size(layers[i])) for i in found}) > 1:
        raise ValueError("routing kind='cler' needs equal value heads and value head sizes in all delta-rule layers")
    return found


def build_widening(architecture: Mapping[str, Any], layer_idx: int) -> Widening | None:
    """What `wide_ffn` adds to the MLP of one layer: a third of its values in units; None where that is nothing."""
    if architecture["routing"]["kind"] != "wide_ffn" or layer_idx not in routed_layers(architecture):
        return None
    units = max(1, round(value_size(architecture["layers"][layer_idx]) / 3))
    return Widening(architecture["hidden_size"], units, layer_idx)


def build_route(architecture: Mapping[str, Any], layer_idx: int) -> Route | None:
    """What the routing adds to one layer; None where that is nothing."""
    routing, routed = architecture["routing"], routed_layers(architecture)
    if layer_idx not in routed or routing["kind"] == "wide_ffn":
        return None
    return Route(
        routing,
        architecture["layers"][layer_idx],
        architecture["hidden_size"],
        layer_idx,
        receives=layer_idx != routed[0],
        sends=layer_idx != routed[-1],
    )


def _value_heads(layer: Layer) -> int:
    heads: int = layer.get("value_heads", layer["heads"])
    return heads


class RoutingLinear(nn.Linear):
    """A bias-free linear map that draws nothing from the global generator: zero, or N(0, std) with a `layer_idx`.

    The noise comes from a generator of its own, seeded by (global seed, layer), so that all weights shared with a
    model without routing stay bit-equal under one `torch.manual_seed`.
    """

    def __init__(self, in_features: int, out_features: int, layer_idx: int | None = None) -> None:
        self.layer_idx = layer_idx
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self, std: float = 0.02) -> None:
        if self.layer_idx is None:
            init.zeros_(self.weight)
            return
        generator = torch.Generator().manual_seed((torch.initial_seed() + 1_000_003 * (self.layer_idx + 1)) % 2**63)
        init.copy_(self.weight, torch.randn(self.weight.shape, generator=generator, device="cpu") * std)


class Widening(nn.Module):
    """More units for a layer's SwiGLU MLP, the control `wide_ffn`: with them it is one wider MLP of the same form.

    They draw from generators of their own and their output is zero at the start, so the model begins as without them.
    """

    def __init__(self, hidden_size: int, units: int, layer_idx: int) -> None:
        super().__init__()
        self.gate_proj = RoutingLinear(hidden_size, units, 2 * layer_idx)
        self.up_proj = RoutingLinear(hidden_size, units, 2 * layer_idx + 1)
        self.down_proj = RoutingLinear(units, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [B, T, hidden size] -> what the further units add, in the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Route(nn.Module):
    """One layer's part in the routing; all of it is silent at initialisation.

    `up` is P_l: values (hidden size for `self_transform`) -> hidden size, zero at the start; a rank factors it into a
    random `down` and a zero `up`. `gamma` is CLER's gain, zero at the start: [1], [value heads] or [value heads * value
    size], a vector in all three, so that optimisers treat it as one.

    Args:
        routing: `nas.architecture.Routing` as a dict.
        receives: whether a routed layer lies below.
        sends: whether a routed layer lies above.
    """

    def __init__(
        self, routing: Mapping[str, Any], layer: Layer, hidden_size: int, layer_idx: int, receives: bool, sends: bool
    ) -> None:
        super().__init__()
        self.kind: str = routing["kind"]
        self.mixer: str = layer["mixer"]
        self.sends = sends
        self.down: RoutingLinear | None = None
        self.up: RoutingLinear | None = None
        self.gamma: nn.Parameter | None = None
        values, heads = value_size(layer), _value_heads(layer)
        if self.kind == "cler":
            shapes = {"scalar": (1, 1), "head": (heads, 1), "channel": (heads, values // heads)}
            self.gamma_shape = shapes[routing["gamma"]]
            if receives:
                self.gamma = nn.Parameter(torch.zeros(self.gamma_shape).flatten())
            return
        source, rank = hidden_size if self.kind == "self_transform" else values, routing.get("rank")
        self.down = None if rank is None else RoutingLinear(source, rank, layer_idx)
        self.up = RoutingLinear(rank or source, hidden_size)

    def reset_parameters(self) -> None:
        if self.gamma is not None:
            init.zeros_(self.gamma)

    def observe(
        self, mix: Callable[[], Tensor], received: Tensor | None, attention_mask: Tensor | None, length: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run a mixer with an eye on its kernel.

        Args:
            mix: calls the mixer once: [B, T, hidden size].
            received: under CLER r_p of the nearest routed layer below, [B, T, values], which is added to the values.
            attention_mask: [B, past + T], 0 at left padding.
            length: T.

        Returns:
            What `mix` returns, and what the layer sends on, [B, T, values]: v_l under CLVR, r_l under CLER-H and CLER
            (None from the last routed layer), None for the self-transform.

        Raises:
            RuntimeError: the mixer did not call one sequence-mixing kernel of fla.
        """
        if self.kind == "self_transform":
            return mix(), None
        calls: list[Tensor | None] = []

        def tap(kernel: Kernel, arguments: dict[str, Any]) -> Any:
            name = "v" if "v" in arguments else "x"  # HGRN's kernel takes its values as x
            value: Tensor = arguments[name]
            sent: Tensor | None = None
            if self.gamma is not None and received is not None:
                arguments = arguments | {name: self._inject(value, received, attention_mask, length)}
            if self.kind == "clvr":
                sent = value
            elif self.kind == "cler_h" or self.sends:
                sent = value - read_out(kernel, arguments)
            calls.append(sent)
            return kernel(**arguments)

        with tapped(tap):
            mixed = mix()
        if len(calls) != 1:
            raise RuntimeError(
                f"routing kind={self.kind!r} with mixer {self.mixer!r}: it made {len(calls)} calls of fla's chunk_* "
                "and fused_recurrent_* kernels that routing could see; allowed: 1"
            )
        return mixed, _pad(calls[0], attention_mask, mixed.shape[0], length)

    def _inject(self, value: Tensor, received: Tensor, attention_mask: Tensor | None, length: int) -> Tensor:
        """v + gamma * r_p in the layout of v: [B, T, value heads, value size], or [1, tokens, ..] where fla unpads."""
        assert self.gamma is not None
        if received.shape[:2] != value.shape[:2]:
            received = unpad_hidden_states(received, None, attention_mask, length)[0]
        gain = self.gamma.view(self.gamma_shape)
        return value + (gain * received.unflatten(-1, value.shape[2:])).to(value.dtype)

    def forward(self, hidden: Tensor, sent: Tensor | None) -> Tensor:
        """h [B, T, hidden size] after the whole layer -> h + P_l v_l, h + P_l r_l or h + P_l h; under CLER h."""
        if self.up is None:
            return hidden
        source = hidden if sent is None else sent
        return hidden + self.up(source if self.down is None else self.down(source))


def _pad(sent: Tensor | None, attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Values as a kernel takes them, heads apart or not -> [B, T, values], zero at padding where fla unpads."""
    if sent is None:
        return None
    flat = sent.flatten(2)
    if attention_mask is None or flat.shape[:2] == (batch, length):
        return flat
    indices, _ = get_unpad_indices_and_cu(attention_mask, length)
    return repad_hidden_states(flat, indices, batch, length)


def read_out(kernel: Kernel, arguments: Mapping[str, Any]) -> Tensor:
    """What the decayed state says at the normalised key: vbar_t = S_{t-1} Diag(a_t) k_t, in the layout of v.

    The state of step t - 1 read by the query a_t * k_t is just that, so the layer's own kernel computes it, with
    these queries one step earlier: no division by 1 - beta. The first token of a sequence reads the initial state.

    Args:
        kernel: `chunk_*` or `fused_recurrent_*` of DeltaNet, Gated DeltaNet, KDA or Gated DeltaNet-2.
        arguments: its call's: v [B, T, HV, V], or [1, tokens, HV, V] with cu_seqlens; k [B, T, H, K].
    """
    v, k, decay = arguments["v"], arguments["k"], _log_decay(arguments)
    k = l2norm(k) if arguments.get("use_qk_l2norm_in_kernel") else widen(k)
    k = k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    query = k if decay is None else k * decay.exp()
    state, bounds, tokens = arguments.get("initial_state"), arguments.get("cu_seqlens"), v.shape[1]
    if bounds is None:
        starts = torch.zeros(1, dtype=torch.long, device=v.device)
    else:  # a sequence without tokens reads into a row after the last
        starts = torch.where(bounds.diff() > 0, bounds[:-1], tokens).long()
    query = F.pad(query, (0, 0, 0, 0, 0, 1))
    first = query[:, starts]  # [B, 1, HV, K] or [1, N, HV, K]
    later = query.index_fill(1, starts, 0)[:, 1:]
    found = v.new_zeros(v.shape)
    if tokens > 1:
        own = {"q": later.to(v.dtype), "k": k.to(v.dtype), "scale": 1.0}
        found = kernel(**{**arguments, **own, "use_qk_l2norm_in_kernel": False, "output_final_state": False})[0]
    found = F.pad(found[:, :-1], (0, 0, 0, 0, 1, 1))
    if state is not None:
        read = _read(state, first.flatten(0, 1), arguments.get("state_v_first", False)).to(v.dtype)
        found = found.index_add(1, starts, read.view(*first.shape[:3], -1))
    return found[:, :tokens]


def _read(state: Tensor, key: Tensor, value_first: bool) -> Tensor:
    """States [N, HV, K, V] (or [N, HV, V, K]) at one key each [N, HV, K] -> [N, HV, V], in the state's precision."""
    if not value_first:
        state = state.mT
    return (state * key[:, :, None]).sum(-1)


def _log_decay(arguments: Mapping[str, Any]) -> Tensor | None:
    """Log decays before a token is written, [B, T, HV, K or 1], in at least float32; None for DeltaNet."""
    g = arguments.get("g")
    if g is None:
        return None
    g = widen(g)
    if arguments.get("use_gate_in_kernel"):
        if arguments.get("lower_bound") is not None:
            raise ValueError(f"lower_bound={arguments['lower_bound']}: routing reads no bounded decay; allowed: None")
        bias, rate = arguments.get("dt_bias"), widen(arguments["A_log"]).exp()
        if bias is not None:
            g = g + widen(bias).view(g.shape[2:])
        g = -rate.view(-1, *[1] * (g.ndim - 3)) * F.softplus(g)
    return g if g.ndim == 4 else g[..., None]
