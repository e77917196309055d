"""The schema of a search space. Every field has a default except those that make it a search: see presets/*.yaml."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from nas.architecture import PLACEMENTS, Frozen
from nas.cost import Deployment
from nas.registry import did_you_mean, linear_mixers
from nas.workload import Workload
from search_spaces.problems import shown

Rate = Annotated[float, Field(ge=1e-12, le=1e3)]
"""A learning rate."""
Layers = Annotated[int, Field(gt=0, le=1024)]
Heads = Annotated[int, Field(gt=0, le=1024)]
HeadDim = Annotated[int, Field(gt=0, le=1024)]
Width = Annotated[int, Field(gt=0, le=2**16)]
Length = Annotated[int, Field(gt=0, le=2**20)]
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


class MixerSizes(Frozen):
    """Sizes of one mixer in the proxy; absent ones come from the proxy or the registry."""

    heads: Heads | None = None
    head_dim: HeadDim | None = None
    expand_v: Annotated[float, Field(gt=0, le=64)] | None = None
    conv_size: Annotated[int, Field(ge=0, le=1024)] | None = None


class Proxy(Frozen):
    """The small model that stands for a design: one size for all candidates."""

    layers: Layers
    hidden_size: Width
    intermediate_size: Width
    heads: Heads
    head_dim: HeadDim
    mixers: dict[str, MixerSizes] = {}
    rope_theta: PositiveFloat | None = 10000.0
    sequence_length: Length
    batch_size: Length
    warmup_steps: Annotated[int, Field(ge=0, le=10**8)] = 40
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    grad_clip: PositiveFloat = 1.0
    initializer_range: PositiveFloat = 0.02
    embedding_std: PositiveFloat = 0.02
    tie_word_embeddings: bool = False


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
    backbones: Annotated[tuple[str, ...], Field(min_length=1)]
    ratios: Annotated[tuple[Ratio, ...], Field(min_length=1)]
    placements: Annotated[tuple[str, ...], Field(min_length=1)] = ("interleaved",)
    kv_groups: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    """Query heads per key/value head of the full-attention layers."""
    routing: Annotated[tuple[Literal["none", "clvr"], ...], Field(min_length=1)] = ("none",)
    optimizers: dict[Literal["adamw", "muon"], Optimizer] = Field(min_length=1)
    proxy: Proxy
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
            if backbone not in linear_mixers():
                raise ValueError(f"backbones: {shown(backbone)} is unknown; {did_you_mean(backbone, linear_mixers())}")
        for mixer in self.proxy.mixers:
            if mixer not in (*linear_mixers(), "softmax"):
                raise ValueError(f"proxy.mixers: {mixer!r} is unknown; {did_you_mean(mixer, linear_mixers())}")
        for placement in self.placements:
            if placement not in PLACEMENTS:
                raise ValueError(f"placements: {shown(placement)} is unknown; {did_you_mean(placement, PLACEMENTS)}")
        for ratio in self.ratios:
            self._check_ratio(ratio)
        self._check_sizes()
        return self

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
