"""Each CPU kernel against fla's naive recurrence, forward and backward, and against finite differences."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from torch import Tensor

from nas.models import cpu_delta, cpu_gla, cpu_hgrn, cpu_retention

B, H, K, V = 2, 3, 8, 5
Kernel = Callable[..., tuple[Tensor, Tensor]]


def _reference_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    o, state = delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)), initial_state)
    return o.transpose(1, 2), state


def _reference_retention(q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    g = torch.log(1 - 2.0 ** -(5.0 + torch.arange(H)))[:, None].expand_as(q)
    return naive_recurrent_gla(q, k, v, g, initial_state, True)


KERNELS: dict[str, tuple[Kernel, Kernel]] = {
    "gated_delta_rule": (
        lambda q, k, v, g, b, s: cpu_delta.gated_delta_rule(q, k, v, g, b, initial_state=s, output_final_state=True),
        lambda q, k, v, g, b, s: naive_recurrent_gated_delta_rule(q, k, v, b, g, None, s, True),
    ),
    "delta_rule": (
        lambda q, k, v, b, s: cpu_delta.delta_rule(q, k, v, b, initial_state=s, output_final_state=True),
        _reference_delta,
    ),
    "gla": (
        lambda q, k, v, g, s: cpu_gla.gla(q, k, v, g, initial_state=s, output_final_state=True),
        lambda q, k, v, g, s: naive_recurrent_gla(q, k, v, g, s, True),
    ),
    "hgrn": (
        lambda x, g, s: cpu_hgrn.hgrn(x, g, s, True),
        lambda x, g, s: naive_recurrent_hgrn(x, g, s, True),
    ),
    "retention": (
        lambda q, k, v, s: cpu_retention.retention(q, k, v, initial_state=s, output_final_state=True),
        _reference_retention,
    ),
}


def _inputs(
    name: str, length: int, decay: float, state: bool, dtype: torch.dtype = torch.float32
) -> list[Tensor | None]:
    """The kernel's arguments; log decays are about -decay, with every fifth one near 0."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    def log_decay(*shape: int) -> Tensor:
        g = -decay * torch.rand(*shape, dtype=dtype)
        g[:, ::5] *= 0.001
        return g

    if name == "hgrn":
        args = [draw(B, length, K), log_decay(B, length, K)]
        return [*args, draw(B, K) if state else None]
    q, k, v = draw(B, length, H, K), F.normalize(draw(B, length, H, K), dim=-1), draw(B, length, H, V)
    g = log_decay(B, length, H, K) if name == "gla" else log_decay(B, length, H)
    beta = torch.rand(B, length, H, dtype=dtype)
    extra = {"gated_delta_rule": [g, beta], "delta_rule": [beta], "gla": [g], "retention": []}[name]
    return [q, k, v, *extra, draw(B, H, K, V) if state else None]


def _relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm().clamp(min=0.1))  # rounding of terms near 1


def _gradients(kernel: Kernel, args: list[Tensor | None], weights: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() if x is not None else None for x in args]
    outputs = kernel(*leaves)
    total = sum(((o * w).sum() for o, w in zip(outputs, weights, strict=True)), torch.zeros(()))
    return list(torch.autograd.grad(total, [x for x in leaves if x is not None]))


@pytest.mark.parametrize("decay", [0.1, 30.0], ids=["weak", "strong"])
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_naive_recurrence(name: str, length: int, state: bool, decay: float) -> None:
    if decay > 1 and name in ("delta_rule", "retention"):
        pytest.skip("no decay to choose")
    torch.manual_seed(length)
    args = _inputs(name, length, decay, state)
    ours, reference = KERNELS[name]
    outputs, expected = ours(*args), reference(*args)
    for got, want in zip(outputs, expected, strict=True):
        assert _relative(got, want) < 1e-5
    weights = [torch.randn_like(x) for x in expected]
    for got, want in zip(_gradients(ours, args, weights), _gradients(reference, args, weights), strict=True):
        assert torch.isfinite(got).all()
        assert _relative(got, want) < 1e-4


@pytest.mark.parametrize("length", [3, 70])
@pytest.mark.parametrize("name", KERNELS)
def test_float64_stays_float64(name: str, length: int) -> None:
    torch.manual_seed(1)
    args = _inputs(name, length, 1.0, True, torch.float64)
    ours, _ = KERNELS[name]
    outputs = ours(*args)
    assert all(x.dtype == torch.float64 for x in outputs)
    # one token at a time is the same sum in another order: only float64 agrees this far
    *streams, state = args
    pieces = []
    for t in range(length):
        o, state = ours(*(x[:, t : t + 1] for x in streams if x is not None), state)
        pieces.append(o)
    assert state is not None
    assert _relative(torch.cat(pieces, 1), outputs[0]) < 1e-12
    assert _relative(state, outputs[1]) < 1e-12


@pytest.mark.parametrize("name", ["gla", "hgrn"])
def test_handwritten_gradients(name: str) -> None:
    """The two kernels with a backward pass of their own, by finite differences."""
    torch.manual_seed(2)
    args = _inputs(name, 7, 0.5, True, torch.float64)
    assert torch.autograd.gradcheck(
        KERNELS[name][0], tuple(x[:1].requires_grad_() for x in args if x is not None), fast_mode=True
    )


@pytest.mark.parametrize("name", KERNELS)
def test_packed_sequences_are_separate(name: str) -> None:
    torch.manual_seed(3)
    full = {
        "gated_delta_rule": cpu_delta.gated_delta_rule,
        "delta_rule": cpu_delta.delta_rule,
        "gla": cpu_gla.gla,
        "hgrn": cpu_hgrn.hgrn,
        "retention": cpu_retention.retention,
    }[name]
    *streams, state = (x for x in _inputs(name, 9, 0.5, True) if x is not None)
    for lengths in ([9, 9], [4, 14], [18, 0]):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        packed = [x.flatten(0, 1)[None] for x in streams]
        o, final = full(*packed, initial_state=state, output_final_state=True, cu_seqlens=bounds)
        for i, (a, b) in enumerate(pairwise(bounds.tolist())):
            alone = full(*(x[:, a:b] for x in packed), initial_state=state[i : i + 1], output_final_state=True)
            torch.testing.assert_close(o[:, a:b], alone[0])
            torch.testing.assert_close(final[i : i + 1], alone[1])
