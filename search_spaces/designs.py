"""From a space to Candidates: one at a time by a Chooser (Optuna, or stored parameters), all of them, or baselines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from pydantic import ValidationError

from nas.architecture import Architecture, Candidate, LayerSpec, Recipe, Routing, place
from nas.registry import get_mixer
from search_spaces.problems import reason, shown
from search_spaces.schema import LogRange, MixerSizes, Ratio, SearchSpace, ratio_label

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
    explicit positions), kv_groups (not for pure), routing (where a delta-rule backbone is), optimizer, lr_<optimizer>.
    """
    backbone = str(choose.categorical("backbone", space.backbones))
    label = str(choose.categorical("ratio", [ratio_label(ratio) for ratio in space.ratios]))
    ratio = next(ratio for ratio in space.ratios if ratio_label(ratio) == label)
    placement = "interleaved"
    if isinstance(ratio, str) and ratio != "pure":
        placement = str(choose.categorical("placement", space.placements))
    full = full_positions(ratio, placement, space.proxy.layers)
    groups = int(choose.categorical("kv_groups", space.kv_groups)) if full else 1
    routing = "none"
    if get_mixer(backbone).delta_rule and len(full) < space.proxy.layers:
        routing = str(choose.categorical("routing", space.routing))
    optimizer = str(choose.categorical("optimizer", list(space.optimizers)))
    rates = space.optimizers[optimizer].lr  # type: ignore[index]  # a Literal key by name
    name = f"lr_{optimizer}"
    if isinstance(rates, LogRange):
        lr = choose.log_float(name, rates.low, rates.high)
    else:
        lr = float(choose.categorical(name, rates))
    return Candidate(
        architecture=architecture(space, backbone, full, groups, routing), recipe=recipe(space, optimizer, lr)
    )


def full_positions(ratio: Ratio, placement: str, layers: int) -> tuple[int, ...]:
    """0-based positions of the full-attention layers."""
    if not isinstance(ratio, str):
        return ratio
    if ratio == "pure":
        return ()
    every = int(ratio.removesuffix(":1"))
    return place(placement, layers // every, every, layers)


def architecture(
    space: SearchSpace, backbone: str, full: Sequence[int], kv_groups: int = 1, routing: str = "none"
) -> Architecture:
    """The proxy with `backbone` everywhere but at the positions `full`, which are full attention."""
    proxy = space.proxy
    linear, softmax = layer(space, backbone), layer(space, "softmax")
    if kv_groups > 1:
        softmax = softmax.model_copy(update={"kv_heads": softmax.heads // kv_groups})
    return Architecture(
        vocab_size=space.workload.vocab_size,
        hidden_size=proxy.hidden_size,
        intermediate_size=proxy.intermediate_size,
        layers=tuple(softmax if i in full else linear for i in range(proxy.layers)),
        routing=Routing.model_validate({"kind": routing}),
        tie_word_embeddings=proxy.tie_word_embeddings,
        initializer_range=proxy.initializer_range,
        embedding_std=proxy.embedding_std,
    )


def layer(space: SearchSpace, name: str) -> LayerSpec:
    """One proxy layer of the mixer `name`: the space's sizes, then the proxy's, then the registry's defaults."""
    mixer, sizes = get_mixer(name), space.proxy.mixers.get(name, MixerSizes())
    return LayerSpec(
        mixer=name,
        heads=sizes.heads or space.proxy.heads,
        head_dim=sizes.head_dim or space.proxy.head_dim,
        expand_v=sizes.expand_v or mixer.expand_v,
        conv_size=mixer.conv_size if sizes.conv_size is None else sizes.conv_size,
        rope_theta=space.proxy.rope_theta if mixer.family == "softmax" else None,
    )


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
    """Full attention, then each pure backbone, at the middle learning rate of the first optimiser (design.md 12).

    In a grid they have every recipe of every optimiser, as all cells do; pure backbones among its cells are no
    baselines twice.
    """
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
    designs = [architecture(space, space.backbones[0], tuple(range(space.proxy.layers)))]
    designs += [architecture(space, backbone, ()) for backbone in pure]
    return [Candidate(architecture=design, recipe=one) for design in designs for one in recipes]


def grid(space: SearchSpace) -> Iterator[tuple[dict[str, Value], Candidate]]:
    """Every combination once, with its parameters, in the order of the file; needs ladders of learning rates."""
    seen: set[str] = set()
    for optimizer, settings in space.optimizers.items():
        assert not isinstance(settings.lr, LogRange)  # the schema refuses ranges in a grid
        names = ("backbone", "ratio", "placement", "kv_groups", "routing", f"lr_{optimizer}")
        ratios = [ratio_label(ratio) for ratio in space.ratios]
        axes = (space.backbones, ratios, space.placements, space.kv_groups, space.routing, settings.lr)
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
    rest = (space.ratios, space.placements, space.kv_groups, space.routing)
    for backbone, ratio, placement, groups, routing in itertools.product(space.backbones, *rest):
        full = full_positions(ratio, placement, space.proxy.layers)
        routed = routing if get_mixer(backbone).delta_rule and len(full) < space.proxy.layers else "none"
        design = architecture(space, backbone, full, groups if full else 1, routed)
        found.setdefault(design.digest, design)
    return list(found.values())


def count(space: SearchSpace) -> int | float:
    """How many Candidates the space holds; infinite where a learning rate is a range."""
    recipes = sum(math.inf if isinstance(o.lr, LogRange) else len(o.lr) for o in space.optimizers.values())
    return len(architectures(space)) * recipes


def budget_problem(space: SearchSpace) -> str | None:
    """One line if no design of the space fits its memory budget, naming the smallest; else None."""
    if space.budget.kv_cache is None:
        return None
    limit = space.budget.kv_cache.limit(space.deployment)
    smallest = min(space.deployment.cost(found).kv_cache_bytes for found in architectures(space))
    if smallest <= limit:
        return None
    share = smallest / space.deployment.full_attention_bytes()
    return (
        f"budget.kv_cache={limit} bytes: no design of {space.name} fits; the smallest keeps {smallest} bytes "
        f"({share:.2%} of full attention)"
    )


def deployment_problem(space: SearchSpace) -> str | None:
    """One line if some design of the space cannot be built, as a proxy or at its Deployment, naming why; else None."""
    every, first = tuple(range(space.proxy.layers)), space.backbones[0]
    mixers = ("softmax", *space.backbones)
    # Layers first: every design has two kinds of them, and the one to blame is to be named.
    proxies: list[tuple[str, Callable[[], object]]] = [(mixer, partial(layer, space, mixer)) for mixer in mixers]
    proxies += [(backbone, partial(architecture, space, backbone, ())) for backbone in space.backbones]
    for mixer, build in proxies:
        if problem := _unbuildable("proxy", mixer, build):
            return problem
    designs = [(backbone, architecture(space, backbone, ())) for backbone in space.backbones]
    designs += [("softmax", architecture(space, first, every, groups)) for groups in space.kv_groups]
    for mixer, design in designs:
        if problem := _unbuildable("deployment", mixer, partial(space.deployment.architecture, design)):
            return problem
    return None


def _unbuildable(where: str, mixer: str, build: Callable[[], object]) -> str | None:
    try:
        build()
    except ValidationError as error:
        groups = " or kv_groups" if mixer == "softmax" else ""
        return f"{where}: {mixer} does not fit its sizes: {reason(error)}; set {where}.mixers.{mixer}{groups}"
    return None
