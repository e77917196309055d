"""Run by test_interpreter.py under TRITON_INTERPRET=1: fla's Triton kernels beside ours, at tiny shapes.

Each mixer's two kernels run on a pairwise cover of the factors below and of its own, the recurrent one at a quarter of
the length. Prints one JSON object: case -> [largest relative error over outputs and gradients, bound].
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from fla.ops.gla import chunk_gla, fused_recurrent_gla
from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.retention import chunk_retention, fused_recurrent_retention
from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
from torch import Tensor

from nas.models import cpu_channel_delta, cpu_delta, cpu_gla, cpu_hgrn, cpu_rwkv6, cpu_simple_gla
from tests.models.interpreted_modules import module_cases
from tests.models.interpreter import help_interpreter, largest_error, pairwise_cover

BOUND = 2e-5
FACTORS: dict[str, tuple[Any, Any]] = {
    "length": (66, 9),  # fla's chunks have 64 steps
    "batch": (1, 2),
    "heads": (1, 2),  # in this order of the first three, few cases are large in more than one of them
    "packed": (False, True),
    "key": (16, 24),
    "value": (16, 24),
    "initial_state": (False, True),
    "output_final_state": (False, True),
}
STATE_FIRST = {"state_v_first": (False, True)}
GROUPS = {"groups": (2, 1)}
NORM = {"use_qk_l2norm_in_kernel": (False, True)}
SCALE = {"scale": (None, 0.7)}
GATE = {
    "use_gate_in_kernel": (False, True),
    "use_beta_sigmoid_in_kernel": (False, True),
    "allow_neg_eigval": (False, True),
}
Case = dict[str, Any]


class Draw:
    """Random streams of one case: [batch, length, *shape], or packed [1, batch * length, *shape]."""

    def __init__(self, case: Case) -> None:
        self.case = case
        total = case["batch"] * case["length"]
        self.shape = (1, total) if case["packed"] else (case["batch"], case["length"])
        self.key_heads: int = case["heads"]
        self.heads = self.key_heads * int(case.get("groups", 1))
        self.key, self.value = case["key"], case["value"]

    def state(self, per_head: bool) -> Tensor:
        """A start for each sequence."""
        sequences = 2 if self.case["packed"] else self.case["batch"]
        if not per_head:
            return torch.randn(sequences, self.key)
        shape = (self.value, self.key) if self.case.get("state_v_first") else (self.key, self.value)
        return torch.randn(sequences, self.heads, *shape)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*self.shape, *shape)

    def log_decay(self, *shape: int) -> Tensor:
        return -2 * torch.rand(*self.shape, *shape)

    def rate(self, *shape: int) -> Tensor:
        return torch.rand(*self.shape, *shape)

    def qkv(self, q: str = "q") -> dict[str, Tensor]:
        """Keys of length 1: the delta rule diverges on others, and so do rounding errors."""
        k = F.normalize(self.normal(self.key_heads, self.key), dim=-1)
        return {q: self.normal(self.key_heads, self.key), "k": k, "v": self.normal(self.heads, self.value)}


@dataclass(frozen=True)
class Kernels:
    chunk: Callable[..., Any]
    recurrent: Callable[..., Any]
    ours: Callable[..., Any]
    leaves: Callable[[Draw], dict[str, Tensor]]
    own: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Further factors: keywords of the kernels, and `groups`, value heads to a key head."""
    chunk_bound: float = BOUND
    """Wider where the gate's parameters get gradients: sums over all tokens that nearly cancel."""
    matrix_state: bool = True
    """False for HGRN, whose state is a vector and whose chunk kernel takes no packed sequences."""


def _retention(draw: Draw) -> dict[str, Tensor]:
    return draw.qkv()


def _simple_gla(draw: Draw) -> dict[str, Tensor]:
    return {**draw.qkv(), "g": draw.log_decay(draw.heads)}


def _gla(draw: Draw) -> dict[str, Tensor]:
    return {**draw.qkv(), "g": draw.log_decay(draw.heads, draw.key)}


def _rwkv6(draw: Draw) -> dict[str, Tensor]:
    return {**draw.qkv("r"), "w": draw.log_decay(draw.heads, draw.key), "u": torch.randn(draw.heads, draw.key)}


def _delta_rule(draw: Draw) -> dict[str, Tensor]:
    return {**draw.qkv(), "beta": draw.rate(draw.heads)}


def _gated_delta_rule(draw: Draw) -> dict[str, Tensor]:
    return {**draw.qkv(), **_gates(draw)}


def _kda(draw: Draw) -> dict[str, Tensor]:
    return {**draw.qkv(), **_gates(draw, draw.key)}


def _gates(draw: Draw, *per_head: int) -> dict[str, Tensor]:
    case, heads = draw.case, draw.heads
    beta = draw.normal(heads) if case["use_beta_sigmoid_in_kernel"] else draw.rate(heads)
    if not case["use_gate_in_kernel"]:
        return {"g": draw.log_decay(heads, *per_head), "beta": beta}
    bias = torch.randn(torch.Size((heads, *per_head)).numel())
    return {"g": draw.normal(heads, *per_head), "beta": beta, "A_log": torch.randn(heads), "dt_bias": bias}


