"""Run by test_interpreter.py under TRITON_INTERPRET=1: fla's Triton kernels against ours, at tiny shapes.

Prints one JSON object: case -> largest relative error over outputs and gradients. The interpreter of Triton 3.7 needs
help with three things that fla's kernels do; nothing here changes what a kernel computes.
"""

import ast
import builtins
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner


def kernel_range(*bounds: Any) -> Iterator[Any]:
    """`range` in a kernel as compiled code sees it: its variable is a tensor, on which fla calls `.to`."""
    whole = [
        int(np.asarray(x.handle.data).flat[0]) if isinstance(x, tl.tensor) else int(getattr(x, "value", x))
        for x in bounds
    ]
    for i in builtins.range(*whole):
        yield interpreter.interpreter_semantic.to_tensor(i, False)


class RangeRewriter(ast.NodeTransformer):
    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
            node.iter.func.id = "kernel_range"
        return node


def help_interpreter() -> None:
    prune, compile_tree = Autotuner.prune_configs, interpreter.FunctionRewriter._compile_and_exec

    def first_config(self: Any, *args: Any) -> list[Any]:
        return list(prune(self, *args))[:1]  # there is no device to time the others on

    def compile_with_range(self: Any, tree: ast.Module) -> Any:
        self.fn.__globals__["kernel_range"] = kernel_range
        return compile_tree(self, ast.fix_missing_locations(RangeRewriter().visit(tree)))

    def boolean_mask(method: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            mask = args[position]
            if mask is not None and mask.data.dtype != np.bool_:
                mask = interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)
            return method(self, *args[:position], mask, *args[position + 1 :])

        return call

    Autotuner.prune_configs = first_config
    Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]
    interpreter.FunctionRewriter._compile_and_exec = compile_with_range
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = boolean_mask(builder.create_masked_load, 1)
    builder.create_masked_store = boolean_mask(builder.create_masked_store, 2)


def largest_error(
    theirs: Callable[..., Any], ours: Callable[..., Any], leaves: dict[str, Tensor], **fixed: Any
) -> float:
    """Largest relative error over the outputs and, where theirs has a backward pass, the gradients."""
    results = []
    for function in (theirs, ours):
        inputs = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        outputs = function(**inputs, **fixed)
        outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
        torch.manual_seed(1)
        total = sum(((x * torch.randn(x.shape)).sum() for x in outputs[:1]), torch.zeros(()))
        try:
            gradients = list(torch.autograd.grad(total, list(inputs.values())))
        except NotImplementedError:
            gradients = []
        results.append([*(x.detach() for x in outputs), *gradients])
    pairs = zip(*results, strict=False)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in pairs)


