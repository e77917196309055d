"""The schema of a search space. Every field has a default except those that make it a search: see presets/*.yaml."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, ValidationError, model_validator

from nas.architecture import PLACEMENTS, Frozen, Routing
from nas.cost import Deployment
from nas.registry import did_you_mean, get_mixer, linear_mixers
from nas.workload import Workload
from search_spaces.problems import reason, shown
from search_spaces.proxy import SLIDING_WINDOW, Backbone, MixerSizes, Proxy, Sizing, check_backbone, pattern

Rate = Annotated[float, Field(ge=1e-12, le=1e3)]
"""A learning rate."""
Steps = Annotated[int, Field(gt=0, le=10**8)]
MAX_TRIALS = 10**6
_MAX_DEPLOYED = 2**30

Ratio = str | tuple[int, ...]
"""`pure`, `N:1` (one full layer in N, P1's label), or the explicit 0-based positions of the full layers."""

_RATIO = re.compile(r"([1-9]\d{0,5}):1")
_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(B|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def ratio_label(ratio: Ratio) -> str:
    """How a ratio is named in parameters and tables: itself, or "at 1,5" for explicit positions."""
    return ratio if isinstance(ratio, str) else "at " + ",".join(map(str, ratio))


class LogRange(Frozen):
    """A learning rate sampled uniformly in the logarithm."""

    low: Rate
    high: Rate

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)


class Optimizer(Frozen):
    """One optimiser and its learning rates: a range {low, high}, or a list (a ladder, and what a grid needs)."""

    lr: LogRange | Annotated[tuple[Rate, ...], Field(min_length=1)]
    scalar_lr: Rate | None = None
    """Muon only: the AdamW rate of embeddings, head, norms and vectors; `lr` where absent."""
    weight_decay: float = Field(default=0.0, ge=0)

    @property
    def middle(self) -> float:
        """The rate of the baselines: the geometric middle of the range, or the middle rung of the ladder."""
        if isinstance(self.lr, LogRange):
            return self.lr.middle
        return sorted(self.lr)[len(self.lr) // 2]


def _parse_budget(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.endswith("%"):
        try:
            return {"share": float(text[:-1]) / 100}
        except ValueError:
            pass
    if match := _BYTES.fullmatch(text):
        return {"bytes": int(float(match[1]) * _UNITS[match[2].lower()])}
    raise ValueError(
        f"{shown(value)} is not a memory size; allowed: a share of full attention (35%) or a size (512MiB)"
    )


class MemoryLimit(Frozen):
    """An upper bound on kv_cache_bytes at the Deployment: a share of full attention there, or bytes."""

    share: Annotated[float, Field(gt=0, le=1000)] | None = None
    bytes: Annotated[int, Field(gt=0, le=2**62)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_number(cls, value: object) -> object:
        return {"bytes": value} if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.share is None) == (self.bytes is None):
            raise ValueError("give either a share (35%) or bytes (512MiB)")
        return self

    def limit(self, deployment: Deployment) -> int:
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None
        return int(self.share * deployment.full_attention_bytes())


class Budget(Frozen):
    """What a design may cost at most; over-budget proposals never become trials."""

    kv_cache: Annotated[MemoryLimit, BeforeValidator(_parse_budget)] | None = None


class Halving(Frozen):
    """Successive halving over `steps` (rungs): the best 1/reduction of a rung goes on to the next."""

    steps: Annotated[tuple[Steps, ...], Field(min_length=1, max_length=64)]
    reduction: Annotated[float, Field(gt=1, le=1e6)] = 2.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError(f"steps={list(self.steps)} must increase")
        return self


class SearchSpace(Frozen):
    """A search: what may vary, how a candidate is judged, and what it may cost.

    A grid space tries every combination once and prunes nothing; it needs ladders of learning rates, not ranges.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    description: str = ""
    grid: bool = False
    trials: Annotated[int, Field(gt=0, le=MAX_TRIALS)] | None = None
    """Trials that train when `--trials` is not given; a grid takes all its combinations."""
    backbones: Annotated[tuple[Backbone, ...], Field(min_length=1)]
    """Linear mixers, and patterns of them that repeat over the layers that are not full attention, in order."""
    ratios: Annotated[tuple[Ratio, ...], Field(min_length=1)]
    placements: Annotated[tuple[str, ...], Field(min_length=1)] = ("interleaved",)
    kv_groups: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    """Query heads per key/value head of the softmax layers, those with a window too."""
    routing: Annotated[tuple[str, ...], Field(min_length=1)] = ("none",)
    """Labels of `nas.architecture.Routing`; a design that cannot have one of them goes without routing."""
    optimizers: dict[Literal["adamw", "muon"], Optimizer] = Field(min_length=1)
    proxy: Proxy
    sizing: Sizing = Sizing()
    workload: Workload = Workload()
    rungs: Halving
    deployment: Deployment = Deployment()
    budget: Budget = Budget()
    objectives: Annotated[tuple[Literal["recall", "kv_cache", "loss"], ...], Field(min_length=1)] = (
        "recall",
        "kv_cache",
    )
    sampler: Literal["tpe", "nsga2", "random"] = "tpe"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("backbones", "ratios", "placements", "kv_groups", "routing", "objectives"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={shown([*values])} holds a value twice")
        for backbone in self.backbones:
            check_backbone(backbone, self.proxy.layers)
        for routing in self.routing:
            _check_routing(routing)
        for placement in self.placements:
            if placement not in PLACEMENTS:
                raise ValueError(f"placements: {shown(placement)} is unknown; {did_you_mean(placement, PLACEMENTS)}")
        for ratio in self.ratios:
            self._check_ratio(ratio)
        self._check_sizes()
        self._check_mixers()
        return self

    @property
    def mixers(self) -> tuple[str, ...]:
        """Names in the backbones, each once, in order: linear mixers, and `sliding_window` where a pattern has it."""
        return tuple(dict.fromkeys(name for backbone in self.backbones for name in pattern(backbone)))

    @property
    def linear_mixers(self) -> tuple[str, ...]:
        """The linear mixers among `mixers`."""
        return tuple(name for name in self.mixers if name != SLIDING_WINDOW)

    def _check_ratio(self, ratio: Ratio) -> None:
        layers = self.proxy.layers
        if not isinstance(ratio, str):
            if sorted(set(ratio)) != list(ratio) or not all(0 <= i < layers for i in ratio):
                raise ValueError(
                    f"ratios: {shown(list(ratio))} must be increasing layer positions from 0 to {layers - 1}"
                )
            return
        match = _RATIO.fullmatch(ratio)
        if ratio != "pure" and match is None:
            raise ValueError(
                f"ratios: {shown(ratio)} is unknown; allowed: pure, N:1 (one full layer in N), or layer positions"
            )
        if match and int(match[1]) > layers:
            raise ValueError(
                f"ratios: {ratio!r} needs at least {match[1]} layers; proxy.layers={layers} (design.md 7: "
                "all designs of a comparison have one depth)"
            )

    def _check_sizes(self) -> None:
        proxy = self.proxy
        for sizes in (self.deployment, *self.deployment.mixers.values()):
            for name, size in sizes:
                if isinstance(size, int | float) and size > _MAX_DEPLOYED:
                    raise ValueError(f"deployment.{name}={size} is too large; allowed: up to {_MAX_DEPLOYED}")
        for groups in self.kv_groups:
            heads = (proxy.mixers.get("softmax") or MixerSizes()).heads or proxy.heads
            if heads % groups:
                raise ValueError(f"kv_groups: {groups} must divide the softmax heads of the proxy, {heads}")
        for task in self.workload.recall:
            if task.min_length > proxy.sequence_length:
                raise ValueError(
                    f"workload.recall: {task.task} needs {task.min_length} tokens; "
                    f"proxy.sequence_length={proxy.sequence_length}"
                )
        if self.grid and any(isinstance(optimizer.lr, LogRange) for optimizer in self.optimizers.values()):
            raise ValueError("optimizers: a grid needs a list of learning rates, not a range")
        adamw = self.optimizers.get("adamw")
        if adamw and adamw.scalar_lr:
            raise ValueError(f"optimizers.adamw.scalar_lr={adamw.scalar_lr} applies to muon only")
        if "recall" not in self.objectives or "kv_cache" not in self.objectives:
            raise ValueError(f"objectives={[*self.objectives]} must hold recall and kv_cache; loss may be added")

    def _check_mixers(self) -> None:
        given, deployed = self.proxy.mixers, self.deployment.mixers
        self.proxy.check_mixers()
        windowed = SLIDING_WINDOW in self.mixers
        if windowed and given.get(SLIDING_WINDOW, MixerSizes()).window is None:
            raise ValueError(f"proxy.mixers.{SLIDING_WINDOW}.window is missing; backbones use {SLIDING_WINDOW}")
        for name, sizes in deployed.items():
            if sizes.window and not (name == "softmax" and windowed):
                raise ValueError(
                    f"deployment.mixers.{name}.window={sizes.window} applies to softmax where backbones use "
                    f"{SLIDING_WINDOW}"
                )
            own = given.get(name, MixerSizes()).value_heads
            if sizes.value_heads and not own and not get_mixer(name).shared_keys:
                raise ValueError(
                    f"deployment.mixers.{name}.value_heads={sizes.value_heads}: the proxy has as many value heads as "
                    f"heads; set proxy.mixers.{name}.value_heads too"
                )
        for name in set(given) & {*linear_mixers()} if self.sizing.state else ():
            for field in ("heads", "head_dim", "value_heads"):
                if value := getattr(given[name], field):
                    raise ValueError(
                        f"proxy.mixers.{name}.{field}={value} contradicts sizing.state={self.sizing.state}, which "
                        "chooses it; give one of the two"
                    )


def _check_routing(label: str) -> None:
    try:
        Routing.parse(label)
    except ValidationError as error:
        raise ValueError(f"routing {shown(label)}: {reason(error)}") from None
