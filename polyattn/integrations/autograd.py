"""Let HIPS autograd differentiate attention of NumPy arrays.

autograd records operations on boxes around arrays. A call of attention is one operation to it: it
runs on the arrays, on the kernel that would run without autograd, and its derivatives are those of
`attention_backward` and `attention_jvp`. What no kernel differentiates is computed by the formula,
`dense`, on the boxes themselves: derivatives of derivatives, weights, and functions in
``score_mod`` that read boxes.

Importing this module is not needed: the first box that polyattn meets imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from autograd.builtins import tuple as recorded_tuple
from autograd.core import make_jvp, make_vjp
from autograd.extend import defjvp_argnums, defvjp_argnums, vspace
from autograd.tracer import getval, isbox

from polyattn import UnsupportedError
from polyattn._base.arrays import Array, Library, RecordedError, is_array, quiet
from polyattn._base.forks import forkable_lock
from polyattn._core.call.operands import mapped, named_arrays
from polyattn._core.call.options import GRADIENT_ARRAYS, GRADIENT_EXPRESSIONS
from polyattn._core.call.pages import in_one_piece
from polyattn._core.expressions.expression import Expression, has_function
from polyattn._core.expressions.scores import Chain, Function, Score, as_score
from polyattn._kernels.dense_kernel import Dense
from polyattn.integrations import autograd_functions
from polyattn.plugin import Backend, Cotangents, Operands, Residuals, Tangents
from polyattn.plugin.backend import unrounded


class Recorder:
    """The functions of polyattn that autograd's boxes need."""

    def value(self, box: Any) -> Array:
        """Return the array in a box."""
        return getval(box)

    def run(self, plan: Any, operands: Operands) -> Any:
        """Run a plan as one operation, or by the formula on the boxes."""
        if "block_table" in plan.placement.problem.features:
            plan, operands = _with_whole_keys(plan, operands)
        call = _Recorded(plan, operands)
        try:
            result = _attention(call, *call.arrays)
        except RecordedError:  # a function reads boxes that are no argument
            return _counted_on_boxes(plan, Dense(), "__call__", operands)
        return (result[0], result[1]) if call.is_pair else (result, None)

    def call(self, method: str, plan: Any, *given: Any) -> Any:
        """Compute weights or a derivative by the formula on the boxes."""
        kernel = plan.kernel if method == "weights" else Dense()
        return _counted_on_boxes(plan, kernel, method, *given)


def _with_whole_keys(plan: Any, operands: Operands) -> tuple[Any, Operands]:
    """Return a call without pages, to whose gradients autograd adds those of the copy."""
    problem = plan.placement.problem
    problem = problem._replace(features=problem.features - {"block_table"})
    plan = plan._replace(placement=plan.placement._replace(problem=problem))
    return plan, in_one_piece(operands)


# ---- functions in score_mod --------------------------------------------------------------------

# Kernels call functions from several threads, and autograd counts its traces without a lock.
_one_at_a_time = forkable_lock()


def _with_derivatives(plan: Any, operands: Operands) -> tuple[Any, Operands]:
    """Return a call whose functions in ``score_mod`` know their derivatives, by autograd."""
    given = operands.score_mod
    if given is None or not has_function(as_score(given).spec()):
        return plan, operands
    score_mod = _differentiable(as_score(given))
    placement = plan.placement
    problem = placement.problem._replace(
        features=placement.problem.features | {"score_expression"},
        score_spec=score_mod.spec(),
    )
    plan = plan._replace(placement=placement._replace(problem=problem))
    return plan, operands._replace(score_mod=score_mod)


def _differentiable(score_mod: Score) -> Score:
    if isinstance(score_mod, Chain):
        return Chain(tuple(map(_differentiable, score_mod.parts)))
    if isinstance(score_mod, Function) and score_mod.derivative is None:
        return Function(score_mod.rule, _derivative_of(score_mod.rule))
    return score_mod


def _derivative_of(rule: Any) -> Any:
    def derivative(scores: Array, *indices: Array) -> Array:
        with _one_at_a_time:
            # Each result is a function of one score; autograd warns where it is a constant.
            pullback, _ = make_vjp(lambda s: rule(s, *indices) + 0 * s, scores)
            return pullback(np.ones_like(scores))

    return derivative