def cases() -> Iterator[tuple[str, float]]:
    from fla.modules.activations.ops import swiglu, swiglu_linear, swish
    from fla.modules.causal_conv1d.ops import causal_conv1d, causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.layernorm import rms_norm, rms_norm_linear
    from fla.modules.rotary.ops import rotary_embedding
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
    from fla.ops.retention import chunk_retention

    from nas.models import cpu_delta, cpu_gla, cpu_hgrn, cpu_modules, cpu_retention

    torch.manual_seed(0)
    r, B, T, H, K, V = torch.randn, 1, 70, 2, 16, 16
    qkv = {"q": r(B, T, H, K), "k": r(B, T, H, K), "v": r(B, T, H, V)}
    state = r(B, H, K, V)
    gated = {**qkv, "v": r(B, T, 2 * H, V), "g": r(B, T, 2 * H), "beta": r(B, T, 2 * H)}
    gated |= {"initial_state": r(B, 2 * H, V, K)}
    in_kernel = dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel", "state_v_first"), True
    )
    decay = {"A_log": r(2 * H), "dt_bias": r(2 * H)}
    fixed = {"output_final_state": True}
    yield (
        "gated_delta_rule",
        largest_error(chunk_gated_delta_rule, cpu_delta.gated_delta_rule, {**gated, **decay}, **in_kernel, **fixed),
    )
    yield (
        "gated_delta_rule, recurrent",
        largest_error(
            fused_recurrent_gated_delta_rule, cpu_delta.gated_delta_rule, gated, **decay, **in_kernel, **fixed
        ),
    )
    short = {name: x[:, :20] for name, x in qkv.items()} | {"beta": torch.rand(B, 20, H), "initial_state": state}
    yield (
        "delta_rule",
        largest_error(fused_recurrent_delta_rule, cpu_delta.delta_rule, short, use_qk_l2norm_in_kernel=True, **fixed),
    )
    gla = {**qkv, "g": -torch.rand(B, T, H, K) * 3, "initial_state": r(B, H, V, K)}
    yield "gla", largest_error(chunk_gla, cpu_gla.gla, gla, state_v_first=True, **fixed)
    hgrn = {"x": r(B, T, K), "g": -torch.rand(B, T, K)}
    yield "hgrn", largest_error(chunk_hgrn, cpu_hgrn.hgrn, hgrn, **fixed)
    yield (
        "hgrn, recurrent",
        largest_error(fused_recurrent_hgrn, cpu_hgrn.hgrn, {**hgrn, "initial_state": r(B, K)}, **fixed),
    )
    yield "retention", largest_error(chunk_retention, cpu_retention.retention, {**qkv, "initial_state": state}, **fixed)

    x, w, b = r(2, 9, K), r(K), r(K)
    residual = {"x": x, "residual": r(2, 9, K), "weight": w}
    yield "rms_norm", largest_error(rms_norm, cpu_modules.rms_norm, residual, bias=None, prenorm=True, eps=1e-6)
    for activation in ("swish", "sigmoid"):
        yield f"rms_norm_gated, {activation}", largest_error(
            rms_norm_gated, cpu_modules.rms_norm_gated, {"x": x, "g": r(2, 9, K), "weight": w}, bias=None,
            activation=activation,
        )  # fmt: skip
    yield "rms_norm_linear", largest_error(
        rms_norm_linear, cpu_modules.rms_norm_linear, {"x": x, "norm_weight": w, "linear_weight": r(7, K)},
        norm_bias=None, linear_bias=None,
    )  # fmt: skip
    yield (
        "swiglu_linear",
        largest_error(
            swiglu_linear, cpu_modules.swiglu_linear, {"x": x, "y": r(2, 9, K), "weight": r(7, K)}, bias=None
        ),
    )
    by_position = {"x": x, "y": r(2, 9, K)}
    yield "swiglu", largest_error(lambda x, y: swiglu(x, y), cpu_modules.swiglu, by_position)  # noqa: PLW0108 (no keywords)
    yield "swish", largest_error(lambda x: swish(x), cpu_modules.swish, {"x": x})  # noqa: PLW0108
    conv = {"x": x, "weight": r(K, 4), "bias": b, "initial_state": r(2, K, 4)}
    yield (
        "causal_conv1d",
        largest_error(causal_conv1d, cpu_modules.causal_conv1d, conv, activation="silu", output_final_state=True),
    )
    packed = {**conv, "x": x.flatten(0, 1)[None]}
    yield (
        "causal_conv1d, packed",
        largest_error(
            causal_conv1d,
            cpu_modules.causal_conv1d,
            packed,
            cu_seqlens=torch.tensor([0, 5, 18]),
            output_final_state=True,
        ),
    )
    with torch.no_grad():
        for shape in ((3, 1, K), (1, 3, K)):
            token, caches = r(*shape), [r(3, K, 4)]
            caches.append(caches[0].clone())
            fixed_conv = {"weight": conv["weight"], "bias": b, "activation": "silu"}
            theirs = causal_conv1d_update(x=token, cache=caches[0], **fixed_conv)
            ours = cpu_modules.causal_conv1d_update(x=token, cache=caches[1], **fixed_conv)
            error = max(float((p - q).abs().max()) for p, q in zip(theirs, ours, strict=True))
            yield f"causal_conv1d_update {shape[0]}", max(error, float((caches[0] - caches[1]).abs().max()))
    angle = r(40, 4)
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    heads = {"x": r(2, 9, 3, 10)}
    offsets = torch.tensor([3, 17])
    bounds = torch.tensor([0, 5, 18])
    flat = {"x": heads["x"].flatten(0, 1)[None]}
    for name, leaves, extra in (
        ("offset", heads, {"seqlen_offsets": 2}),
        ("interleaved", heads, {"interleaved": True, "seqlen_offsets": offsets}),
        ("packed", flat, {"cu_seqlens": bounds, "seqlen_offsets": offsets}),
    ):
        yield (
            f"rotary, {name}",
            largest_error(rotary_embedding, cpu_modules.rotary_embedding, leaves, **tables, **extra),
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    help_interpreter()
    print(json.dumps(dict(cases())))
