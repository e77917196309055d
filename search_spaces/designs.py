"""From a space to Candidates: one at a time by a Chooser (Optuna, or stored parameters), all of them, or baselines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from pydantic import ValidationError

from nas.architecture import Architecture, Candidate, Recipe, Routing, place
from search_spaces.problems import shown
from search_spaces.proxy import SLIDING_WINDOW, Backbone, backbone_label, pattern
from search_spaces.schema import LogRange, Ratio, SearchSpace, ratio_label
from search_spaces.sizing import layer, matched

Value = str | int | float


class Chooser(Protocol):
    """Picks values for named parameters."""

    def categorical(self, name: str, choices: Sequence[Value]) -> Value: ...

    def log_float(self, name: str, low: float, high: float) -> float: ...


class Fixed:
    """A Chooser that replays given parameters.

    Raises:
        ValueError: a parameter is missing or outside of the space; names it, its value and what is allowed.
    """

    def __init__(self, params: Mapping[str, Value]) -> None:
        self._params = params

    def _get(self, name: str, allowed: str) -> Value:
        if name not in self._params:
            raise ValueError(f"{name} is missing; allowed: {allowed}")
        return self._params[name]

    def categorical(self, name: str, choices: Sequence[Value]) -> Value:
        allowed = ", ".join(map(str, choices))
        value = self._get(name, allowed)
        if isinstance(value, bool) or value not in choices:  # to Python, True is 1
            raise ValueError(f"{name}={shown(value)} is not in this space; allowed: {allowed}")
        return value

    def log_float(self, name: str, low: float, high: float) -> float:
        value = self._get(name, f"{low:g} to {high:g}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{name}={shown(value)} is not in this space; allowed: {low:g} to {high:g}")
        return float(value)


def candidate(space: SearchSpace, choose: Chooser) -> Candidate:
    """The Candidate that `choose` picks from `space`. Parameter names: backbone, ratio, placement (not for pure or
    explicit positions), kv_groups (where a softmax layer is), routing (where the design takes one), optimizer,
    lr_<optimizer>. A routing that the design cannot have is none.
    """
    backbone = find_backbone(space, str(choose.categorical("backbone", backbone_labels(space))))
    label = str(choose.categorical("ratio", [ratio_label(ratio) for ratio in space.ratios]))
    ratio = next(ratio for ratio in space.ratios if ratio_label(ratio) == label)
    placement = "interleaved"
    if isinstance(ratio, str) and ratio != "pure":
        placement = str(choose.categorical("placement", space.placements))
    full = full_positions(ratio, placement, space.proxy.layers)
    grouped = _has_softmax(layer_names(backbone, full, space.proxy.layers))
    groups = int(choose.categorical("kv_groups", space.kv_groups)) if grouped else 1
    design = architecture(space, backbone, full, groups)
    if takes_routing(space, design):
        design = routed(design, str(choose.categorical("routing", space.routing))) or design
    optimizer = str(choose.categorical("optimizer", list(space.optimizers)))
    rates = space.optimizers[optimizer].lr  # type: ignore[index]  # a Literal key by name
    name = f"lr_{optimizer}"
    if isinstance(rates, LogRange):
        lr = choose.log_float(name, rates.low, rates.high)
    else:
        lr = float(choose.categorical(name, rates))
    return Candidate(architecture=design, recipe=recipe(space, optimizer, lr))


def backbone_labels(space: SearchSpace) -> list[str]:
    return [backbone_label(backbone) for backbone in space.backbones]


def find_backbone(space: SearchSpace, label: str) -> Backbone:
    return space.backbones[backbone_labels(space).index(label)]


def full_positions(ratio: Ratio, placement: str, layers: int) -> tuple[int, ...]:
    """0-based positions of the full-attention layers."""
    if not isinstance(ratio, str):
        return ratio
    if ratio == "pure":
        return ()
    every = int(ratio.removesuffix(":1"))
    return place(placement, layers // every, every, layers)


def layer_names(backbone: Backbone, full: Sequence[int], layers: int) -> list[str]:
    """What each layer is: `softmax` at the positions `full`, the backbone's names in turn at all others."""
    names = itertools.cycle(pattern(backbone))
    return ["softmax" if index in full else next(names) for index in range(layers)]


