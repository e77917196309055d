"""What a layer can be: one torch-free entry per mixer, with its limits and closed-form sizes.

The torch side of an entry is `build_<name>` in `nas.models.mixers`; the two are joined by name only. Other
packages add mixers through the entry-point groups `nas.mixers` (an object that is a `Mixer`) and
`nas.mixer_builders` (its torch side); CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nas.architecture import LayerSpec

_log = logging.getLogger(__name__)

GLA_GATE_RANK = 16
"""Rank of GLA's gate projection (fla's `gate_low_rank_dim`)."""
RWKV6_SHIFT_RANK = 32
"""Rank of each of RWKV-6's five token-shift projections (fla's `proj_low_rank_dim`)."""
RWKV6_DECAY_RANK = 64
"""Rank of RWKV-6's decay projection (fla's `gate_low_rank_dim`)."""


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of one layer, in elements: what every formula below is written in."""

    d: int  # hidden size
    heads: int  # query and key heads
    head: int  # query/key head size
    value_heads: int
    value_head: int
    kv_heads: int  # key/value heads of a softmax layer
    conv: int  # short-convolution width, 0 for none
    qk_norm: bool = False  # whether a softmax layer normalises its queries and keys

    @property
    def key(self) -> int:
        return self.heads * self.head

    @property
    def value(self) -> int:
        return self.value_heads * self.value_head

    @classmethod
    def of(cls, layer: LayerSpec, hidden_size: int) -> Dims:
        return cls(
            d=hidden_size,
            heads=layer.heads,
            head=layer.head_dim,
            value_heads=layer.value_heads or layer.heads,
            value_head=round(layer.head_dim * layer.expand_v),
            kv_heads=layer.kv_heads or layer.heads,
            conv=layer.conv_size,
            qk_norm=bool(layer.qk_norm),
        )


Formula = Callable[[Dims], int]


def _zero(_: Dims) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A token mixer: names, limits and sizes. All formulas return elements for one layer and one sequence."""

    name: str
    title: str
    family: Literal["softmax", "linear"]
    update_rule: str
    source: str
    parameters: Formula
    attention_state: Formula = _zero
    """Elements kept per context token (keys and values)."""
    recurrent_state: Formula = _zero
    convolution_state: Formula = _zero
    lower_bounds: Formula = _zero
    """Elements of this layer's row in the model-wide table of forget-gate lower bounds (HGRN, HGRN-2)."""
    flops_per_state: int = 0
    """Forward FLOPs a token per element of recurrent state (P1, appendix B)."""
    state_dtype: Literal["float32", "model"] = "float32"
    delta_rule: bool = False
    conv_size: int = 0
    """Short-convolution width when a space does not say (fla's default)."""
    expand_v: float = 1.0
    options: frozenset[str] = frozenset()
    """Optional LayerSpec fields that this mixer understands."""
    square_heads: bool = False
    """True where fla's layer needs heads * head_dim = hidden size and expand_v = 1."""
    takes_convolution: bool = True
    """False where the layer has no short convolution of a width to choose."""
    needs_convolution: bool = False
    """True where the layer cannot be built without its short convolution."""
    even_heads: bool = False
    """True where fla's layer rotates queries and keys by their positions: head_dim must be even."""
    routable: bool = True
    """False where the layer calls none of fla's kernels: routing, which reads the values there, leaves it out."""
    shared_keys: bool = False
    """True where all value heads usually share one group of keys (Mamba-2): a space or a Deployment that gives heads
    means value heads, and the groups stay as they are."""


def _conv(x: Dims) -> int:
    return x.conv * (2 * x.key + x.value)


def _matrix_state(x: Dims) -> int:
    return x.value_heads * x.head * x.value_head


