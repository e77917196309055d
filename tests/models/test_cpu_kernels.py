"""Each CPU kernel against fla's naive recurrence, forward and backward, and against finite differences."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from torch import Tensor

from tests.models.kernel_cases import KERNELS, Draw

Tensors = dict[str, Tensor]


def _draw(name: str, draw: Draw, state: bool) -> tuple[Tensors, Tensors, Tensor | None]:
    """The kernel's streams, its parameters and, if asked, an initial state."""
    case = KERNELS[name]
    start = torch.randn(draw.batch, *case.state, dtype=draw.dtype) if state else None
    return case.streams(draw), case.parameters(draw.dtype), start


def _relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm().clamp(min=0.1))  # rounding of terms near 1


def _in_batches(kernel: Callable[..., Any], sizes: tuple[int, ...]) -> Callable[..., list[Tensor]]:
    """The kernel run on that many sequences at a time; outputs and states joined again."""

    def run(streams: Tensors, parameters: Tensors, state: Tensor | None) -> list[Tensor]:
        results, first = [], 0
        for size in sizes:
            rows = slice(first, first + size)
            part = {name: x[rows] for name, x in streams.items()}
            start = None if state is None else state[rows]
            results.append(kernel(**part, **parameters, initial_state=start, output_final_state=True))
            first += size
        return [torch.cat(parts) for parts in zip(*results, strict=True)]

    return run


