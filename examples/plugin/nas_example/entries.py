"""The halves without torch: what a design with this mixer costs, and what a sequence of this task holds."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from nas.registry import Mixer
from nas.tasks import RecallTask

LEAKY_AVERAGE = Mixer(
    name="leaky_average",
    title="Leaky average",
    family="linear",
    update_rule="h_t = a * h_{t-1} + (1 - a) * v_t, a fixed vector a; o_t = h_t * g_t",
    source="an example of nas; the diagonal core of HGRN, arXiv:2311.04823, without its gates",
    parameters=lambda x: 3 * x.d * x.value + x.value,  # values, gate, output; the decays
    recurrent_state=lambda x: x.value,
    flops_per_state=3,
    takes_convolution=False,
    routable=False,  # it calls no kernel of fla, at which routing reads a layer's values
)


class Overwrite(RecallTask):
    """Recall of overwritten values: every key is shown with a value, then again with another; the second one counts.

    A model that adds without erasing answers with a mixture of both. Chance is 1 / values.
    """

    task: Literal["overwrite"] = "overwrite"
    keys: Annotated[int, Field(ge=2, le=2**16)] = 16
    values: Annotated[int, Field(ge=2, le=2**16)] = 16
    pairs: tuple[PositiveInt, ...] = Field(default=(2, 4), min_length=1)
    evaluation_pairs: tuple[PositiveInt, ...] = Field(default=(4, 6), min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        largest = max(*self.pairs, *self.evaluation_pairs)
        if largest > self.keys:
            raise ValueError(f"pairs={largest} needs as many different keys; keys={self.keys}")
        return self

    @property
    def special_tokens(self) -> int:
        return self.keys + self.values

    @property
    def answers(self) -> int:
        return self.values

    @property
    def min_length(self) -> int:
        return 6 * max(*self.pairs, *self.evaluation_pairs)

    def shown(self, size: int) -> int:
        return 4 * size