def _has_softmax(names: Sequence[str]) -> bool:
    return "softmax" in names or SLIDING_WINDOW in names


def architecture(
    space: SearchSpace, backbone: Backbone, full: Sequence[int], kv_groups: int = 1, routing: str = "none"
) -> Architecture:
    """The proxy with `backbone` everywhere but at the positions `full`, which are full attention; its MLPs are as wide
    as `space.sizing` says for the design without routing, so that a routing adds what it adds.

    Raises:
        ValueError: the sizes fit no such layers, or the design cannot have that routing.
    """
    depth = space.proxy.layers
    design = _stack(space, layer_names(backbone, full, depth), kv_groups)
    if space.sizing.parameters == "matched":
        design = matched(design, _stack(space, ["softmax"] * depth, min(space.kv_groups)))
    return design if routing == "none" else _with_routing(design, routing)


def _stack(space: SearchSpace, names: Sequence[str], kv_groups: int = 1) -> Architecture:
    proxy = space.proxy
    layers = {name: layer(space, name) for name in dict.fromkeys(names)}
    if kv_groups > 1:
        for name in {"softmax", SLIDING_WINDOW} & layers.keys():
            update = {"kv_heads": layers[name].heads // kv_groups}
            layers[name] = layers[name].model_copy(update=update)
    return Architecture(
        vocab_size=space.workload.vocab_size,
        hidden_size=proxy.hidden_size,
        intermediate_size=proxy.intermediate_size,
        layers=tuple(layers[name] for name in names),
        tie_word_embeddings=proxy.tie_word_embeddings,
        initializer_range=proxy.initializer_range,
        embedding_std=proxy.embedding_std,
    )


def _with_routing(design: Architecture, label: str) -> Architecture:
    return Architecture(**(dict(design) | {"routing": Routing.parse(label)}))


def routed(design: Architecture, label: str) -> Architecture | None:
    """`design` with that routing; None if it cannot have it."""
    try:
        return _with_routing(design, label)
    except ValidationError:
        return None


def takes_routing(space: SearchSpace, design: Architecture) -> bool:
    """Whether `design` has a layer that some routing, of the space's or of the paper's, could start from."""
    if any(one.entry.delta_rule for one in design.layers):
        return True
    return any(routed(design, label) for label in space.routing if label != "none")


def recipe(space: SearchSpace, optimizer: str, lr: float) -> Recipe:
    settings = space.optimizers[optimizer]  # type: ignore[index]  # a Literal key by name
    proxy = space.proxy
    return Recipe.model_validate(
        {
            "optimizer": optimizer,
            "lr": lr,
            "scalar_lr": settings.scalar_lr,
            "weight_decay": settings.weight_decay,
            "grad_clip": proxy.grad_clip,
            "warmup_steps": proxy.warmup_steps,
            "total_steps": space.rungs.steps[-1],
            "decay_fraction": proxy.decay_fraction,
            "batch_size": proxy.batch_size,
            "sequence_length": proxy.sequence_length,
        }
    )


def baselines(space: SearchSpace) -> list[Candidate]:
    """Full attention, then each pure backbone (a pattern without full attention is one), at the middle learning rate of
    the first optimiser (design.md 12). Softmax layers have the fewest query heads per KV head that the space has.

    In a grid they have every recipe of every optimiser, as all cells do; pure backbones among its cells are no
    baselines twice.
    """
    return [found for _, found in labelled_baselines(space)]


def labelled_baselines(space: SearchSpace) -> list[tuple[dict[str, Value], Candidate]]:
    """`baselines`, each with its parameters where it is a design of the space, else without any."""
    optimizer, settings = next(iter(space.optimizers.items()))
    recipes = [recipe(space, optimizer, settings.middle)]
    pure = list(space.backbones)
    if space.grid:
        recipes = [
            recipe(space, name, lr)
            for name, other in space.optimizers.items()
            if not isinstance(other.lr, LogRange)
            for lr in other.lr
        ]
        pure = [] if "pure" in space.ratios else pure
    depth, groups = space.proxy.layers, min(space.kv_groups)
    full = architecture(space, space.backbones[0], tuple(range(depth)), groups)
    found: list[tuple[dict[str, Value], Candidate]] = [({}, Candidate(architecture=full, recipe=r)) for r in recipes]
    for backbone in pure:
        design = architecture(space, backbone, (), groups)  # a window has KV heads too
        found += [
            (_parameters_of(space, backbone, design, r), Candidate(architecture=design, recipe=r)) for r in recipes
        ]
    return found


def _parameters_of(space: SearchSpace, backbone: Backbone, design: Architecture, one: Recipe) -> dict[str, Value]:
    """The parameters that give a pure baseline; none where it is no design of the space."""
    recorder = Recorder(
        {
            "backbone": backbone_label(backbone),
            "ratio": "pure",
            "kv_groups": min(space.kv_groups),
            "routing": "none",
            "optimizer": one.optimizer,
            f"lr_{one.optimizer}": one.lr,
        }
    )
    try:
        same = candidate(space, recorder).architecture == design
    except ValueError:  # no pure stacks, or none without routing, in this space
        return {}
    return recorder.used if same else {}


def grid(space: SearchSpace) -> Iterator[tuple[dict[str, Value], Candidate]]:
    """Every combination once, with its parameters, in the order of the file; needs ladders of learning rates."""
    seen: set[str] = set()
    for optimizer, settings in space.optimizers.items():
        assert not isinstance(settings.lr, LogRange)  # the schema refuses ranges in a grid
        names = ("backbone", "ratio", "placement", "kv_groups", "routing", f"lr_{optimizer}")
        ratios = [ratio_label(ratio) for ratio in space.ratios]
        axes = (backbone_labels(space), ratios, space.placements, space.kv_groups, space.routing, settings.lr)
        for values in itertools.product(*axes):
            recorder = Recorder({**dict(zip(names, values, strict=True)), "optimizer": optimizer})
            found = candidate(space, recorder)
            if found.digest not in seen:
                seen.add(found.digest)
                yield recorder.used, found


class Recorder(Fixed):
    """Replays parameters and remembers which were asked for: those that the design depends on."""

    def __init__(self, params: Mapping[str, Value]) -> None:
        super().__init__(params)
        self.used: dict[str, Value] = {}

    def _get(self, name: str, allowed: str) -> Value:
        self.used[name] = super()._get(name, allowed)
        return self.used[name]


def architectures(space: SearchSpace) -> list[Architecture]:
    """All different architectures of the space, recipes apart: for counts, cost ranges and budget checks."""
    found: dict[str, Architecture] = {}
    axes = (space.backbones, space.ratios, space.placements, space.kv_groups)
    seen: set[tuple[object, ...]] = set()
    for backbone, ratio, placement, kv_groups in itertools.product(*axes):
        full = full_positions(ratio, placement, space.proxy.layers)
        names = layer_names(backbone, full, space.proxy.layers)
        groups = kv_groups if _has_softmax(names) else 1
        if (*names, groups) in seen:
            continue
        seen.add((*names, groups))
        plain = architecture(space, backbone, full, groups)
        for label in space.routing:
            design = routed(plain, label) or plain
            found.setdefault(design.digest, design)
    return list(found.values())


def count(space: SearchSpace) -> int | float:
    """How many Candidates the space holds; infinite where a learning rate is a range."""
    recipes = sum(math.inf if isinstance(o.lr, LogRange) else len(o.lr) for o in space.optimizers.values())
    return len(architectures(space)) * recipes
