"""fla's Triton kernels by Triton's interpreter, next to ours: help for it, the comparison, the choice of cases.

The interpreter of Triton 3.7 needs help with three things that fla's kernels do; nothing here changes what a kernel
computes.
"""

import ast
import builtins
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
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
    theirs: Callable[..., Any], ours: Callable[..., Any], leaves: Mapping[str, Tensor], **fixed: Any
) -> float:
    """Largest relative error over the outputs and over the gradients that theirs gives.

    Both are called with the same keywords; `leaves` are those with gradients.
    """
    results = []
    for function in (theirs, ours):
        inputs = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        outputs = function(**inputs, **fixed)
        outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
        results.append([*outputs, *_gradients(outputs[0], list(inputs.values()))])
    pairs = [(a.detach(), b.detach()) for a, b in zip(*results, strict=True) if a is not None]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in pairs)


def _gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Gradients of a weighted sum, None where the kernel has no backward pass or gives no gradient."""
    if not output.requires_grad:
        return [None] * len(leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    try:
        return list(torch.autograd.grad((output.float() * weights).sum(), leaves, allow_unused=True))
    except NotImplementedError:
        return [None] * len(leaves)


def pairwise_cover(factors: Mapping[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Few cases in which every two factors, of two levels each, take all four combinations of levels.

    Kleitman and Spencer (1973): in n cases the first has all factors at their first level, and each factor has its
    second level in ceil(n / 2) of the others, no two factors in the same ones. At most 8 cases for 35 factors.
    """
    n = next(n for n in itertools.count(4) if math.comb(n - 1, (n + 1) // 2) >= len(factors))
    seconds = itertools.combinations(range(1, n), (n + 1) // 2)
    chosen = dict(zip(factors, seconds, strict=False))
    return [{name: levels[case in chosen[name]] for name, levels in factors.items()} for case in range(n)]
