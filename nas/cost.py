"""What a design costs, known before training: parameters, cache bytes and FLOPs, in closed form, without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from nas.architecture import Architecture, Frozen, LayerSpec, Routing
from nas.registry import Dims, did_you_mean, mixers

DType = Literal["float32", "bfloat16", "float16"]
ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class Cost(Frozen):
    """Cost of one design at one context length. Bytes are per sequence (batch 1), FLOPs per token (1 MAC = 2)."""

    context: PositiveInt
    parameters: NonNegativeInt
    attention_bytes: NonNegativeInt
    recurrent_bytes: NonNegativeInt
    convolution_bytes: NonNegativeInt
    flops_per_token: NonNegativeInt
    """Decoding one token at the end of the context."""
    training_flops_per_token: NonNegativeInt
    """Forward and backward (3x forward), averaged over a causal context."""
    p1_mixer_flops_per_token: NonNegativeInt
    """The mixers alone by arXiv:2507.06457, appendix B: softmax 2 L d, HGRN 5 d, matrix states 5, 7 or 8 an element."""

    @property
    def kv_cache_bytes(self) -> int:
        """All that decoding keeps per sequence: our memory objective."""
        return self.attention_bytes + self.recurrent_bytes + self.convolution_bytes


def cost(architecture: Architecture, context: int, dtype: DType = "bfloat16", state_dtype: DType = "float32") -> Cost:
    """The cost of `architecture` as it stands.

    Args:
        context: tokens in the cache, at least 1.
        dtype: of weights, keys, values and convolution states.
        state_dtype: of recurrent matrix states (fla keeps them in float32; HGRN's vector is in `dtype`).
    """
    matrices = architecture.vocab_size * architecture.hidden_size
    mixing = training = published = 0
    read_out = read_out_layers(architecture)
    for index, (layer, x) in enumerate(zip(architecture.layers, architecture.dims(), strict=True)):
        mixer = layer.entry
        kept = min(context, layer.window or context)
        state = mixer.recurrent_state(x)
        matrices += mixer.parameters(x) + 3 * architecture.hidden_size * architecture.mlp_size(index)
        matrices += routing_parameters(architecture, index, x)
        score = 4 * x.heads * x.head if layer.is_softmax else 0  # q.k and the weighted sum of values
        linear = (mixer.flops_per_state + (2 if index in read_out else 0)) * state
        mixing += linear + score * kept
        training += linear + score * mean_causal_length(context, layer.window)
        published += mixer.flops_per_state * state + score // 2 * kept
    attention, recurrent, convolution = cache_bytes(architecture, context, dtype, state_dtype)
    return Cost(
        context=context,
        parameters=parameters(architecture),
        attention_bytes=attention,
        recurrent_bytes=recurrent,
        convolution_bytes=convolution,
        flops_per_token=2 * matrices + mixing,
        training_flops_per_token=3 * (2 * matrices + training),
        p1_mixer_flops_per_token=published,
    )


def cache_bytes(
    architecture: Architecture, context: int, dtype: DType = "bfloat16", state_dtype: DType = "float32"
) -> tuple[int, int, int]:
    """Bytes that decoding keeps per sequence: (keys and values, recurrent states, convolution and shift states)."""
    attention = recurrent = convolution = 0
    item = ITEMSIZE[dtype]
    for layer, x in zip(architecture.layers, architecture.dims(), strict=True):
        mixer = layer.entry
        attention += mixer.attention_state(x) * min(context, layer.window or context) * item
        recurrent += mixer.recurrent_state(x) * (item if mixer.state_dtype == "model" else ITEMSIZE[state_dtype])
        convolution += mixer.convolution_state(x) * item
    return attention, recurrent, convolution


def mean_causal_length(context: int, window: int | None) -> int:
    """Tokens a query attends to, averaged over positions 1..context, rounded down."""
    w = min(context, window or context)
    return (w * (w + 1) // 2 + (context - w) * w) // context


def parameters(architecture: Architecture) -> int:
    """Trainable parameters, norms, embeddings and routing included."""
    d = architecture.hidden_size
    total = architecture.vocab_size * d * (1 if architecture.tie_word_embeddings else 2) + d
    for index, (layer, x) in enumerate(zip(architecture.layers, architecture.dims(), strict=True)):
        total += layer.entry.parameters(x) + layer.entry.lower_bounds(x)
        total += 2 * d + 3 * d * architecture.mlp_size(index)
        total += routing_parameters(architecture, index, x)
    return total


def read_out_layers(architecture: Architecture) -> tuple[int, ...]:
    """Layers whose routing reads the state at the key: all routed ones under CLER-H; under CLER not the last, whose
    residual no layer above takes."""
    routed = architecture.routed_layers
    return {"cler_h": routed, "cler": routed[:-1]}.get(architecture.routing.kind, ())


def routing_parameters(architecture: Architecture, index: int, x: Dims) -> int:
    """Parameters that the routing adds to one layer, beside a wider MLP (`Architecture.mlp_size`)."""
    routing = architecture.routing
    if index not in architecture.routed_layers or routing.kind == "wide_ffn":
        return 0
    if routing.kind == "cler":
        if index == architecture.routed_layers[0]:
            return 0  # no delta-rule layer below: nothing to add
        return {"scalar": 1, "head": x.value_heads, "channel": x.value}[routing.gamma or "scalar"]
    source = x.d if routing.kind == "self_transform" else x.value
    return source * x.d if routing.rank is None else routing.rank * (source + x.d)


def match_parameters(architecture: Architecture, target: int) -> Architecture:
    """The same design with the MLP width that brings its parameters nearest to `target`.

    The width is a multiple of the largest power of two, at most 64, whose rounding error stays within .5 % of the
    target, so matched designs differ by at most 1 %; it is 1 for targets under 300 * hidden size * layers.

    Raises:
        ValueError: the target leaves no width: the design has as many parameters, or nearly, outside of its MLPs.
    """
    unit = 3 * architecture.hidden_size * len(architecture.layers)  # parameters of one more unit of width everywhere
    step = 64
    while step > 1 and step * unit > target / 100:
        step //= 2
    outside = parameters(architecture) - unit * architecture.intermediate_size
    width = round((target - outside) / (unit * step)) * step
    if width < step:
        raise ValueError(
            f"parameters={target} cannot be matched: {outside} stand outside of the MLPs; allowed: more, such as "
            f"{outside + 64 * unit} for MLPs of 64, or smaller heads"
        )
    return architecture.model_copy(update={"intermediate_size": width})


def full_attention(architecture: Architecture) -> Architecture:
    """The same stack, all multi-head softmax: with its first softmax layer's heads, or as wide as the hidden size."""
    softmax = next((layer for layer in architecture.layers if layer.is_softmax), None)
    heads, head_dim = (softmax.heads, softmax.head_dim) if softmax else (1, architecture.hidden_size)
    layers = (LayerSpec(mixer="softmax", heads=heads, head_dim=head_dim),) * len(architecture.layers)
    return architecture.model_copy(update={"layers": layers, "routing": Routing()})


def break_even_context(
    design: Architecture, reference: Architecture, dtype: DType = "bfloat16", state_dtype: DType = "float32"
) -> int | None:
    """The smallest context at which `design` keeps no more bytes than `reference`; None if there is none."""

    def excess(context: int) -> int:
        ours, theirs = (sum(cache_bytes(x, context, dtype, state_dtype)) for x in (design, reference))
        return ours - theirs

    windows = {layer.window for layer in (*design.layers, *reference.layers) if layer.window}
    starts: list[int] = sorted({1, *windows})
    for start, end in zip(starts, [*starts[1:], None], strict=True):  # between them, bytes are linear in the context
        here = excess(start)
        if here <= 0:
            return start
        saved = here - excess(start + 1)  # by each further token
        if saved > 0 and (end is None or here <= saved * (end - start)):
            return start - (-here // saved)
    return None


class HeadSizes(Frozen):
    """LayerSpec's sizes of one mixer at the Deployment; None takes the Deployment's, or for a window the proxy's."""

    heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    value_heads: PositiveInt | None = None
    window: PositiveInt | None = None


class Deployment(Frozen):
    """The scale at which memory is charged (design.md 7). A design brings ratios only: placement, query heads per
    KV head, value expansion, window, convolution, routing; all sizes come from here."""

    layers: Annotated[int, Field(gt=0, le=1024)] = 24
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 5632
    vocab_size: PositiveInt = 32000
    heads: PositiveInt = 16
    head_dim: PositiveInt = 128
    mixers: dict[str, HeadSizes] = {}
    context: PositiveInt = 32768
    dtype: DType = "bfloat16"
    state_dtype: DType = "float32"
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.mixers:
            if name not in mixers():
                raise ValueError(f"mixers: {name!r} is unknown; {did_you_mean(name, mixers())}")
        return self

    def architecture(self, proxy: Architecture) -> Architecture:
        """The design of `proxy` at this scale."""
        deep = proxy.at(self.layers)
        return Architecture(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            layers=tuple(self._layer(layer) for layer in deep.layers),
            routing=proxy.routing,
            tie_word_embeddings=self.tie_word_embeddings,
            norm_eps=proxy.norm_eps,
            initializer_range=proxy.initializer_range,
        )

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        sizes = self.mixers.get(layer.mixer, HeadSizes())
        heads, head_dim = sizes.heads or self.heads, sizes.head_dim or self.head_dim
        update: dict[str, object] = {"heads": heads, "head_dim": head_dim}
        if layer.entry.shared_keys:
            update |= {"heads": sizes.heads or layer.heads, "value_heads": sizes.value_heads or self.heads}
        elif layer.value_heads:
            update["value_heads"] = sizes.value_heads or heads * (layer.value_heads // layer.heads)
        if layer.kv_heads:
            groups = layer.heads // layer.kv_heads
            if heads % groups:
                raise ValueError(
                    f"heads={heads} of softmax must be a multiple of kv_groups={groups}, its query heads per KV head"
                )
            update["kv_heads"] = heads // groups
        if layer.window and sizes.window:
            update["window"] = sizes.window
        return LayerSpec.model_validate(layer.canonical() | update)

    def full_attention(self) -> Architecture:
        """The all-softmax multi-head stack that percentages and `kv_cache_ratio` refer to."""
        layer = LayerSpec(mixer="softmax", heads=1, head_dim=2)
        return self.architecture(Architecture(vocab_size=1, hidden_size=1, intermediate_size=1, layers=(layer,)))

    def cost(self, proxy: Architecture) -> Cost:
        """What the design of `proxy` costs here."""
        return cost(self.architecture(proxy), self.context, self.dtype, self.state_dtype)

    def full_attention_bytes(self) -> int:
        return cost(self.full_attention(), self.context, self.dtype, self.state_dtype).kv_cache_bytes

    def kv_cache_ratio(self, proxy: Architecture) -> float:
        """Cache bytes of the design over those of full attention, both here."""
        return self.cost(proxy).kv_cache_bytes / self.full_attention_bytes()
