"""fla's Triton kernels on the GPU against our CPU kernels in float64, on the same inputs, forward and backward."""

from __future__ import annotations

import pytest
import torch

from nas.models import cpu_kernels
from tests.gpu.kernels import KERNELS, B, Draw, run
from tests.gpu.measured import Errors
from tests.models.fla_parity import relative

pytestmark = pytest.mark.gpu

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
# length, initial state, decay: every length beside a chunk's end, both decays with and without a state
CASES = [(64, False, 0.1), (65, True, 4.0), (200, True, 0.1), (200, False, 4.0)]


def test_every_kernel_is_compared() -> None:
    """Each kernel that mixes over time and has a CPU counterpart stands in the table."""
    known = {(kernel.module, kernel.name) for kernel in KERNELS.values()}
    known |= {("fla.layers.hgrn2", name) for module, name in known if module == "fla.layers.gla"}
    wanted = {
        (path if path[0] != "." else f"nas.models{path}", name)
        for path, kernels in cpu_kernels._KERNELS.items()
        for name in kernels
        if name.startswith(("chunk_", "fused_recurrent_"))
    }
    assert known == wanted


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("mixer", "kind"), KERNELS)
def test_kernel_equals_ours_in_float64(mixer: str, kind: str, dtype: torch.dtype, device: str, errors: Errors) -> None:
    kernel = KERNELS[mixer, kind]
    if kernel.narrow_only and dtype == torch.float32:
        pytest.skip(f"{kernel.name} refuses float32")
    for length, continued, decay in CASES:
        torch.manual_seed(length)
        inputs = kernel.inputs(Draw(length, decay))
        if continued:
            inputs["initial_state"] = torch.randn(B, *kernel.state, dtype=torch.float64)
        inputs = {name: x.to(torch.float32 if name in kernel.wide else dtype) for name, x in inputs.items()}
        expected, weights = run(kernel, {name: x.double() for name, x in inputs.items()}, None, dtype)
        found, _ = run(kernel, {name: x.to(device) for name, x in inputs.items()}, weights, dtype)
        assert found["o"].device.type == device
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert x.norm() > 1e-3, name
            errors.add(f"{name} at {length}, decay {decay}", relative(found[name], x), BOUNDS[dtype])
    errors.check()
