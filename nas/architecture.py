"""The nouns of a design: LayerSpec, Architecture, Recipe, Candidate. Frozen, torch-free, one canonical JSON each."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from nas.registry import Dims, Mixer, get_mixer, mixers

_OPTIONAL = ("kv_heads", "window", "rope_theta", "qk_norm", "value_heads")


class Frozen(BaseModel):
    """Base of everything that has a digest: immutable, no unknown keys, no NaN, absent fields left out of the JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def canonical(self) -> dict[str, Any]:
        """JSON-ready dict without absent fields: the same for equal objects, whatever they were built from."""
        return self.model_dump(mode="json", exclude_none=True)

    def canonical_json(self) -> str:
        return json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """16 hex digits of the SHA-256 of the canonical JSON; equal in every process."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:16]


Size = Annotated[int, Field(gt=0, le=2**30)]
"""A count or a width; the bound keeps every product of a few of them a number that tables can show."""


class LayerSpec(Frozen):
    """One layer of the stack: its mixer and that mixer's sizes.

    Linear mixers keep one matrix state of head_dim x (head_dim * expand_v) per value head; softmax layers keep
    kv_heads keys and values of head_dim per token, of the last `window` tokens where a window is set. For Mamba-2,
    `heads` counts the groups of B and C, `head_dim` is their state size, `value_heads` the heads of x.
    """

    mixer: str
    heads: Size
    head_dim: Size
    expand_v: Annotated[float, Field(gt=0, le=2**16)] = 1.0
    value_heads: Size | None = None
    kv_heads: Size | None = None
    window: Annotated[int, Field(gt=0, le=2**40)] | None = None
    conv_size: Annotated[int, Field(ge=0, le=2**16)] = 0
    rope_theta: Annotated[float, Field(ge=1, le=1e12)] | None = None
    """Base of the rotary positions; None for no positions (NoPE)."""
    qk_norm: Annotated[Literal[True] | None, BeforeValidator(lambda value: None if value is False else value)] = None
    """RMSNorm over each head's queries and keys, one scale vector for each, before the rotation."""

    @property
    def entry(self) -> Mixer:
        return get_mixer(self.mixer)

    @property
    def is_softmax(self) -> bool:
        return self.entry.family == "softmax"

    @property
    def is_full_attention(self) -> bool:
        return self.is_softmax and self.window is None

    @model_validator(mode="after")
    def _check(self) -> Self:
        entry = self.entry
        for name in _OPTIONAL:
            if getattr(self, name) is not None and name not in entry.options:
                allowed = ", ".join(sorted(entry.options)) or "none of the optional fields"
                raise ValueError(f"{name}={getattr(self, name)} does not apply to {self.mixer}; allowed: {allowed}")
        if self.is_softmax and self.expand_v != 1:
            raise ValueError(f"expand_v={self.expand_v}: softmax takes 1")
        if self.conv_size and not entry.takes_convolution:
            raise ValueError(f"conv_size={self.conv_size}: {self.mixer} has no short convolution; allowed: 0")
        if not self.conv_size and entry.needs_convolution:
            raise ValueError(f"conv_size=0: {self.mixer} has no layer without its short convolution; allowed: 1 and up")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.value_heads and self.value_heads % self.heads:
            raise ValueError(f"value_heads={self.value_heads} must be a multiple of heads={self.heads}")
        if (self.head_dim * self.expand_v) % 1:
            raise ValueError(f"expand_v={self.expand_v} times head_dim={self.head_dim} must be a whole number")
        if (self.rope_theta or entry.even_heads) and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for the rotary positions of {self.mixer}")
        return self


