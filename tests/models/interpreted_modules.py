"""Cases of test_interpreter.py: fla's small modules (norms, activations, convolution, positions) beside ours."""

from collections.abc import Iterator

import torch
from fla.modules.activations.ops import swiglu, swiglu_linear, swish
from fla.modules.causal_conv1d.ops import causal_conv1d, causal_conv1d_update
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.modules.norm.layernorm import group_norm, rms_norm, rms_norm_linear
from fla.modules.norm.layernorm_gated import rmsnorm_fn
from fla.modules.rotary.ops import rotary_embedding
from fla.modules.token_shift import token_shift

from nas.models import cpu_modules
from tests.models.interpreter import largest_error

r, K = torch.randn, 16
BOUNDS = torch.tensor([0, 5, 18])


def module_cases() -> Iterator[tuple[str, float]]:
    torch.manual_seed(0)
    yield from _norms()
    yield from _activations()
    yield from _convolutions()
    yield from _positions()


def _norms() -> Iterator[tuple[str, float]]:
    x, w, b = r(2, 9, K), r(K), r(K)
    residual = {"x": x, "residual": r(2, 9, K), "weight": w}
    yield "rms_norm", largest_error(rms_norm, cpu_modules.rms_norm, residual, bias=None, prenorm=True, eps=1e-6)
    for activation in ("swish", "sigmoid"):
        yield (
            f"rms_norm_gated, {activation}",
            largest_error(
                rms_norm_gated,
                cpu_modules.rms_norm_gated,
                {"x": x, "g": r(2, 9, K), "weight": w},
                bias=None,
                activation=activation,
            ),
        )
    linear = {"x": x, "norm_weight": w, "linear_weight": r(7, K)}
    yield (
        "rms_norm_linear",
        largest_error(rms_norm_linear, cpu_modules.rms_norm_linear, linear, norm_bias=None, linear_bias=None),
    )
    for before, group in ((False, 8), (True, None)):
        yield (
            f"rmsnorm_fn, gate {'after' if before else 'before'} it",
            largest_error(
                rmsnorm_fn,
                cpu_modules.rms_norm_after_gate,
                {"x": x, "z": r(2, 9, K), "weight": w, "bias": b},
                eps=1e-5,
                group_size=group,
                norm_before_gate=before,
            ),
        )
    for rms in (False, True):
        affine = {"x": x, "weight": w, "bias": b}
        yield (
            f"group_norm, {'rms' if rms else 'mean and variance'}",
            largest_error(group_norm, cpu_modules.group_norm, affine, num_groups=2, is_rms_norm=rms),
        )


def _activations() -> Iterator[tuple[str, float]]:
    x, y = r(2, 9, K), r(2, 9, K)
    weighted = {"x": x, "y": y, "weight": r(7, K)}
    yield "swiglu_linear", largest_error(swiglu_linear, cpu_modules.swiglu_linear, weighted, bias=None)
    # these two take no keywords
    yield "swiglu", largest_error(lambda x, y: swiglu(x, y), cpu_modules.swiglu, {"x": x, "y": y})  # noqa: PLW0108
    yield "swish", largest_error(lambda x: swish(x), cpu_modules.swish, {"x": x})  # noqa: PLW0108


def _convolutions() -> Iterator[tuple[str, float]]:
    fixed = {"activation": "silu", "output_final_state": True}
    for width in (4, 1):
        conv = {"x": r(2, 9, K), "weight": r(K, width), "bias": r(K), "initial_state": r(2, K, width)}
        yield f"causal_conv1d, width {width}", largest_error(causal_conv1d, cpu_modules.causal_conv1d, conv, **fixed)
        packed = {**conv, "x": r(1, 18, K)}
        yield (
            f"causal_conv1d, width {width}, packed",
            largest_error(causal_conv1d, cpu_modules.causal_conv1d, packed, cu_seqlens=BOUNDS, **fixed),
        )
        token = {**conv, "x": r(2, 1, K)}
        yield (
            f"causal_conv1d, width {width}, one token",
            largest_error(causal_conv1d, cpu_modules.causal_conv1d, token, **fixed),
        )
    weights = {"weight": r(K, 4), "bias": r(K), "activation": "silu"}
    with torch.no_grad():
        for shape in ((3, 1, K), (1, 3, K)):
            one, caches = r(*shape), [r(3, K, 4)]
            caches.append(caches[0].clone())
            theirs = causal_conv1d_update(x=one, cache=caches[0], **weights)
            ours = cpu_modules.causal_conv1d_update(x=one, cache=caches[1], **weights)
            error = max(float((p - q).abs().max()) for p, q in zip(theirs, ours, strict=True))
            yield f"causal_conv1d_update {shape[0]}", max(error, float((caches[0] - caches[1]).abs().max()))


def _positions() -> Iterator[tuple[str, float]]:
    angle, x = r(40, 4), r(2, 9, 3, 10)
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    offsets = torch.tensor([3, 17])
    flat = {"x": x.flatten(0, 1)[None]}
    for name, leaves, extra in (
        ("offset", {"x": x}, {"seqlen_offsets": 2}),
        ("interleaved", {"x": x}, {"interleaved": True, "seqlen_offsets": offsets}),
        ("packed", flat, {"cu_seqlens": BOUNDS, "seqlen_offsets": offsets}),
    ):
        yield (
            f"rotary, {name}",
            largest_error(rotary_embedding, cpu_modules.rotary_embedding, leaves, **tables, **extra),
        )
    shift = {"x": r(2, 9, K)}
    yield "token_shift", largest_error(token_shift, cpu_modules.token_shift, shift)
    packed = {"x": r(1, 18, K)}
    yield "token_shift, packed", largest_error(token_shift, cpu_modules.token_shift, packed, cu_seqlens=BOUNDS)