_MIXERS = (
    Mixer(
        name="softmax",
        title="Softmax attention",
        family="softmax",
        update_rule="o_t = softmax(q_t K_t' / sqrt(D)) V_t",
        source="Vaswani et al., arXiv:1706.03762; GQA, arXiv:2305.13245",
        parameters=lambda x: x.d * x.head * (2 * x.heads + 2 * x.kv_heads) + (2 * x.head if x.qk_norm else 0),
        attention_state=lambda x: 2 * x.kv_heads * x.head,
        takes_convolution=False,
        options=frozenset({"kv_heads", "window", "rope_theta", "qk_norm"}),
    ),
    Mixer(
        name="gated_deltanet",
        title="Gated DeltaNet",
        family="linear",
        update_rule="S_t = a_t S_{t-1} (I - b_t k_t k_t') + b_t v_t k_t'",
        source="Yang et al., arXiv:2412.06464",
        # q, k, v, output gate, o; a and b; the two decay vectors; convolutions; the output norm
        parameters=lambda x: (
            x.d * (2 * x.key + 3 * x.value) + 2 * x.d * x.value_heads + 2 * x.value_heads + _conv(x) + x.value_head
        ),
        recurrent_state=_matrix_state,
        convolution_state=_conv,
        flops_per_state=8,
        delta_rule=True,
        conv_size=4,
        options=frozenset({"value_heads"}),
    ),
    Mixer(
        name="kda",
        title="Kimi Delta Attention",
        family="linear",
        update_rule="S_t = S_{t-1} Diag(a_t) (I - b_t k_t k_t') + b_t v_t k_t'",
        source="Kimi Team, arXiv:2510.26692",
        # q, k, v, o; the decay and the output gate, each through one value head's width; b; two decay vectors; the
        # gate's bias; convolutions; the output norm
        parameters=lambda x: (
            x.d * (2 * x.key + 2 * x.value + 2 * x.value_head + x.value_heads)
            + x.value_head * (x.value_heads * x.head + x.value)
            + x.value_heads * (1 + x.head)
            + x.value
            + _conv(x)
            + x.value_head
        ),
        recurrent_state=_matrix_state,
        convolution_state=_conv,
        flops_per_state=8,
        delta_rule=True,
        conv_size=4,
        options=frozenset({"value_heads"}),
    ),
    Mixer(
        name="gated_deltanet2",
        title="Gated DeltaNet-2",
        family="linear",
        update_rule="S_t = S_{t-1} Diag(a_t) (I - (b_t * k_t) k_t') + (w_t * v_t) k_t'",
        source="Gated DeltaNet-2, NVlabs/GatedDeltaNet-2; compared in arXiv:2607.07953",
        # q, k, v, the two gates b and w, o; the decay and the output gate, each through one value head's width; two
        # decay vectors; the gate's bias; convolutions; the output norm
        parameters=lambda x: (
            x.d * (3 * x.key + 3 * x.value + 2 * x.value_head)
            + x.value_head * (x.key + x.value)
            + x.heads
            + x.key
            + x.value
            + _conv(x)
            + x.value_head
        ),
        recurrent_state=_matrix_state,
        convolution_state=_conv,
        flops_per_state=8,
        delta_rule=True,
        conv_size=4,
        options=frozenset({"value_heads"}),
    ),
    Mixer(
        name="deltanet",
        title="DeltaNet",
        family="linear",
        update_rule="S_t = S_{t-1} (I - b_t k_t k_t') + b_t v_t k_t'",
        source="Yang et al., arXiv:2406.06484",
        parameters=lambda x: x.d * (2 * x.key + 2 * x.value + x.heads) + _conv(x) + x.value_head,
        recurrent_state=_matrix_state,
        convolution_state=_conv,
        flops_per_state=8,
        delta_rule=True,
        conv_size=4,
    ),
    Mixer(
        name="gla",
        title="GLA",
        family="linear",
        update_rule="S_t = S_{t-1} Diag(a_t) + v_t k_t'",
        source="Yang et al., arXiv:2312.06635",
        parameters=lambda x: (
            x.d * (2 * x.key + 3 * x.value) + GLA_GATE_RANK * (x.d + x.key) + x.key + _conv(x) + x.value_head
        ),
        recurrent_state=_matrix_state,
        convolution_state=_conv,
        flops_per_state=7,
    ),
    Mixer(
        name="hgrn2",
        title="HGRN-2",
        family="linear",
        update_rule="S_t = S_{t-1} Diag(a_t) + v_t (1 - a_t)'",
        source="Qin et al., arXiv:2404.07904",
        parameters=lambda x: x.d * (2 * x.key + 2 * x.d) + x.conv * (2 * x.key + x.d) + x.d,
        recurrent_state=lambda x: x.key * (x.d // x.heads),
        convolution_state=lambda x: x.conv * (2 * x.key + x.d),
        lower_bounds=lambda x: x.key,
        flops_per_state=7,
        square_heads=True,
    ),
    Mixer(
        name="hgrn",
        title="HGRN",
        family="linear",
        update_rule="h_t = a_t * h_{t-1} + (1 - a_t) * v_t",
        source="Qin et al., arXiv:2311.04823",
        parameters=lambda x: 4 * x.d * x.key + 2 * x.conv * x.key + x.key,
        recurrent_state=lambda x: x.key,
        convolution_state=lambda x: 2 * x.conv * x.key,
        lower_bounds=lambda x: x.key,
        flops_per_state=5,
        state_dtype="model",
        square_heads=True,
    ),
    Mixer(
        name="retnet",
        title="RetNet",
        family="linear",
        update_rule="S_t = g S_{t-1} + v_t k_t'",
        source="Sun et al., arXiv:2307.08621",
        parameters=lambda x: x.d * (2 * x.key + 3 * x.value) + _conv(x) + x.value_head,
        recurrent_state=_matrix_state,
        convolution_state=_conv,
        flops_per_state=5,
        even_heads=True,
    ),
    Mixer(
        name="mamba2",
        title="Mamba-2",
        family="linear",
        update_rule="S_t = a_t S_{t-1} + v_t k_t'",
        source="Dao and Gu, arXiv:2405.21060",
        # in: gate and x (value), B and C (key), dt; out; the convolution and its bias; dt bias, A and D; the norm.
        # `heads` groups of B and C of state size `head_dim`, `value_heads` heads of x
        parameters=lambda x: (
            x.d * (3 * x.value + 2 * x.key + x.value_heads)
            + (x.conv + 1) * (x.value + 2 * x.key)
            + 3 * x.value_heads
            + x.value
        ),
        recurrent_state=_matrix_state,
        convolution_state=_conv,
        flops_per_state=5,
        conv_size=4,
        needs_convolution=True,
        shared_keys=True,
        options=frozenset({"value_heads"}),
    ),
    Mixer(
        name="rwkv6",
        title="RWKV-6",
        family="linear",
        update_rule="S_t = S_{t-1} Diag(a_t) + v_t k_t'; o_t = (S_{t-1} + v_t (d * k_t)') q_t",
        source="Peng et al., arXiv:2404.05892",
        # r, k, v, gate, o; the five token shifts; the decay; the bonus; the output norm
        parameters=lambda x: (
            x.d * (2 * x.key + 3 * x.value)
            + x.d * (10 * RWKV6_SHIFT_RANK + 6)
            + RWKV6_DECAY_RANK * (x.d + x.key)
            + 2 * x.key
            + 2 * x.value
        ),
        recurrent_state=_matrix_state,
        convolution_state=lambda x: x.d,  # the token shift keeps the last hidden state
        flops_per_state=7,
        takes_convolution=False,
    ),
)


@cache
def mixers() -> Mapping[str, Mixer]:
    """Every known mixer by name: ours, then those that installed packages add.

    Raises:
        ValueError: an entry point of the group `nas.mixers` is no `Mixer`, or has not its name, or one already taken.
    """
    known = {mixer.name: mixer for mixer in _MIXERS}
    for entry in entry_points(group="nas.mixers"):
        mixer = load_entry(entry)
        if mixer is None:
            continue
        if not isinstance(mixer, Mixer):
            raise ValueError(f"{described(entry)} gives {type(mixer).__name__}; expected nas.registry.Mixer")
        if mixer.name != entry.name or mixer.name in known:
            raise ValueError(f"{described(entry)} gives the mixer {mixer.name!r}; allowed: its own name, not yet taken")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", mixer.name) or mixer.name == "sliding_window":
            raise ValueError(f"{described(entry)}: allowed names have a-z, 0-9 and _, and are not sliding_window")
        if not entry_points(group="nas.mixer_builders", name=mixer.name):
            raise ValueError(
                f"{described(entry)}: nothing builds it; its package must give nas.mixer_builders:{mixer.name}"
            )
        known[mixer.name] = mixer
    return known


def described(entry: EntryPoint) -> str:
    """Group, name and package of an entry point, for messages."""
    package = f" of {entry.dist.name}" if entry.dist else ""
    return f"entry point {entry.group}:{entry.name}{package}"


def load_entry(entry: EntryPoint) -> Any:
    """What an entry point of another package names; None, with a logged warning, if importing it fails.

    One broken package must not stop commands that do not use it. What it would have added is refused as unknown.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code, which may fail in any way)
        _log.warning("%s cannot be loaded and is left out: %s: %s", described(entry), type(error).__name__, error)
        return None


def get_mixer(name: str) -> Mixer:
    """The mixer called `name`.

    Raises:
        ValueError: no such mixer; the message names the nearest one and all others.
    """
    known = mixers()
    if name not in known:
        raise ValueError(f"mixer {name!r} is unknown, or its package is not installed; {did_you_mean(name, known)}")
    return known[name]


def linear_mixers() -> tuple[str, ...]:
    """Names of the linear backbones, in registry order."""
    return tuple(name for name, mixer in mixers().items() if mixer.family == "linear")


def did_you_mean(value: str, allowed: Mapping[str, object] | tuple[str, ...]) -> str:
    """The tail of an error message: the nearest allowed name, then all of them."""
    near = difflib.get_close_matches(value, list(allowed), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(allowed)}"