def _with_gradients(
    run: Callable[..., list[Tensor]], streams: Tensors, parameters: Tensors, state: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and final state, and the gradients of their weighted sum (the weights are drawn from seed 0)."""

    def leaf(x: Tensor) -> Tensor:
        return x.clone().requires_grad_()

    streams, parameters = ({name: leaf(x) for name, x in group.items()} for group in (streams, parameters))
    state = None if state is None else leaf(state)
    outputs = run(streams, parameters, state)
    source = torch.Generator().manual_seed(0)
    total = torch.stack([(x * torch.randn(x.shape, generator=source)).sum() for x in outputs]).sum()
    leaves = [*streams.values(), *parameters.values(), *([] if state is None else [state])]
    return [x.detach() for x in outputs], list(torch.autograd.grad(total, leaves))


DECAYS = {"weak": 0.1, "strong": 30.0}
WITH_DECAY = [(name, decay) for name, case in KERNELS.items() for decay in (DECAYS if case.decays else ["weak"])]


@pytest.mark.parametrize("state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(("name", "decay"), WITH_DECAY)
def test_equals_the_naive_recurrence(name: str, length: int, state: bool, decay: str) -> None:
    """In batches of one and of three sequences."""
    case = KERNELS[name]
    torch.manual_seed(length)
    inputs = _draw(name, Draw(4, length, DECAYS[decay]), state)
    outputs, gradients = _with_gradients(_in_batches(case.kernel, (1, 3)), *inputs)
    expected, expected_gradients = _with_gradients(_in_batches(case.reference, (4,)), *inputs)
    for got, want in zip(outputs, expected, strict=True):
        assert got.dtype == want.dtype == torch.float32
        assert _relative(got, want) < 1e-5
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert torch.isfinite(got).all()
        assert _relative(got, want) < 1e-4


@pytest.mark.parametrize("length", [3, 70])
@pytest.mark.parametrize("name", KERNELS)
def test_float64_stays_float64(name: str, length: int) -> None:
    torch.manual_seed(1)
    kernel = KERNELS[name].kernel
    streams, parameters, state = _draw(name, Draw(2, length, 1.0, torch.float64), True)
    whole, final = kernel(**streams, **parameters, initial_state=state, output_final_state=True)
    assert whole.dtype == final.dtype == torch.float64
    # one token at a time is the same sum in another order: only float64 agrees this far
    pieces = []
    for t in range(length):
        token = {name: x[:, t : t + 1] for name, x in streams.items()}
        o, state = kernel(**token, **parameters, initial_state=state, output_final_state=True)
        pieces.append(o)
    assert state is not None
    assert _relative(torch.cat(pieces, 1), whole) < 1e-12
    assert _relative(state, final) < 1e-12


@pytest.mark.parametrize("name", KERNELS)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    torch.manual_seed(4)
    kernel = KERNELS[name].kernel
    streams, parameters, _ = _draw(name, Draw(2, 40, 1.0, torch.bfloat16), False)
    wide = {name: x.float() for name, x in (streams | parameters).items()}
    expected, _ = kernel(**wide, output_final_state=True)
    o, _ = kernel(**streams, **parameters, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, expected.bfloat16())


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", [name for name, case in KERNELS.items() if case.handwritten])
def test_handwritten_gradients(name: str, decay: str) -> None:
    """The kernels with a backward pass of their own, by finite differences."""
    torch.manual_seed(2)
    streams, parameters, state = _draw(name, Draw(1, 7, DECAYS[decay], torch.float64), True)
    assert state is not None
    names = [*streams, *parameters, "initial_state"]

    def kernel(*values: Tensor) -> Any:
        return KERNELS[name].kernel(**dict(zip(names, values, strict=True)), output_final_state=True)

    leaves = [x.requires_grad_() for x in (*streams.values(), *parameters.values(), state)]
    assert torch.autograd.gradcheck(kernel, leaves, fast_mode=True)


@pytest.mark.parametrize("name", KERNELS)
def test_packed_sequences_are_separate(name: str) -> None:
    torch.manual_seed(3)
    kernel = KERNELS[name].kernel
    streams, parameters, state = _draw(name, Draw(2, 9, 0.5), True)
    assert state is not None
    packed = {name: x.flatten(0, 1)[None] for name, x in streams.items()}
    for lengths in ([9, 9], [4, 14], [18, 0]):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        o, final = kernel(**packed, **parameters, initial_state=state, output_final_state=True, cu_seqlens=bounds)
        for i, (a, b) in enumerate(pairwise(bounds.tolist())):
            part = {name: x[:, a:b] for name, x in packed.items()}
            alone = kernel(**part, **parameters, initial_state=state[i : i + 1], output_final_state=True)
            torch.testing.assert_close(o[:, a:b], alone[0])
            torch.testing.assert_close(final[i : i + 1], alone[1])


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["free", "bounded"])
@pytest.mark.parametrize("name", ["kda", "gated_deltanet2"])
def test_gates_and_norms_inside_the_kernel(name: str, lower_bound: float | None) -> None:
    """Decays, the two norms, the sigmoid and the state's layout are what fla's layers leave to the kernel."""
    torch.manual_seed(5)
    case = KERNELS[name]
    streams, _, state = _draw(name, Draw(4, 40, 1.0), True)
    streams |= {"g": torch.randn_like(streams["g"]), "k": torch.randn_like(streams["k"])}
    heads, size = streams["g"].shape[2:]
    parameters = {"A_log": torch.randn(heads), "dt_bias": torch.randn(heads * size)}
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": lower_bound}
    if name == "kda":
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}

    def ours(initial_state: Tensor, **inputs: Any) -> Any:
        o, final = case.kernel(**inputs, **options, initial_state=initial_state.mT, state_v_first=True)
        return o, final.mT

    def reference(q: Tensor, k: Tensor, g: Tensor, A_log: Tensor, dt_bias: Tensor, **inputs: Any) -> Any:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        if lower_bound is None:
            g = naive_kda_gate(g, A_log, dt_bias)
        else:
            g = naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
        if name == "kda":
            inputs["beta"] = 2 * inputs["beta"].sigmoid()
        return case.reference(q=q, k=k, g=g, **inputs)

    outputs, gradients = _with_gradients(_in_batches(ours, (4,)), streams, parameters, state)
    expected, expected_gradients = _with_gradients(_in_batches(reference, (4,)), streams, parameters, state)
    for got, want in zip(outputs, expected, strict=True):
        assert _relative(got, want) < 1e-5
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert _relative(got, want) < 1e-4
