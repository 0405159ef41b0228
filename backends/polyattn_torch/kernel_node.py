"""The calls that autograd records as one node, and the node of a kernel that has derivatives.

A node is a function of tensors only, so `template_of` lists the tensors of the operands, those in
expressions too, and leaves a numbered `Slot` in place of each::

    Operands(query=A, key=B, value=C, score_mod=alibi(D))
    template: Operands(query=Slot 0, key=Slot 1, value=Slot 2, score_mod=alibi(Slot 3))
    tensors:  [A, B, C, D]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from polyattn._core.call.options import GRADIENT_ARRAYS, GRADIENT_EXPRESSIONS
from polyattn.plugin import (
    Backend,
    Cotangents,
    Expression,
    Gradients,
    Indices,
    Kernel,
    Operands,
    Problem,
    Residuals,
    Score,
    Span,
    Tangents,
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


class Slot(NamedTuple):
    """The place of a tensor among those of a node; an array to `Expression.map`."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class KernelNode(AutogradNode):
    """A call of a kernel that has `backward`; the template has slots for tensors."""

    def __init__(
        self, kernel: Kernel, problem: Problem, backend: Backend, template: Operands
    ) -> None:
        self._kernel, self._backend, self._template = kernel, backend, template
        # What is recorded is the node, so the kernel may write in place.
        self.problem = derived(_of_node, problem)
        #: The numbers of the slots that are operands by themselves, by name.
        self._slots: dict[str, int] = {
            name: slot.number
            for name in GRADIENT_ARRAYS
            if isinstance(slot := getattr(template, name, None), Slot)
        }

    def results(self, tensors: Tensors, *, by_operations: bool = False) -> Tensors:
        """Return output and logsumexp; the output before it is rounded, if the kernel can."""
        problem = derived(_unrounded, self._problem(by_operations), self._kernel)
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
            constants=frozenset(name for name, n in self._slots.items() if not wanted[n]),
        )
        gradients = self._by_slot(
            self._kernel.backward(
                problem, self._operands(tensors), Residuals(*results),
                Cotangents(*cotangents), self._backend,
            )
        )  # fmt: skip
        return tuple([gradients[n].to(x.dtype) for n, x in enumerate(tensors) if wanted[n]])

    def tangents(self, tensors: Tensors, results: Tensors, tangents: Optionals) -> Tensors:
        """Return the tangents of output and logsumexp, in their dtypes."""
        by_name: dict[str, Any] = {name: tangents[n] for name, n in self._slots.items()}
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
        def filled(_: str, thing: Any) -> Any:
            return tensors[thing.number] if isinstance(thing, Slot) else thing

        return _changed(self._template, filled)

    def _by_slot(self, gradients: Gradients) -> dict[int, torch.Tensor]:
        by_slot = {n: getattr(gradients, name) for name, n in self._slots.items()}
        for name in GRADIENT_EXPRESSIONS:
            expression = getattr(self._template, name)
            if isinstance(expression, Expression):
                slots = [slot for _, slot in expression.carried() if isinstance(slot, Slot)]
                for slot, gradient in zip(slots, getattr(gradients, name), strict=True):
                    by_slot[slot.number] = gradient
        return by_slot


def _of_node(problem: Problem) -> Problem:
    return problem._replace(features=problem.features | {"logsumexp"}, requires_grad=False)


def _unrounded(problem: Problem, kernel: Kernel) -> Problem:
    return unrounded(kernel, problem)


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


def template_of(x: Operands) -> tuple[Operands, list[torch.Tensor]]:
    """Return operands with slots in place of tensors, and the tensors."""
    tensors: list[torch.Tensor] = []

    def slot(_: str, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return thing
        tensors.append(thing)
        return Slot(len(tensors) - 1, tuple(thing.shape), thing.dtype)

    return _changed(x, slot), tensors


def _changed(x: Operands, change: Any) -> Operands:
    """Return operands with each tensor or slot replaced by `change(name, it)`."""
    fields: dict[str, Any] = {
        name: field.map(change) if isinstance(field, Expression) else change(name, field)
        for name, field in zip(x._fields, x, strict=True)
    }
    return Operands(**fields)


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