def _gdn2(draw: Draw) -> dict[str, Tensor]:
    streams = {
        "g": draw.log_decay(draw.heads, draw.key),
        "b": draw.rate(draw.heads, draw.key),
        "w": draw.rate(draw.heads, draw.value),
    }
    return {**draw.qkv(), **streams}


def _hgrn(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(draw.key), "g": draw.log_decay(draw.key)}


def _recurrent_gla(g: Tensor, **others: Any) -> Any:
    return fused_recurrent_gla(gk=g, **others)


def _half_chunk_delta_rule(**options: Any) -> Any:
    """DeltaNet's chunk kernel, which refuses float32, and so works on inputs rounded to float16."""
    halved = {name: x.half() for name, x in options.items() if torch.is_tensor(x) and x.is_floating_point()}
    return chunk_delta_rule(**options | halved)


KERNELS = {
    "gated_deltanet": Kernels(
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
        cpu_delta.gated_delta_rule,
        _gated_delta_rule,
        GROUPS | NORM | GATE | STATE_FIRST,
        chunk_bound=1e-4,
    ),
    "kda": Kernels(
        chunk_kda,
        fused_recurrent_kda,
        cpu_channel_delta.kda,
        _kda,
        GROUPS | NORM | GATE | STATE_FIRST,
        chunk_bound=1e-4,
    ),
    "gated_deltanet2": Kernels(
        chunk_gdn2, fused_recurrent_gdn2, cpu_channel_delta.gated_deltanet2, _gdn2, NORM | STATE_FIRST
    ),
    "deltanet": Kernels(
        _half_chunk_delta_rule, fused_recurrent_delta_rule, cpu_delta.delta_rule, _delta_rule, NORM, chunk_bound=1e-3
    ),
    "gla": Kernels(chunk_gla, _recurrent_gla, cpu_gla.gla, _gla, SCALE | STATE_FIRST),
    "mamba2": Kernels(
        chunk_simple_gla, fused_recurrent_simple_gla, cpu_simple_gla.simple_gla, _simple_gla, SCALE | STATE_FIRST
    ),
    "retnet": Kernels(chunk_retention, fused_recurrent_retention, cpu_simple_gla.retention, _retention, SCALE),
    "rwkv6": Kernels(chunk_rwkv6, fused_recurrent_rwkv6, cpu_rwkv6.rwkv6, _rwkv6, SCALE),
    "hgrn": Kernels(chunk_hgrn, fused_recurrent_hgrn, cpu_hgrn.hgrn, _hgrn, {"length": (130, 9)}, matrix_state=False),
}


def kernel_cases(name: str) -> Iterator[tuple[str, float, float]]:
    """(case, error, bound) over the mixer's cover."""
    kernels = KERNELS[name]
    for number, case in enumerate(pairwise_cover(FACTORS | kernels.own)):
        torch.manual_seed(number)
        settings = ", ".join(f"{key}={value}" for key, value in case.items())
        short = {**case, "length": case["length"] // 4}
        yield f"{name}, recurrent: {settings}", _error(kernels, kernels.recurrent, short), BOUND
        if not kernels.matrix_state:
            case["packed"] = False
        yield f"{name}, chunk: {settings}", _error(kernels, kernels.chunk, case), kernels.chunk_bound


def _error(kernels: Kernels, theirs: Callable[..., Any], case: Case) -> float:
    draw = Draw(case)
    leaves = kernels.leaves(draw)
    fixed = {option: case[option] for option in kernels.own if option not in ("groups", "length")}
    if "allow_neg_eigval" in fixed:  # fla's kernels refuse it where the rates come as they are
        fixed["allow_neg_eigval"] &= case["use_beta_sigmoid_in_kernel"]
    fixed["output_final_state"] = case["output_final_state"]
    if case["packed"]:
        total = draw.shape[1]
        fixed["cu_seqlens"] = torch.tensor([0, total // 5, total])
    if case["initial_state"]:
        leaves["initial_state"] = draw.state(kernels.matrix_state)
    if theirs is _half_chunk_delta_rule:
        leaves = {name: x.half().float() for name, x in leaves.items()}
    return largest_error(theirs, kernels.ours, leaves, **fixed)


def main(names: list[str]) -> dict[str, tuple[float, float]]:
    """Errors and bounds of the cases of the mixers named, and of "modules"."""
    results: dict[str, tuple[float, float]] = {}
    for name in names:
        if name == "modules":
            results |= {f"module: {module}": (error, BOUND) for module, error in module_cases()}
        else:
            results |= {case: (error, bound) for case, error, bound in kernel_cases(name)}
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    help_interpreter()
    print(json.dumps(main(sys.argv[1:])))
