"""A plan: the complete decision about a call, and how it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from polyattn._base.arrays import Array, Recorder, facts_of, is_array, library_of, recorders
from polyattn._base.tracing import is_compiling
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import GRADIENT_ARRAYS
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression
from polyattn._dispatch.placement import Placement
from polyattn._dispatch.transfer import move_operands, move_results, mover_back
from polyattn.plugin import Kernel, undeclared


def reasons_against(kernel: Kernel, problem: Problem) -> list[str]:
    """Return the reasons why a kernel cannot compute a problem."""
    missing = undeclared(kernel, problem.features)
    if missing is not None:
        return [missing]
    reasons = _device_reasons(kernel, problem)
    if reasons:
        return reasons
    if problem.is_empty and not kernel.takes_empty:
        return ["it takes no empty arrays"]
    reasons = kernel.reasons_against(problem)
    if not isinstance(reasons, list):
        raise TypeError(
            f"reasons_against of the kernel {kernel.name} must return a list of strings; it"
            f" returned {reasons!r}"
        )
    return reasons


def _device_reasons(kernel: Kernel, problem: Problem) -> list[str]:
    """Return the reasons why a kernel does not support the problem's device, if it is known."""
    here = problem.device_kind
    kinds_of = {"": kernel.devices or None} | {
        f: kernel.only_on.get(f) for f in sorted(problem.features)
    }
    return [
        f"it {f'computes {feature}' if feature else 'runs'} on {', '.join(sorted(kinds))} only, and"
        f" this call is on {here}"
        for feature, kinds in kinds_of.items()
        if here and kinds is not None and here not in kinds
    ]


class Plan(NamedTuple):
    """The complete decision about a call: a kernel and its placement."""

    kernel: Kernel
    placement: Placement
    query_device: str
    #: The results whose arrays were checked, of the caller's own kernel: method and features.
    checked: set[tuple[str, frozenset[str]]]

    def with_feature(self, feature: str) -> Plan | None:
        """Return the plan with one feature more, by the first kernel that has it, or None."""
        problem = self.placement.problem
        problem = problem._replace(features=problem.features | {feature})
        placement = self.placement._replace(problem=problem)
        for kernel in (self.kernel, *placement.kernels):
            if not reasons_against(kernel, problem):
                return self._replace(kernel=kernel, placement=placement)
        return None

    def run(self, operands: Operands, *others: Any, method: str = "run") -> Any:
        """Run the kernel by a method of its backend, and return the result where the query is.

        The method is ``run``, ``run_backward``, ``run_jvp`` or ``run_weights``.
        """
        recorder = recorder_of(operands, others)
        if recorder is not None:
            return recorder.run(method, self, operands, *others)
        backend, _, problem, moved = self.placement
        if backend is None:
            raise RuntimeError("a plan made from shapes only cannot run")
        given = (operands, *others)
        if moved:
            x = move_operands(operands, moved, backend, problem, self.query_device)
            given = (x, *[move_results(one, moved, backend, problem) for one in others])
        found = getattr(backend, method)(self.kernel, problem, *given)
        # Only the first arrays: what a kernel returns depends on static facts.
        is_new = self._is_handed_in and (method, problem.features) not in self.checked
        if method == "run_backward":
            self._check_gradients(found, given[0], is_new)
        elif method != "run_weights":
            self._check_result(found, given[0], is_new)
        if is_new:
            self.checked.add((method, problem.features))
        if "query" not in moved:
            return found
        back = mover_back(operands.query, backend, problem, self.query_device)

        def moved_back(one: Any) -> Any:
            if isinstance(one, list):
                return [moved_back(array) for array in one]
            return None if one is None else back(one)

        results = map(moved_back, found)
        return Gradients(*results) if method == "run_backward" else tuple(results)

    def _check_result(self, result: Any, operands: Operands, is_new: bool) -> None:
        """Raise if the result of the kernel breaks the contract."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the kernel {self.kernel.name} must return (output, logsumexp); it returned"
                f" a {type(result).__name__}"
            )
        if result[1] is None and "logsumexp" in self.placement.problem.features:
            raise TypeError(f"the kernel {self.kernel.name} declares logsumexp and returned None")
        if is_new:
            problem = self.placement.problem
            rows, accumulator = problem.scores[:-1], problem.accumulator
            dtype = accumulator if "jvp" in problem.features else problem.dtype
            query = operands.query
            self._check_array("output", result[0], query, dtype, (*rows, problem.value_size))
            if result[1] is not None:
                self._check_array("logsumexp", result[1], query, accumulator, rows)

    @property
    def _is_handed_in(self) -> bool:
        """Whether the kernel is the caller's own, whose results nobody has tested."""
        return self.kernel not in self.placement.kernels and not is_compiling()

    def _check_gradients(self, found: Any, operands: Operands, is_new: bool) -> None:
        """Raise if the gradients of the kernel break the contract."""
        if not isinstance(found, Gradients):
            raise TypeError(
                f"backward of the kernel {self.kernel.name} must return Gradients; it returned a"
                f" {type(found).__name__}"
            )
        if not is_new:
            return
        problem, query = self.placement.problem, operands.query
        for name in GRADIENT_ARRAYS:
            argument, gradient = getattr(operands, name), getattr(found, name)
            if argument is not None and not (gradient is None and name in problem.constants):
                what, shape = f"gradient of {name}", facts_of(argument).shape
                self._check_array(what, gradient, query, problem.accumulator, shape)

    def _check_array(
        self, what: str, array: Any, query: Array, dtype: str, shape: tuple[int | None, ...]
    ) -> None:
        """Raise if a result of the kernel is not an array of the query's library, like this."""
        library = library_of(query).name
        got = "None" if array is None else f"a {type(array).__name__}"
        if is_array(array):
            facts = facts_of(array)
            fits = None in (*shape, *facts.shape) or facts.shape == shape
            if fits and (facts.library, facts.dtype) == (library, dtype):
                return
            got = f"an array of {facts.library}, {facts}"
        raise TypeError(
            f"the kernel {self.kernel.name} must return its {what} as an array of {library},"
            f" {shape} {dtype}; it returned {got}"
        )


def recorder_of(operands: Operands, others: Iterable[Any] = ()) -> Recorder | None:
    """Return the recorder of what a call is given, if an array has one."""
    if not recorders:
        return None
    things: list[Any] = list(operands)
    for value in operands:
        if isinstance(value, Expression):
            things += [thing for _, thing in value.carried()]
    for record in others:
        things += record if isinstance(record, tuple) else [record]
    return next((recorders[type(thing)] for thing in things if type(thing) in recorders), None)
