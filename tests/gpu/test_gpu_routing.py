"""Cross-layer routing on the GPU: silent at initialisation, as on the CPU once open, and the same in decoding."""

from __future__ import annotations

import copy

import pytest
import torch

from nas.architecture import ROUTINGS, Architecture, Routing
from nas.models.modeling import HybridForCausalLM
from tests.gpu.conftest import ids
from tests.gpu.measured import Errors
from tests.models.fla_parity import autocast, build, logits_and_gradients, relative, stack

pytestmark = pytest.mark.gpu

LABELS = [label for label in ROUTINGS if label != "none"]


def _design(label: str) -> Architecture:
    """All four delta rules and a softmax layer between them."""
    kinds = ("gated_deltanet", "kda", "softmax", "gated_deltanet2", "deltanet")
    return stack(*kinds, routing=Routing.parse(label))


@pytest.mark.parametrize("label", LABELS)
def test_routing_is_silent_at_initialisation(label: str, device: str, errors: Errors) -> None:
    plain, routed = (build(_design(name), initial=True).to(device) for name in ("none", label))
    for training in (False, True):
        for narrow, length in ((False, 64), (True, 200)):
            rows = ids(device, length)
            with torch.set_grad_enabled(training), autocast(rows, narrow):
                one, two = (model.train(training)(rows, use_cache=False).logits for model in (plain, routed))
            name = f"{'training' if training else 'evaluation'}, {'bfloat16' if narrow else 'float32'}"
            # bit by bit; a product with more columns, zero ones, may be summed in another order on a GPU
            bound = 1e-12 if label != "wide_ffn" else 2e-2 if narrow else 1e-5
            errors.add(name, relative(two, one), bound)
    errors.check()


@torch.no_grad()
def _opened(model: HybridForCausalLM) -> float:
    """How much the logits move when the routing is silenced."""
    silent = copy.deepcopy(model)
    for name, parameter in silent.named_parameters():
        if name.endswith(("route.up.weight", "route.gamma", "widening.down_proj.weight")):
            parameter.zero_()
    rows = ids("cpu", 64)
    return relative(model(rows).logits, silent(rows).logits)


@pytest.mark.parametrize("label", LABELS)
def test_open_routing_is_the_same_on_cpu_and_gpu(label: str, device: str, errors: Errors) -> None:
    """P and Gamma drawn at random; in training, where the chunk kernels run."""
    cpu = build(_design(label)).train()
    gpu = copy.deepcopy(cpu).to(device)
    assert _opened(cpu) > 1e-2
    for narrow, length, logits, gradients in ((False, 64, 1e-4, 1e-4), (True, 200, 5e-2, None)):
        rows = ids("cpu", length)
        expected = logits_and_gradients(cpu, dict(cpu.named_parameters()), rows)
        found = logits_and_gradients(gpu, dict(gpu.named_parameters()), rows.to(device), narrow)
        kind = "bfloat16" if narrow else "float32"
        errors.add(f"{kind} logits", relative(found[0], expected[0]), logits)
        for name, gradient in expected[1].items():
            assert found[1][name].isfinite().all(), name
            if gradients is not None:
                errors.add(f"{kind} {name}", relative(found[1][name], gradient), gradients)
    errors.check()


@torch.no_grad()
@pytest.mark.parametrize("label", LABELS)
def test_open_routing_decodes(label: str, device: str, errors: Errors) -> None:
    model, rows = build(_design(label)).to(device), ids(device, 60)
    cache, pieces = None, []
    for part in rows.split([40, *[1] * 4, 16], 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    errors.add("logits", relative(torch.cat(pieces, 1), model(rows).logits), 1e-5)
    errors.check()
