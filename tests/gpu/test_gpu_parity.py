"""Ours against fla's own models and layers on the GPU: the same weights, the same Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.conftest import ids
from tests.gpu.measured import Errors
from tests.models.fla_parity import (
    LAYER_ONLY,
    MODELS,
    build,
    fla_layer,
    fla_model,
    logits_and_gradients,
    relative,
    sdpa_as_flash_attention,
    stack,
    through_bare_layer,
    to_fla,
)

pytestmark = pytest.mark.gpu

LOGITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GRADIENTS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
PRECISIONS = pytest.mark.parametrize("dtype", LOGITS, ids=["float32", "bfloat16"])
Found = tuple[Tensor, dict[str, Tensor]]


def _add(errors: Errors, dtype: torch.dtype, found: Found, expected: Found) -> None:
    """The errors of the logits, of each gradient and of all gradients as one vector."""
    errors.add("logits", relative(found[0], expected[0]), LOGITS[dtype])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        errors.add(name, relative(found[1][name], gradient), GRADIENTS[dtype])
    together = [torch.cat([x.flatten() for _, x in sorted(side[1].items())]) for side in (found, expected)]
    errors.add("all gradients", relative(*together), GRADIENTS[dtype])


@PRECISIONS
@pytest.mark.parametrize("form", ["pure", "hybrid"])
@pytest.mark.parametrize("mixer", MODELS)
def test_logits_and_gradients_equal_those_of_flas_model(
    mixer: str, form: str, dtype: torch.dtype, device: str, errors: Errors
) -> None:
    """As trained: float32 weights, bf16 by autocast; the hybrid has a layer of full and one of windowed attention."""
    narrow = dtype == torch.bfloat16
    # DeltaNet's chunk kernel, taken above 64 tokens, refuses float32
    rows = ids(device, 64 if mixer == "deltanet" and not narrow else 200)
    design = stack(mixer, mixer, *(("softmax", mixer, "window") if form == "hybrid" else ()))
    ours = build(design).to(device).train()
    with sdpa_as_flash_attention():
        theirs = fla_model(design, ours)
        expected = logits_and_gradients(theirs, dict(theirs.named_parameters()), rows, narrow)
    logits, gradients = logits_and_gradients(ours, dict(ours.named_parameters()), rows, narrow)
    found = logits, to_fla(design, gradients, absent=0)
    _add(errors, dtype, found, expected)
    errors.check()


@PRECISIONS
@pytest.mark.parametrize("mixer", LAYER_ONLY)
def test_logits_and_gradients_equal_those_of_flas_layer(
    mixer: str, dtype: torch.dtype, device: str, errors: Errors
) -> None:
    """One block with fla's bare layer, written out, for mixers without a comparable model in fla."""
    rows, design = ids(device, 200), stack(mixer)
    ours = build(design).to(device).train()
    layer = fla_layer(design, ours.model.layers[0].attn)
    names = dict(ours.named_parameters())
    theirs = names | {f"model.layers.0.attn.{name}": p for name, p in layer.named_parameters()}
    narrow = dtype == torch.bfloat16
    expected = logits_and_gradients(lambda x: through_bare_layer(ours, layer, x), theirs, rows, narrow)
    found = logits_and_gradients(ours, names, rows, narrow)
    _add(errors, dtype, found, expected)
    errors.check()