# ---- operations on boxes -----------------------------------------------------------------------


class _OnBoxes(Backend):
    """Primitives on boxes, which record what is computed."""

    def is_plain(self, *arrays: Array) -> bool:
        """Return that autograd records what is computed."""
        return False


def _on_boxes(function: Any, problem: Any, *given: Any) -> Any:
    """Call a kernel of the array API on boxes, so that autograd records each of its operations."""
    problem = problem._replace(
        library="numpy", device="cpu", requires_grad=True, traced=True, converted=False
    )
    with quiet("numpy"):
        return function(problem, *given, _OnBoxes(autograd_functions))


def _counted_on_boxes(plan: Any, kernel: Kernel, method: str, *given: Any) -> Any:
    """Call a method of such a kernel in place of the kernel of a plan, and count the call."""
    plan = plan._replace(kind=plan.kind._replace(kernel=kernel.name))
    return _on_boxes(plan.counted(getattr(kernel, method)), plan.placement.problem, *given)


def _unboxed(mask: Any) -> Any:
    """Return a mask without boxes: it has no gradient."""
    if isinstance(mask, Expression):
        return mask.map(lambda _, x: getval(x))
    return getval(mask)


# ---- a call as one operation -------------------------------------------------------------------


class _Recorded:
    """A call: its plan, its operands, and the arrays among them that have gradients."""

    def __init__(self, plan: Any, operands: Operands) -> None:
        self.plan = plan
        self.is_pair = "logsumexp" in plan.placement.problem.features
        # Of the last run: the logsumexp, and the output before it is rounded.
        self.logsumexp: Array | None = None
        self.output: Array | None = None
        self._operands = operands._replace(
            mask=_unboxed(operands.mask),
            query_offset=getval(operands.query_offset),
            seed=getval(operands.seed),
        )
        self.names: list[str] = []
        self.arrays: list[Any] = []
        for name in (*GRADIENT_ARRAYS, *GRADIENT_EXPRESSIONS):
            operand = getattr(operands, name)
            carries = isinstance(operand, Expression)
            found = [x for _, x in operand.carried()] if carries else [operand]
            arrays = [x for x in found if is_array(x)]
            self.names += [name] * len(arrays)
            self.arrays += arrays

    def operands(self, arrays: Sequence[Array]) -> Operands:
        """Return the operands with these in place of the arrays that have gradients."""
        rest = iter(arrays)
        changed: dict[str, Any] = {}
        for name in dict.fromkeys(self.names):
            if name in GRADIENT_ARRAYS:
                changed[name] = next(rest)
            else:
                expression = getattr(self._operands, name)
                changed[name] = expression.map(lambda _, x: next(rest) if is_array(x) else x)
        return self._operands._replace(**changed)

    def by_formula(self, *arrays: Any) -> Any:
        """Return the result by the formula, in operations that autograd knows."""
        problem = self.plan.placement.problem
        output, logsumexp = _on_boxes(Dense(), problem, self.operands(arrays))
        return recorded_tuple((output, logsumexp)) if self.is_pair else output

    def forward(self, arrays: Sequence[Array]) -> Any:
        """Run the plan; keep the logsumexp if its kernel computes one."""
        operands, softmax = self.operands(arrays), self.plan.placement.problem.normalizer is None
        plan = _with_feature(self.plan, "logsumexp") if softmax else self.plan
        self.output, self.logsumexp = _unrounded(plan, operands) if softmax else plan.run(operands)
        same = plan.kernel is self.plan.kernel
        output = self.output if same else self.plan.run(operands)[0]
        output = np.asarray(output, operands.query.dtype)
        return (output, self.logsumexp) if self.is_pair else output

    def derivative(self, arrays: Sequence[Array], along: Cotangents | Tangents) -> Any:
        """Run the backward pass or a directional derivative, from the result of `forward`."""
        residuals = Residuals(output=self.output, logsumexp=self.logsumexp)
        plan, operands = _with_derivatives(self.plan, self.operands(arrays))
        moved = plan.placement.moved
        if "query" in moved:
            moved |= {name for name, _ in (*named_arrays(residuals), *named_arrays(along))}
        plan = plan._replace(placement=plan.placement._replace(moved=moved))
        if isinstance(along, Tangents):
            return _with_feature(plan, "jvp").jvp(operands, residuals, along)
        return _with_feature(plan, "backward").backward(operands, residuals, along)


