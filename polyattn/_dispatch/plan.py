"""A plan: the complete decision about a call, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn._base.arrays import Array, facts_of, is_array, library_of
from polyattn._base.tracing import is_compiling
from polyattn._core.call.features import COUNTING
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import GRADIENT_ARRAYS
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.indices import INDEX_LIMIT
from polyattn._dispatch.placement import Placement
from polyattn._dispatch.transfer import move_operands, move_results, mover_back
from polyattn.plugin import Backend, Kernel, undeclared


def reasons_against(kernel: Kernel, problem: Problem) -> list[str]:
    """Return the reasons why a kernel cannot compute a problem."""
    # Without scores, a row is 0 on every kernel.
    if problem.same_bits and "cut_invariant" not in kernel.promises and 0 not in problem.scores:
        return ["it does not promise the same bits for each cut of a sequence (cut_invariant)"]
    missing = undeclared(kernel, problem.features)
    if missing is not None:
        return [missing]
    reasons = _device_reasons(kernel, problem)
    if reasons:
        return reasons
    if not kernel.takes_empty and problem.is_empty:
        return ["it does not support empty arrays"]
    longest = max(problem.query_length or 0, problem.key_length or 0)
    if longest > INDEX_LIMIT and (counted := problem.features & COUNTING - kernel.counts_far):
        return [f"for {', '.join(sorted(counted))} it counts to 2**30, and S or L is {longest:,}"]
    reasons = kernel.reasons_against(problem)
    if not isinstance(reasons, list):
        raise TypeError(
            f"reasons_against of the kernel {kernel.name} must return a list of strings; it"
            f" returned {reasons!r}"
        )
    return reasons


def _device_reasons(kernel: Kernel, problem: Problem) -> list[str]:
    """Return the reasons why a kernel does not support the problem's device, if it is known."""
    if kernel.devices is None and not kernel.only_on:
        return []
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
        placement = self.placement._replace(problem=problem, band=None)
        for kernel in (self.kernel, *placement.kernels):
            if not reasons_against(kernel, problem):
                return self._replace(kernel=kernel, placement=placement)
        return None

    def run(self, operands: Operands) -> tuple[Array, Array | None]:
        """Run the kernel, and return output and logsumexp where the query is."""
        backend, given = self._moved(operands)
        problem = self.placement.problem
        if self.placement.band is not None:
            problem, keys = self.placement.band
            key, value = (x[..., slice(*keys), :] for x in given[0][1:3])
            given = (given[0]._replace(key=key, value=value, mask=None),)
        result = backend.run(self.kernel, problem, *given)
        self._check_result("run", result, given[0])
        return self._moved_back(result, operands.query)  # type: ignore[no-any-return]

    def backward(self, operands: Operands, residuals: Any, cotangents: Any) -> Gradients:
        """Run the backward pass of the kernel, and return the gradients where the query is."""
        backend, given = self._moved(operands, residuals, cotangents)
        gradients = backend.run_backward(self.kernel, self.placement.problem, *given)
        self._check_gradients(gradients, given[0])
        return self._moved_back(gradients, operands.query)  # type: ignore[no-any-return]

    def jvp(self, operands: Operands, residuals: Any, tangents: Any) -> tuple[Array, Array | None]:
        """Run the directional derivative of the kernel, and return it where the query is."""
        backend, given = self._moved(operands, residuals, tangents)
        result = backend.run_jvp(self.kernel, self.placement.problem, *given)
        self._check_result("jvp", result, given[0])
        return self._moved_back(result, operands.query)  # type: ignore[no-any-return]

    def weights(self, operands: Operands, logsumexp: Array | None) -> tuple[Array, Array | None]:
        """Run a kernel of weights, and return what it does where the query is."""
        backend, given = self._moved(operands, logsumexp)
        result = backend.run_weights(self.kernel, self.placement.problem, *given)
        return self._moved_back(result, operands.query)  # type: ignore[no-any-return]

    def _moved(self, operands: Operands, *others: Any) -> tuple[Backend, tuple[Any, ...]]:
        """Return the backend, and what the kernel is given, moved to where it runs."""
        backend, _, problem, moved, _ = self.placement
        if backend is None:
            raise RuntimeError("a plan made from shapes only cannot run")
        if not moved:
            return backend, (operands, *others)
        x = move_operands(operands, moved, backend, problem, self.query_device)
        return backend, (x, *[move_results(one, moved, backend, problem) for one in others])

    def _moved_back(self, result: Any, query: Array) -> Any:
        backend, _, problem, moved, _ = self.placement
        if "query" not in moved or backend is None:
            return result
        back = mover_back(query, backend, problem, self.query_device)
        if isinstance(result, Gradients):
            gradients = result._asdict().items()
            return Gradients(**{name: _mapped(back, gradient) for name, gradient in gradients})
        return tuple([_mapped(back, array) for array in result])

    def _is_new(self, method: str) -> bool:
        """Whether to check arrays: of the caller's own kernel, which nobody has tested, once."""
        # Only the first arrays, because what a kernel returns depends on static facts.
        if self.kernel in self.placement.kernels or is_compiling():
            return False
        return (method, self.placement.problem.features) not in self.checked

    def _check_result(self, method: str, result: Any, operands: Operands) -> None:
        """Raise if the result of the kernel breaks the contract."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the kernel {self.kernel.name} must return (output, logsumexp); it returned"
                f" a {type(result).__name__}"
            )
        if result[1] is None and "logsumexp" in self.placement.problem.features:
            raise TypeError(f"the kernel {self.kernel.name} declares logsumexp and returned None")
        if self._is_new(method):
            problem = self.placement.problem
            rows, accumulator = problem.scores[:-1], problem.accumulator
            dtype = accumulator if "jvp" in problem.features else problem.dtype
            query = operands.query
            self._check_array("output", result[0], query, dtype, (*rows, problem.value_size))
            if result[1] is not None:
                self._check_array("logsumexp", result[1], query, accumulator, rows)
            self.checked.add((method, problem.features))

    def _check_gradients(self, gradients: Any, operands: Operands) -> None:
        """Raise if the gradients of the kernel break the contract."""
        if not isinstance(gradients, Gradients):
            raise TypeError(
                f"backward of the kernel {self.kernel.name} must return Gradients; it returned a"
                f" {type(gradients).__name__}"
            )
        if not self._is_new("backward"):
            return
        problem, query = self.placement.problem, operands.query
        for name in GRADIENT_ARRAYS:
            argument, gradient = getattr(operands, name, None), getattr(gradients, name, None)
            if argument is not None and not (gradient is None and name in problem.constants):
                what, shape = f"gradient of {name}", facts_of(argument).shape
                self._check_array(what, gradient, query, problem.accumulator, shape)
        self.checked.add(("backward", problem.features))

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


def _mapped(change: Callable[[Array], Array], arrays: Any) -> Any:
    """Change an array, or each of a list; None stays."""
    if isinstance(arrays, list):
        return [_mapped(change, array) for array in arrays]
    return None if arrays is None else change(arrays)
