"""The six cells of the first look and the sizes they share; what they are and why: first_look.py."""

from __future__ import annotations

from dataclasses import dataclass

from nas.architecture import Architecture, LayerSpec, Recipe, interleaved
from nas.cost import match_parameters, parameters
from nas.tasks import MQAR
from nas.workload import Text, Workload

RATIOS = {"pure": None, "12:1": 12, "3:1": 3}
"""One full layer every so many."""
CELLS = (
    ("gated_deltanet", "pure"),
    ("gla", "pure"),
    ("gla", "3:1"),
    ("gated_deltanet", "3:1"),
    ("gated_deltanet", "12:1"),
    ("gla", "12:1"),
)
"""In such an order that each half holds both backbones and all three ratios."""


@dataclass(frozen=True)
class Settings:
    layers: int = 12
    hidden_size: int = 128
    intermediate_size: int = 384
    heads: int = 1
    head_dim: int = 16
    softmax_heads: int = 4
    gla_conv: int = 0
    length: int = 256
    batch: int = 40
    keys: int = 64
    values: int = 16
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    lrs: tuple[float, ...] = (8e-4, 2e-3, 5e-3)
    warmup_steps: int = 100
    seed: int = 0
    curve_sequences: int = 80
    final_sequences: int = 400
    evaluation_rows: int = 200

    @property
    def capacity(self) -> int:
        """Associations that one linear layer can hold."""
        return self.heads * self.head_dim

    def workload(self) -> Workload:
        task = MQAR(keys=self.keys, values=self.values, pairs=self.pairs, evaluation_pairs=self.pairs)
        return Workload(text=Text(weight=0), recall=(task,))

    def recipe(self, lr: float, steps: int) -> Recipe:
        return Recipe(
            optimizer="adamw",
            lr=lr,
            warmup_steps=min(self.warmup_steps, steps // 4),
            total_steps=steps,
            batch_size=self.batch,
            sequence_length=self.length,
        )


TINY = Settings(
    hidden_size=32,
    intermediate_size=64,
    length=64,
    batch=6,
    keys=16,
    values=8,
    pairs=(4, 8, 16),
    lrs=(2e-3, 5e-3),
    curve_sequences=6,
    final_sequences=12,
)


def design(settings: Settings, backbone: str, ratio: str) -> Architecture:
    """The stack of a cell, as wide as brings its parameters to those of pure GDN."""

    def stack(name: str, every: int | None, conv: int) -> Architecture:
        linear = LayerSpec(mixer=name, heads=settings.heads, head_dim=settings.head_dim, conv_size=conv)
        size = settings.hidden_size // settings.softmax_heads
        softmax = LayerSpec(mixer="softmax", heads=settings.softmax_heads, head_dim=size, rope_theta=10000.0)
        full = interleaved(every, settings.layers) if every else ()
        return Architecture(
            vocab_size=settings.workload().vocab_size,
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            layers=tuple(softmax if i in full else linear for i in range(settings.layers)),
            embedding_std=0.125,
        )

    reference = stack("gated_deltanet", None, 4)
    conv = 4 if backbone == "gated_deltanet" else settings.gla_conv
    return match_parameters(stack(backbone, RATIOS[ratio], conv), parameters(reference))
