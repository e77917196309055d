"""How large the proxy's layers are: as a space says, with as large a state as it says, or with as many parameters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from nas.architecture import Architecture, LayerSpec
from nas.cost import match_parameters, parameters
from nas.registry import Dims, Mixer, get_mixer
from search_spaces.proxy import NO_POSITIONS, SLIDING_WINDOW, MixerSizes, Proxy
from search_spaces.schema import SearchSpace

STATE_TOLERANCE = 0.01
HEAD_STEP = 8
"""Head sizes that a given state is reached with are multiples of this."""
MAX_HEAD = 256
"""The largest head that fla's kernels take."""
MAX_HEADS = 64


def layer(space: SearchSpace, name: str) -> LayerSpec:
    """One proxy layer of a mixer or of `sliding_window`: the space's sizes, then the proxy's, then the registry's.

    Raises:
        ValueError: the sizes do not fit the mixer, or no heads give it the state that `sizing.state` asks for.
    """
    proxy = space.proxy
    if name in ("softmax", SLIDING_WINDOW):
        return _softmax_layer(proxy, windowed=name == SLIDING_WINDOW)
    mixer, sizes = get_mixer(name), proxy.mixers.get(name, MixerSizes())
    heads, head_dim = proxy.heads, sizes.head_dim or proxy.head_dim
    expand_v = sizes.expand_v or mixer.expand_v
    if space.sizing.state:
        heads, head_dim = state_heads(name, space.sizing.state, proxy.hidden_size, heads, expand_v)
    return LayerSpec(
        mixer=name,
        heads=sizes.heads or (1 if mixer.shared_keys else heads),
        head_dim=head_dim,
        expand_v=expand_v,
        value_heads=sizes.value_heads or (heads if mixer.shared_keys else None),
        window=sizes.window,
        conv_size=mixer.conv_size if sizes.conv_size is None else sizes.conv_size,
        rope_theta=None if sizes.rope_theta == NO_POSITIONS else sizes.rope_theta,
        qk_norm=True if sizes.qk_norm else None,
    )


def _softmax_layer(proxy: Proxy, windowed: bool) -> LayerSpec:
    sizes = proxy.mixers.get("softmax", MixerSizes())
    if windowed:
        own = proxy.mixers[SLIDING_WINDOW]  # the schema asks for it where a pattern uses it
        sizes = sizes.model_copy(update={name: value for name, value in own if value is not None})
    theta = proxy.rope_theta if sizes.rope_theta is None else sizes.rope_theta
    return LayerSpec(
        mixer="softmax",
        heads=sizes.heads or proxy.heads,
        head_dim=sizes.head_dim or proxy.head_dim,
        window=sizes.window,
        rope_theta=None if theta == NO_POSITIONS else theta,
        qk_norm=True if sizes.qk_norm else None,
    )


@cache
def state_heads(name: str, state: int, hidden_size: int, heads: int, expand_v: float) -> tuple[int, int]:
    """Heads and head size of a linear mixer of which one layer keeps `state` elements, to within 1 %.

    Of all such pairs it is the one whose number of heads is nearest to `heads` (the fewer of two), then the one nearest
    to `state`. Head sizes are multiples of 8 up to 256, heads at most 64; Mamba-2's heads are those of x, over one
    group. Mixers with square heads (HGRN, HGRN-2) have heads * head size = hidden size.

    Raises:
        ValueError: there is no such pair; names the mixer and the nearest number that it can keep.
    """
    mixer = get_mixer(name)
    found = [
        (mixer.recurrent_state(_dims(mixer, hidden_size, count, size, expand_v)), count, size)
        for count in range(1, max(MAX_HEADS, heads) + 1)
        for size in _head_sizes(mixer, hidden_size, count)
        if (size * expand_v) % 1 == 0
    ]
    close = [entry for entry in found if abs(entry[0] - state) <= STATE_TOLERANCE * state]
    if close:
        _, count, size = min(close, key=lambda entry: (abs(entry[1] - heads), entry[1], abs(entry[0] - state)))
        return count, size
    if not found:
        raise ValueError(f"sizing.state={state}: {name} has no heads of a multiple of {HEAD_STEP} at this size")
    nearest = min(found, key=lambda entry: (abs(entry[0] - state), entry[1]))[0]
    raise ValueError(f"sizing.state={state}: {name} cannot keep as many elements a layer; the nearest is {nearest}")


def _head_sizes(mixer: Mixer, hidden_size: int, heads: int) -> Iterable[int]:
    if not mixer.square_heads:
        return range(HEAD_STEP, MAX_HEAD + 1, HEAD_STEP)
    return [] if hidden_size % (heads * HEAD_STEP) else [hidden_size // heads]


def _dims(mixer: Mixer, hidden_size: int, heads: int, head_dim: int, expand_v: float) -> Dims:
    return Dims(
        d=hidden_size,
        heads=1 if mixer.shared_keys else heads,
        head=head_dim,
        value_heads=heads,
        value_head=round(head_dim * expand_v),
        kv_heads=heads,
        conv=0,
    )


def matched(design: Architecture, full_attention: Architecture) -> Architecture:
    """`design`, without routing, with MLPs so wide that it has as many parameters as `full_attention`, the multi-head
    softmax proxy at `proxy.intermediate_size`, to within 1 %.

    The width is a multiple of a power of two up to 64, the same in all layers (`nas.cost.match_parameters`).

    Raises:
        ValueError: its mixers alone have more parameters than that.
    """
    target = parameters(full_attention)
    if parameters(design) == target:
        return design
    try:
        return match_parameters(design, target)
    except ValueError:
        outside = parameters(design) - 3 * design.hidden_size * len(design.layers) * design.intermediate_size
        raise ValueError(
            f"sizing.parameters=matched: {'+'.join(design.backbones)} has {outside} parameters without its MLPs, the "
            f"full-attention proxy {target} with them; allowed: a larger proxy.intermediate_size, smaller "
            "proxy.mixers, or free"
        ) from None
