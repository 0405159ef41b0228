"""The calls that autograd records as one node, and the node of a kernel that has derivatives.

A node is a function of tensors only, so `template_of` takes the operands apart into the tensors,
those in expressions too, and a skeleton of each with the numbers of its tensors::

    Operands(query=A, key=B, value=C, score_mod=alibi(D))
    template: {"query": (..., range(0, 1)), …, "score_mod": ((Alibi, ...), range(3, 4))}
    tensors:  [A, B, C, D]
"""

from __future__ import annotations

from typing import Any

import torch

from polyattn._core.call.options import GRADIENT_ARRAYS, GRADIENT_EXPRESSIONS
from polyattn.plugin import (
    Backend,
    Cotangents,
    Gradients,
    Indices,
    Kernel,
    Operands,
    Problem,
    Residuals,
    Score,
    Span,
    Tangents,
    joined,
    split,
    undeclared,
)
from polyattn.plugin.backend import unrounded
from polyattn_torch.autograd import (
    AutogradNode,
    GradientRequest,
    Optionals,
    Tensors,
    directional,
    in_transform,
    is_recorded,
    record,
)
from polyattn_torch.derived import derived

#: The skeleton of each operand that is not None, and the numbers of its tensors, by name.
Template = dict[str, tuple[Any, range]]


class KernelNode(AutogradNode):
    """A call of a kernel that has `backward`."""

    def __init__(
        self, kernel: Kernel, problem: Problem, backend: Backend, template: Template
    ) -> None:
        self._kernel, self._backend, self._template = kernel, backend, template
        # What is recorded is the node, so the kernel may write in place.
        self.problem = derived(_of_node, problem)
        #: The numbers of the tensors that are operands by themselves, by name.
        self._numbers = {
            name: template[name][1][0]
            for name in GRADIENT_ARRAYS
            if name in template and template[name][0] is ...
        }

    def results(self, tensors: Tensors, *, by_operations: bool = False) -> Tensors:
        """Return output and logsumexp; the output before it is rounded, if the kernel can."""
        problem = derived(unrounded, self._problem(by_operations), self._kernel)
        dtype, operands = getattr(torch, problem.dtype), self._operands(tensors)
        query, key, value = (x.to(dtype) for x in (operands.query, operands.key, operands.value))
        operands = operands._replace(query=query, key=key, value=value)
        if "poison_safe" in self._kernel.promises:
            results: Any = self._kernel(problem, operands, self._backend)
        else:
            results = Backend.run(self._backend, self._kernel, problem, operands)
        return results  # type: ignore[no-any-return]

    def gradients(self, request: GradientRequest) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the tensors that are wanted, in their dtypes."""
        tensors, results, cotangents, wanted, by_operations = request
        problem = self._problem(by_operations)
        problem = problem._replace(
            features=problem.features - {"logsumexp"} | {"backward"},
            constants=frozenset(name for name, n in self._numbers.items() if not wanted[n]),
        )
        gradients = self._by_number(
            self._kernel.backward(
                problem, self._operands(tensors), Residuals(*results),
                Cotangents(*cotangents), self._backend,
            )
        )  # fmt: skip
        return tuple([gradients[n].to(x.dtype) for n, x in enumerate(tensors) if wanted[n]])

    def tangents(self, tensors: Tensors, results: Tensors, tangents: Optionals) -> Tensors:
        """Return the tangents of output and logsumexp, in their dtypes."""
        by_name: dict[str, Any] = {name: tangents[n] for name, n in self._numbers.items()}
        of_expressions = sum(one is not None for one in tangents) > sum(
            one is not None for one in by_name.values()
        )
        kernel = self._kernel if "jvp" in self._kernel.differentiates else self._backend.tiled
        if of_expressions or undeclared(kernel, self.problem.features | {"jvp"}):
            return directional(
                lambda *x: tuple(self.results(x, by_operations=True)), tensors, tangents
            )
        of_results: Any = kernel.jvp(
            self._problem(by_operations=True), self._operands(tensors),
            Residuals(*results), Tangents(**by_name), self._backend,
        )  # fmt: skip
        return tuple([x.to(one.dtype) for x, one in zip(of_results, results, strict=True)])

    def _problem(self, by_operations: bool) -> Problem:
        if not by_operations and (torch.compiler.is_compiling() or not in_transform()):
            return self.problem
        return self.problem._replace(transforms=self.problem.transforms | {"grad", "jvp"})

    def _operands(self, tensors: Tensors) -> Operands:
        operands: dict[str, Any] = {
            name: joined(skeleton, tensors[numbers.start : numbers.stop])
            for name, (skeleton, numbers) in self._template.items()
        }
        return Operands(**operands)

    def _by_number(self, gradients: Gradients) -> dict[int, torch.Tensor]:
        by_number = {n: getattr(gradients, name) for name, n in self._numbers.items()}
        for name in GRADIENT_EXPRESSIONS:
            _, numbers = self._template.get(name, (None, ()))
            by_number.update(zip(numbers, getattr(gradients, name) or (), strict=True))
        return by_number


def _of_node(problem: Problem) -> Problem:
    return problem._replace(features=problem.features | {"logsumexp"}, requires_grad=False)


def node_of(
    kernel: Kernel, problem: Problem, x: Operands, backend: Backend
) -> tuple[KernelNode, list[torch.Tensor]] | None:
    """Return the node of a call and its tensors, or None."""
    # None for a call that autograd does not record, or records operation by operation.
    asked = {"backward"} | ({"jvp"} & problem.transforms)
    if not is_recorded(problem) or undeclared(kernel, problem.features | asked):
        return None
    if problem.normalizer is not None or _needs_operations(problem, x, backend):
        return None
    template, tensors = template_of(x)
    return KernelNode(kernel, problem, backend, template), tensors


def run_node(
    node: KernelNode, tensors: Tensors, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what the kernel of a node returns for a problem."""
    output, logsumexp = record(node, tensors)
    output = output.to(getattr(torch, problem.dtype))
    return output, logsumexp if "logsumexp" in problem.features else None


def template_of(x: Operands) -> tuple[Template, list[torch.Tensor]]:
    """Return the template of operands, and their tensors."""
    template: Template = {}
    tensors: list[torch.Tensor] = []
    for name, operand in zip(x._fields, x, strict=True):
        if operand is not None:
            skeleton, own = split(operand, _is_tensor)
            template[name] = skeleton, range(len(tensors), len(tensors) + len(own))
            tensors += own
    return template, tensors


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)


def _needs_operations(problem: Problem, x: Operands, backend: Backend) -> bool:
    """Return whether a function must be differentiated operation by operation."""
    if problem.features.isdisjoint(("mask_mod", "score_mod")):
        return False
    if problem.transforms or problem.traced or torch.compiler.is_compiling():
        return True  # what it closes over may be transformed too
    return "score_mod" in problem.features and _closes_over_a_graph(problem, x, backend)


def _closes_over_a_graph(problem: Problem, x: Operands, backend: Backend) -> bool:
    """Return whether a score function makes a score with a graph of one without."""
    rule = x.score_mod
    if isinstance(rule, Score):
        rule = rule.map(lambda _, x: x.detach() if isinstance(x, torch.Tensor) else x)
    x = x._replace(score_mod=rule)
    dtype = getattr(torch, problem.accumulator)
    score = x.query.new_zeros((*problem.batch, problem.heads, 1, 1), dtype=dtype)
    at = Indices(problem, backend.xp, x, Span(0, 1), Span(0, 1))
    return bool(at.modified(score).requires_grad)