def _with_feature(plan: Any, feature: str) -> Any:
    """Return a plan with one feature more, or raise if no kernel of its backend has it."""
    able = plan.with_feature(feature)
    if able is None:
        names = ", ".join(kernel.name for kernel in plan.placement.kernels)
        raise UnsupportedError(
            f"kernel={plan.kernel.name!r} does not compute {feature} for this call, nor does any"
            f" kernel of its backend, which has {names}: name a backend that computes gradients"
        )
    return able


def _unrounded(plan: Any, operands: Operands) -> Any:
    """Run a plan for the output before it is rounded, if its kernel can, and the logsumexp."""
    problem = unrounded(plan.kernel, plan.placement.problem)
    if problem is not plan.placement.problem:
        changed: dict[str, Any] = {
            name: np.asarray(getattr(operands, name), problem.dtype) for name in GRADIENT_ARRAYS[:3]
        }
        operands = operands._replace(**changed)
        plan = plan._replace(placement=plan.placement._replace(problem=problem))
    return plan.run(operands)


@autograd_functions.recorded
def _attention(call: _Recorded, *arrays: Array) -> Any:
    """Return the output, or output and logsumexp if the call asks for both."""
    return call.forward(arrays)


def _pullback(argnums: Sequence[int], output: Any, arguments: Any, _: Any) -> Any:
    call, *arrays = arguments

    def pullback(gradient: Any) -> list[Any]:
        given = tuple(gradient) if call.is_pair else (gradient, None)
        if any(map(isbox, (*given, *arrays))):
            # The gradients are differentiated: by the formula, which autograd differentiates again.
            with quiet("numpy"):
                found = make_vjp(lambda x: call.by_formula(*x), tuple(arrays))[0](gradient)
        else:
            found = _gradients(call, arrays, *given)
        return [found[n - 1] for n in argnums]

    return pullback


def _gradients(
    call: _Recorded,
    arrays: Sequence[Array],
    output_gradient: Array,
    logsumexp_gradient: Array | None,
) -> list[Array]:
    """Return the gradients of all arrays of a call, by a kernel."""
    dtype = call.plan.placement.problem.accumulator
    given = Cotangents(output=output_gradient, logsumexp=logsumexp_gradient)
    found = call.derivative(arrays, mapped(given, lambda _, array: np.asarray(array, dtype)))
    listed: list[Any] = []
    for name in dict.fromkeys(call.names):
        gradient = getattr(found, name)
        listed += gradient if name in GRADIENT_EXPRESSIONS else [gradient]
    return [np.asarray(g, x.dtype) for g, x in zip(listed, arrays, strict=True)]


def _pushforward(
    argnums: Sequence[int], given: Sequence[Any], output: Any, arguments: Any, _: Any
) -> Any:
    call, *arrays = arguments
    names = [call.names[n - 1] for n in argnums]
    if any(map(isbox, (*given, *arrays))) or not set(names) <= set(GRADIENT_ARRAYS):
        tangents = [vspace(x).zeros() for x in arrays]
        for n, tangent in zip(argnums, given, strict=True):
            tangents[n - 1] = tangent
        with quiet("numpy"):
            return make_jvp(lambda x: call.by_formula(*x), tuple(arrays))(tuple(tangents))[1]
    moved = {
        name: np.asarray(tangent, arrays[n - 1].dtype)
        for n, name, tangent in zip(argnums, names, given, strict=True)
    }
    tangent, of_logsumexp = call.derivative(arrays, Tangents(**moved))
    whole = output[0] if call.is_pair else output
    tangent = np.asarray(tangent, whole.dtype)
    return (tangent, of_logsumexp) if call.is_pair else tangent


defvjp_argnums(_attention, _pullback)
defjvp_argnums(_attention, _pushforward)

#: The library of autograd's boxes: NumPy, with functions that know their derivatives.
LIBRARY = Library("numpy", autograd_functions, recorder=Recorder())