class Routing(Frozen):
    """Cross-layer routing between delta-rule layers (arXiv:2607.07953), and its controls.

    With v_l the layer's values after projection, short convolution and SiLU, before the kernel, and
    r_l = v_l - S k_l what its decayed state S did not yet say about them at the key k_l:

    - `clvr`: after the whole layer, h <- h + P_l v_l; P_l is zero at initialisation, `rank` factors it into two.
    - `cler_h`: the same with r_l.
    - `cler`: v_l <- v_l + G_l r_p, p the nearest delta-rule layer below; G_l is zero at initialisation, one number a
      layer (`gamma="scalar"`), a head or a channel.
    - `self_transform`, a control: after the whole layer, h <- h + P_l h.
    - `wide_ffn`, a control: no routing, the layer's MLP wider by as many parameters as P_l of `clvr` has.

    `scope="linear"` extends CLVR (and the controls) to linear layers without a delta rule: ours, not the paper's.
    """

    kind: Literal["none", "clvr", "cler", "cler_h", "self_transform", "wide_ffn"] = "none"
    rank: Annotated[int, Field(gt=0, lt=10**6)] | None = None
    gamma: Literal["scalar", "head", "channel"] | None = None
    scope: Literal["linear"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank and self.kind not in _RANKED:
            raise ValueError(f"rank={self.rank} does not apply to kind={self.kind!r}; allowed: {', '.join(_RANKED)}")
        if (self.gamma is None) == (self.kind == "cler"):
            raise ValueError(
                f"gamma={self.gamma!r} with kind={self.kind!r}; cler needs scalar, head or channel, others take none"
            )
        if self.scope and self.kind in ("none", "cler", "cler_h"):
            raise ValueError(
                f"scope='linear' with kind={self.kind!r}: only a delta rule has a read-out to subtract; "
                "allowed: clvr (as an extension), self_transform, wide_ffn"
            )
        return self

    @classmethod
    def parse(cls, label: str) -> Routing:
        """The routing that a label names: KIND, KIND:RANK, cler:GAMMA, each with +linear for that scope.

        Raises:
            ValueError: not such a label.
        """
        match = _ROUTING.fullmatch(label)
        if match is None:
            allowed = f"{', '.join(ROUTINGS)}, and clvr:RANK, clvr+linear"
            raise ValueError(f"routing {label!r} is unknown; allowed: {allowed}")
        kind, argument, linear = match.groups()
        if kind == "cler" and argument not in ("scalar", "head", "channel"):
            raise ValueError(f"routing {label!r} is unknown; allowed: cler:scalar, cler:head, cler:channel")
        fields: dict[str, Any] = {"kind": kind, "scope": "linear" if linear else None}
        if argument:
            fields |= {"rank": int(argument)} if argument.isdigit() else {"gamma": argument}
        return cls(**fields)

    @property
    def label(self) -> str:
        argument = self.gamma or (self.rank and str(self.rank))
        return self.kind + (f":{argument}" if argument else "") + ("+linear" if self.scope else "")


_RANKED = ("clvr", "cler_h", "self_transform")
ROUTINGS = ("none", "clvr", "cler:scalar", "cler:head", "cler:channel", "cler_h", "self_transform", "wide_ffn")
_ROUTING = re.compile(
    r"(none|clvr|cler|cler_h|self_transform|wide_ffn)(?::([1-9]\d{0,5}|scalar|head|channel))?(\+linear)?"
)


class Architecture(Frozen):
    """A decoder-only stack: embedding, [mixer, SwiGLU MLP] per layer with pre-RMSNorm, final norm, head."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    layers: tuple[LayerSpec, ...] = Field(min_length=1)
    routing: Routing = Routing()
    tie_word_embeddings: bool = False
    norm_eps: PositiveFloat = 1e-6
    initializer_range: PositiveFloat = 0.02
    embedding_std: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _check(self) -> Self:
        for index, layer in enumerate(self.layers):
            if layer.entry.square_heads and (layer.heads * layer.head_dim != self.hidden_size or layer.expand_v != 1):
                raise ValueError(
                    f"layers[{index}]: {layer.mixer} needs heads * head_dim = hidden_size and expand_v = 1; "
                    f"got {layer.heads} * {layer.head_dim}, {self.hidden_size}, {layer.expand_v}"
                )
        self._check_routing()
        return self

    def _check_routing(self) -> None:
        routed = [self.layers[i] for i in self.routed_layers]
        if self.routing.kind != "none" and not routed:
            delta = ", ".join(name for name, mixer in mixers().items() if mixer.delta_rule)
            have = ", ".join(dict.fromkeys(layer.mixer for layer in self.layers))
            raise ValueError(
                f"routing {self.routing.label!r} needs a delta-rule layer ({delta}); there is none among {have}; "
                "clvr+linear extends CLVR to other linear layers"
            )
        widths = [self.dims()[i].value for i in self.routed_layers]
        if self.routing.rank and self.routing.rank > (largest := min([self.hidden_size, *widths])):
            raise ValueError(
                f"routing {self.routing.label!r}: the rank exceeds that of a full projection; allowed: up to {largest}"
            )
        shapes = {(x.value_heads or x.heads, x.head_dim * x.expand_v) for x in routed}
        if self.routing.kind == "cler" and len(shapes) > 1:
            raise ValueError(
                "routing 'cler' adds one layer's values to another's: all delta-rule layers need the same number of "
                "value heads and the same value head size"
            )

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """0-based positions of the layers that the routing touches: delta-rule layers, or with its scope all linear."""
        if self.routing.kind == "none":
            return ()
        every = self.routing.scope == "linear"
        entries = enumerate(layer.entry for layer in self.layers)
        return tuple(i for i, x in entries if x.routable and (x.delta_rule or (every and x.family == "linear")))

    def mlp_size(self, index: int) -> int:
        """Intermediate size of one layer's MLP: wider under the control `wide_ffn`, by a third of the layer's values,
        which equals P_l of CLVR to within 1.5 hidden sizes of parameters."""
        if self.routing.kind != "wide_ffn" or index not in self.routed_layers:
            return self.intermediate_size
        return self.intermediate_size + max(1, round(self.dims()[index].value / 3))

    def dims(self) -> list[Dims]:
        return [Dims.of(layer, self.hidden_size) for layer in self.layers]

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        """0-based positions of the softmax layers without a window."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.is_full_attention)

    @property
    def backbones(self) -> tuple[str, ...]:
        """Names of the linear mixers, each once, in order of first use."""
        return tuple(dict.fromkeys(layer.mixer for layer in self.layers if not layer.is_softmax))

    @property
    def kv_heads(self) -> int | None:
        """Key/value heads of the full-attention layers; None without one."""
        counts = [layer.kv_heads or layer.heads for layer in self.layers if layer.is_full_attention]
        return counts[0] if counts else None

    @property
    def placement(self) -> str:
        return placement_name(self.full_attention_layers, len(self.layers))

    @property
    def diagram(self) -> str:
        """One character a layer: F full attention, w window, - linear."""
        return "".join("F" if x.is_full_attention else "w" if x.is_softmax else "-" for x in self.layers)

    def at(self, depth: int) -> Architecture:
        """The same design at another depth (design.md 7): identity at its own, exact for "one full every N layers".

        k full layers at p_1..p_k of n become k' = max(1, floor(k depth / n)) at ceil(depth U(m/k')) - 1, with U
        piecewise linear through (0, 0) and (i/k, (p_i + 1)/n). The other slots repeat their pattern of mixers where
        they have one (A B A B goes on as A B), and keep the order of their mixers where they have none.

        Raises:
            ValidationError: a smaller depth has lost every layer that the routing needs.
        """
        if depth == len(self.layers):
            return self
        full = self.full_attention_layers
        others = [layer for i, layer in enumerate(self.layers) if i not in full]
        positions = stretch(full, len(self.layers), depth)
        slots, period = depth - len(positions), _period(others)
        stretched: list[LayerSpec] = []
        for index in range(depth):
            if index in positions:
                stretched.append(self.layers[full[positions.index(index) * len(full) // len(positions)]])
            else:
                rank = index - sum(p < index for p in positions)
                stretched.append(others[rank % period if period else rank * len(others) // slots])
        return Architecture.model_validate(dict(self) | {"layers": tuple(stretched)})


def _period(layers: Sequence[LayerSpec]) -> int:
    """Length of the shortest pattern that `layers` repeat at least twice; 0 if there is none."""
    lengths = range(1, len(layers) // 2 + 1)
    return next((p for p in lengths if all(a == b for a, b in zip(layers, layers[p:], strict=False))), 0)


def stretch(positions: Sequence[int], layers: int, depth: int) -> list[int]:
    """Positions of full layers in a stack of `layers`, mapped to a stack of `depth` in integer arithmetic."""
    k = len(positions)
    if k == 0:
        return []
    if k == layers:
        return list(range(depth))
    knots = [0, *(p + 1 for p in positions)]
    count = max(1, k * depth // layers)
    mapped = []
    for m in range(1, count + 1):
        i, rest = divmod(m * k, count)  # m/count lies rest/count of the way from knot i to knot i + 1
        numerator = knots[i] * count + ((knots[i + 1] - knots[i]) * rest if rest else 0)
        mapped.append(-(-depth * numerator // (layers * count)) - 1)
    return mapped


def interleaved(every: int, layers: int) -> tuple[int, ...]:
    """P1's and P2's placement: one full layer every `every` layers, last of its block."""
    return tuple(range(every - 1, layers, every))


PLACEMENTS = ("interleaved", "early", "middle", "late")


def place(name: str, count: int, every: int, layers: int) -> tuple[int, ...]:
    """0-based positions of `count` full layers under a named placement.

    Raises:
        ValueError: unknown placement.
    """
    if name == "interleaved":
        return interleaved(every, layers)
    starts = {"early": 0, "middle": (layers - count) // 2, "late": layers - count}
    if name not in starts:
        raise ValueError(f"placement {name!r} is unknown; allowed: {', '.join(PLACEMENTS)}")
    return tuple(range(starts[name], starts[name] + count))


def placement_name(positions: Sequence[int], layers: int) -> str:
    """The name of a set of positions: pure, full, interleaved, early, middle, late, or custom."""
    found, count = tuple(positions), len(positions)
    if count == 0:
        return "pure"
    if count == layers:
        return "full"
    if found == interleaved(found[0] + 1, layers):
        return "interleaved"
    return next((name for name in PLACEMENTS[1:] if found == place(name, count, 0, layers)), "custom")


class Recipe(Frozen):
    """How a Candidate is trained: optimiser, learning rate, schedule and batch.

    Muon updates the hidden matrices at `lr`; everything else (embedding, head, norms, vectors) is AdamW at
    `scalar_lr`, which is `lr` unless set. The schedule warms up over `warmup_steps`, holds, and decays over the last
    `decay_fraction` of `total_steps`, the top rung.
    """

    optimizer: Literal["adamw", "muon"]
    lr: PositiveFloat
    scalar_lr: PositiveFloat | None = None
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt
    total_steps: PositiveInt
    decay_fraction: float = Field(default=0.2, ge=0, le=1)
    batch_size: PositiveInt
    sequence_length: PositiveInt

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length


class Candidate(Frozen):
    """What a trial tries. `seed` counts repeats of one design: 0 is the search's own run."""

    architecture: Architecture
    recipe: Recipe
    seed: NonNegativeInt = 0


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers, e.g. (study seed, trial number): the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
