"""The proxy, the small model that stands for a design: its backbones, its sizes, and what designs are matched in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat

from nas.architecture import Frozen
from nas.registry import did_you_mean, get_mixer, linear_mixers
from search_spaces.problems import shown

Layers = Annotated[int, Field(gt=0, le=1024)]
Heads = Annotated[int, Field(gt=0, le=1024)]
HeadDim = Annotated[int, Field(gt=0, le=1024)]
Width = Annotated[int, Field(gt=0, le=2**16)]
Length = Annotated[int, Field(gt=0, le=2**20)]

SLIDING_WINDOW = "sliding_window"
"""The name of softmax attention with a window in a pattern and in `proxy.mixers`."""

Backbone = str | Annotated[tuple[str, ...], Field(max_length=64)]
"""What the layers that are not full attention are: one linear mixer, or a pattern of names that repeats over them."""

NO_POSITIONS = "none"
Theta = Annotated[
    PositiveFloat | Literal["none"] | None,
    # Canonical JSON leaves nulls out, so "no positions" has to be a value of its own.
    BeforeValidator(lambda value: NO_POSITIONS if value is None else value),
]
"""Base of rotary positions; `null` in a file is no positions (NoPE)."""


def pattern(backbone: Backbone) -> tuple[str, ...]:
    """The names of a backbone in the order in which they repeat."""
    return (backbone,) if isinstance(backbone, str) else backbone


def backbone_label(backbone: Backbone) -> str:
    """How a backbone is named in parameters and tables: "gla", or "kda+kda+sliding_window" for a pattern."""
    return "+".join(pattern(backbone))


def check_backbone(backbone: Backbone, layers: int) -> None:
    """Raises ValueError: a name is unknown, or a pattern has no linear mixer, repeats itself or outgrows the stack."""
    linear = linear_mixers()
    if isinstance(backbone, str):
        if backbone == SLIDING_WINDOW:
            raise ValueError(
                f"backbones: {backbone} alone is no backbone; allowed: a pattern such as [gla, {backbone}]"
            )
        if backbone not in linear:
            raise ValueError(f"backbones: {shown(backbone)} is unknown; {did_you_mean(backbone, linear)}")
        return
    where = f"backbones: {shown([*backbone])}"
    for name in backbone:
        if name not in (*linear, SLIDING_WINDOW):
            nearest = did_you_mean(name, (*linear, SLIDING_WINDOW))
            raise ValueError(f"backbones: {shown(name)} in a pattern is unknown; {nearest}")
    if not any(name in linear for name in backbone):
        raise ValueError(f"{where} has no linear mixer; allowed: patterns with one at least of {', '.join(linear)}")
    length = len(backbone)
    for period in range(1, length):
        if length % period == 0 and backbone == backbone[:period] * (length // period):
            shortest = backbone[0] if period == 1 else f"[{', '.join(backbone[:period])}]"
            raise ValueError(f"{where} repeats itself; a pattern repeats anyway: give {shortest}")
    if length == 1:
        raise ValueError(f"{where} is a pattern of one name; give {backbone[0]}")
    if length > layers:
        raise ValueError(f"{where} has {length} names; proxy.layers={layers} has no room for them")


class MixerSizes(Frozen):
    """Sizes of one mixer in the proxy; absent ones come from the proxy or the registry.

    For Mamba-2, `value_heads` are the heads, as `proxy.heads` is for others, and `heads` the groups that share B and C
    (1 where absent). `sliding_window` takes softmax's sizes and adds its window.
    """

    heads: Heads | None = None
    head_dim: HeadDim | None = None
    value_heads: Heads | None = None
    expand_v: Annotated[float, Field(gt=0, le=64)] | None = None
    conv_size: Annotated[int, Field(ge=0, le=1024)] | None = None
    window: Length | None = None
    qk_norm: bool | None = None
    rope_theta: Theta = None


class Proxy(Frozen):
    """The small model that stands for a design: one size for all candidates."""

    layers: Layers
    hidden_size: Width
    intermediate_size: Width
    """Width of the MLPs; with `sizing.parameters: matched`, of the full-attention model that all others match."""
    heads: Heads
    head_dim: HeadDim
    mixers: dict[str, MixerSizes] = {}
    rope_theta: Theta = 10000.0
    sequence_length: Length
    batch_size: Length
    warmup_steps: Annotated[int, Field(ge=0, le=10**8)] = 40
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    grad_clip: PositiveFloat = 1.0
    initializer_range: PositiveFloat = 0.02
    embedding_std: PositiveFloat = 0.02
    tie_word_embeddings: bool = False

    def check_mixers(self) -> None:
        """Raises ValueError: sizes of an unknown mixer, or a size that its mixer does not have."""
        for name, sizes in self.mixers.items():
            known = ("softmax", SLIDING_WINDOW, *linear_mixers())
            if name not in known:
                raise ValueError(f"proxy.mixers: {shown(name)} is unknown; {did_you_mean(name, known)}")
            allowed = _sizes_of(name)
            for field, value in sizes:
                if value is not None and field not in allowed:
                    raise ValueError(
                        f"proxy.mixers.{name}.{field}={value} does not apply; allowed: {', '.join(sorted(allowed))}"
                    )
        window = self.mixers.get(SLIDING_WINDOW, MixerSizes()).window
        if window and window >= self.sequence_length:
            raise ValueError(
                f"proxy.mixers.{SLIDING_WINDOW}.window={window} reaches over all of "
                f"proxy.sequence_length={self.sequence_length}; allowed: below it"
            )


def _sizes_of(name: str) -> set[str]:
    """The fields of MixerSizes that a mixer has. Full attention has no window: that is what `sliding_window` is."""
    if name == "softmax":
        return {"heads", "head_dim", "qk_norm", "rope_theta"}
    if name == SLIDING_WINDOW:
        return {"window", "qk_norm", "rope_theta"}
    mixer = get_mixer(name)
    sizes = {"heads", "head_dim", "expand_v"} | ({"conv_size"} if mixer.takes_convolution else set())
    return sizes | (mixer.options & {*MixerSizes.model_fields})


class Sizing(Frozen):
    """In what the proxies of one space are equal.

    `parameters: matched` widens or narrows every design's MLPs so that it has as many parameters as the full-attention
    proxy (`search_spaces.sizing.matched`); `free` gives all the same MLPs. `state: N` sizes the heads of every linear
    mixer so that one layer keeps N elements (`search_spaces.sizing.state_heads`).
    """

    parameters: Literal["matched", "free"] = "matched"
    state: Annotated[int, Field(gt=0, le=2**30)] | None = None
