"""Base classes of kernels, which compute attention, and of backends, which have kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from polyattn._base import arrays
from polyattn._base.arrays import Array
from polyattn._core.call.features import DERIVATIVES, NOT_IN_DERIVATIVES
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Operands, Residuals, Tangents
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.visibility import without_padding
from polyattn.plugin.primitives import BackendPrimitives

#: What a kernel may promise of all its calls beside right results, each with its meaning.
PROMISES = {
    "poison_safe": "NaN or ±inf in a masked key or value leaves the row unchanged",
    "rounds_once": "gradients keep the digits of float32 where keys have much in common",
    "batch_invariant": "a batch item has the same bits with and without the others",
    "cut_invariant": "a row has the same bits, however its sequence is cut",
    "skips_documents": "a row of packed documents costs the keys of its document only",
    "reads_selections": "a row costs only the keys that masks.selected or masks.blocks names",
}


class Kernel:
    """A way to compute attention.

    A kernel gets only problems whose features it declares, and against which it gives no reason.
    Its methods take the facts of a call, its arrays (heads before length, query, key and value of
    rank 3 at least), and the backend that runs it, for its primitives.

    Attributes
    ----------
    name : str
        Its name in ``kernel=``.
    features : frozenset of str
        Those of `FEATURES` that it computes exactly as the semantics define.
    differentiates : mapping of str to frozenset of str
        The features of the calls whose derivatives it computes: under ``"backward"`` those whose
        gradients the method `backward` returns, under ``"jvp"`` those whose directional derivatives
        `jvp` returns. A derivative that is not a key is not computed at all.
    promises : frozenset of str
        Those of `PROMISES` that it keeps, by default ``"poison_safe"`` and ``"rounds_once"``.
        Without ``"poison_safe"``, `__call__` gets 0 beyond the lengths of a mask.
        ``"rounds_once"`` means that gradients are sums in float32, or float64 for float64 inputs,
        that are rounded once, with weights that have the bits of the forward pass.
        ``"cut_invariant"`` is for output and logsumexp of a row, and for the gradient of its query
        if the kernel has one, at least where ``Problem.same_bits`` asks for it. They are then a
        function of its query, of the keys and values that it sees, in their order, and of the
        options at their positions: the same in the whole call, row by row, in chunks, over pages,
        padded, packed and in a batch. A kernel with ``"reads_selections"`` comes before the others
        where the keys that a mask names are few.
    takes_empty : bool
        Whether it takes calls with a length or size of 0; the others go to the next kernel.
    compiles : bool
        Whether it compiles for each new shape and option, so that a first call takes seconds.
    devices : frozenset of str or None
        The kinds of device that it runs on, or None for all that its backend does. None of them, an
        empty set, where the installed library lacks what it calls: `reasons_against` says so.
    only_on : mapping of str to frozenset of str
        Features that it computes only on some kinds of device, with these kinds.
    counts_far : frozenset of str
        The features that count rows or keys, and that it computes beyond 2**30 of them too.
    takes_band : bool
        Whether a mask expression of numbers that is causal and a window over some of the keys comes
        to `__call__` as these, and only these keys.
    tile : int or None
        For a kernel that works in tiles, the largest number of scores in one. The kernel reads it
        in each call: `polyattn.conformance` sets it low on a copy, so that small arrays have many
        tiles.
    """

    name: ClassVar[str]
    features: ClassVar[frozenset[str]] = frozenset()
    differentiates: ClassVar[Mapping[str, frozenset[str]]] = {}
    promises: ClassVar[frozenset[str]] = frozenset({"poison_safe", "rounds_once"})
    takes_empty: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    devices: ClassVar[frozenset[str] | None] = None
    only_on: ClassVar[Mapping[str, frozenset[str]]] = {}
    counts_far: ClassVar[frozenset[str]] = frozenset()
    takes_band: ClassVar[bool] = False
    tile: int | None = None

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return the reasons why the kernel cannot compute a problem whose features it declares.

        Each is a clause about the kernel. That another is faster is for `only_on_request`.
        """
        return []

    def only_on_request(self, problem: Problem) -> str | None:
        """Return why another kernel is better, so that this one runs only if ``kernel=`` names it.

        None if it need not be named. `explain` asks it beside `reasons_against`.
        """
        return None

    def reads_quantized(self, problem: Problem) -> bool:
        """Return whether `__call__` takes keys and values of a problem as `Quantized` too.

        Otherwise a `polyattn.nn.QuantizedCache` gives the kernel floats, some at a time.
        """
        return False

    def remark(self, problem: Problem) -> str | None:
        """Return a note for `explain` on how a problem that it supports would run.

        A clause, such as the engine of the library; or None.
        """
        return None

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Compute attention.

        Returns
        -------
        output : Array
            The attention, shape (..., H, L, E), in the query's dtype.
        logsumexp : Array or None
            If the problem has the feature ``"logsumexp"``: shape (..., H, L), in float32, or
            float64 for float64 inputs.
        """
        raise NotImplementedError

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Compute the gradients of a call whose features ``differentiates`` declares.

        The logsumexp may be that of more keys than are given; the weights follow from it. The
        gradients have the accumulator's dtype and the shapes of the operands; `score_mod` and
        `similarity` are lists of those of the arrays of the expression, in order.
        """
        raise NotImplementedError

    def jvp(
        self, problem: Problem, operands: Operands, residuals: Residuals, tangents: Tangents,
        backend: Backend,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Compute the directional derivative of a call whose features ``differentiates`` declares.

        Returns
        -------
        output : Array
            The tangent of the output, shape (..., H, L, E), in the accumulator's dtype.
        logsumexp : Array or None
            That of the logsumexp, shape (..., H, L).
        """
        raise NotImplementedError

    def multiply(self, x: Array, weight: Array, bias: Array | None) -> Array | None:
        """Compute x · weight + bias, for the maps of `polyattn.nn` in `polyattn.same_bits`.

        A row of the result is a function of a row of `x`, of the weight and the bias: its bits do
        not depend on the number of rows, nor on that of columns.

        Parameters
        ----------
        x, weight, bias : Array, Array, Array or None
            Shapes (..., inputs), (inputs, outputs) and (outputs,).

        Returns
        -------
        Array or None
            Shape (..., outputs); None if the kernel has no such product of these arrays.
        """
        return None

    def weights(
        self, problem: Problem, operands: Operands, logsumexp: Array | None, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Compute weights; only the kernel of `polyattn.attention_weights` does.

        `operands.value` is None. A known logsumexp, (..., H, L), is the one to normalize by. Return
        the weights, or the part that is asked for, and the keys of the largest if these are.
        """
        raise NotImplementedError


def undeclared(kernel: Kernel, features: frozenset[str]) -> str | None:
    """Return what a kernel does not declare of the features that a call needs, or None."""
    # Without set operators: Dynamo of torch 2.11 has none between a set and the keys of a dict.
    needed = sorted(features)
    declared = kernel.differentiates
    lacking = [x for x in needed if x not in kernel.features and x not in declared]
    if lacking:
        return f"it does not compute {', '.join(lacking)}"
    for derivative in [x for x in needed if x in DERIVATIVES]:
        apart = *declared[derivative], *DERIVATIVES, *NOT_IN_DERIVATIVES
        lacking = [x for x in needed if x not in apart]
        if lacking:
            return (
                f"it computes {', '.join(lacking)}, and has no {DERIVATIVES[derivative]} of"
                f" calls with {'it' if len(lacking) == 1 else 'them'}"
            )
    return None


def unrounded(problem: Problem, kernel: Kernel) -> Problem:
    """Return the problem whose output a kernel gives to its own gradient.

    That is the problem in the dtype of sums, if the kernel rounds once and supports it.
    """
    if "rounds_once" not in kernel.promises or problem.dtype == problem.accumulator:
        return problem
    exact = problem._replace(dtype=problem.accumulator)
    return problem if kernel.reasons_against(exact) else exact


class Backend(BackendPrimitives):
    """A library on its hardware: devices, primitives and kernels.

    These methods work for any library that follows the standard. A plugin overrides those that it
    can improve, and `place`, `fetch` and `devices` if it accepts arrays from other libraries.

    Parameters
    ----------
    xp : module
        The standard's namespace of the library.

    Attributes
    ----------
    kernels : tuple of Kernel
        The backend's own kernels, best first. Those of other distributions join them when the
        plugin is loaded, and the array-API kernels follow.
    computes : bool
        Whether calls compute. False for a library whose arrays are nodes of a graph that another
        program runs; ``polyattn bench`` leaves such a backend out.
    tiled : Kernel
        The array-API kernel `tiled`, for derivatives that the backend's own kernels lack. It is set
        when the plugin is loaded.
    """

    kernels: tuple[Kernel, ...] = ()
    computes: ClassVar[bool] = True
    tiled: Kernel

    # ---- devices of arrays ----

    def devices(self) -> list[str]:
        """List the available devices by the names that arrays give them, the default first."""
        return []

    def lacks(self, dtype: str) -> str | None:
        """Return why the library cannot make arrays of one of the spec's dtypes at the moment.

        A clause about the backend that says how to correct it; or None.
        """
        return None

    def place(self, array: Array, device: str | None) -> Array:
        """Return an array of this library on a device, without a copy where possible.

        The array is one of this library, of NumPy, or one that exports DLPack. The device is one of
        `devices`, or None for the device that suits the array.
        """
        # NumPy does not exchange bfloat16, a dtype of another package, by DLPack.
        is_bfloat16 = getattr(array.dtype, "name", "") == "bfloat16"
        return self.xp.asarray(array) if is_bfloat16 else self.xp.from_dlpack(array)

    def fetch(self, array: Array) -> Array:
        """Bring an array of this library to the host, without a copy where possible.

        The result is an array of NumPy, or one that NumPy can import.
        """
        return array

    # ---- running a kernel ----

    def shield(self, problem: Problem, operands: Operands) -> AbstractContextManager[Any]:
        """Return the context that kernels run in, shielded from the global state of the library.

        By default it silences NumPy's floating-point warnings.
        """
        return arrays.quiet(problem.library)

    def run(
        self, kernel: Kernel, problem: Problem, operands: Operands
    ) -> tuple[Array, Array | None]:
        """Run a kernel in the context of `shield`; zero the padding if it is not poison-safe."""
        with self.shield(problem, operands):
            # A node of a graph reads the memory itself: to put 0 there would copy it at each run.
            if "poison_safe" not in kernel.promises and self.computes:
                operands = without_padding(problem, operands, self.xp, self.zeroed)
            return kernel(problem, operands, self)

    def run_backward(
        self, kernel: Kernel, problem: Problem, operands: Operands, residuals: Residuals,
        cotangents: Cotangents,
    ) -> Gradients:  # fmt: skip
        """Run the backward pass of a kernel, as `run` does."""
        with self.shield(problem, operands):
            return kernel.backward(problem, operands, residuals, cotangents, self)

    def run_jvp(
        self, kernel: Kernel, problem: Problem, operands: Operands, residuals: Residuals,
        tangents: Tangents,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Run the directional derivative of a kernel, as `run` does."""
        with self.shield(problem, operands):
            return kernel.jvp(problem, operands, residuals, tangents, self)

    def run_weights(
        self, kernel: Kernel, problem: Problem, operands: Operands, logsumexp: Array | None
    ) -> tuple[Array, Array | None]:
        """Run the kernel of `polyattn.attention_weights`, as `run` does."""
        with self.shield(problem, operands):
            return kernel.weights(problem, operands, logsumexp, self)

    # ---- for the listing, the benchmark and layers: no call of attention needs them ----

    def hardware(self, device: str) -> dict[str, str | int]:
        """Return known facts of a device: ``name``, ``memory`` in bytes, ``compute_capability``."""
        return {}

    def engines(self) -> dict[str, str]:
        """Return the versions of available engines that kernels call, such as cuDNN, by name."""
        return {}

    def faults(self) -> tuple[str, ...]:
        """Return the known faults of the installed library that kernels avoid, each a sentence."""
        return ()

    def synchronize(self, device: str | None = None) -> None:
        """Wait until all work on a device, by default the default one, is done."""

    def compile(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return a function in the form that users of the library would call: compiled, if usual.

        `polyattn bench` times the result.
        """
        return function

    def reshape_last(self, array: Array, number: int, lengths: tuple[int, ...]) -> Array:
        """Replace the last `number` axes of an array, whose others may be of unknown length."""
        raise NotImplementedError("this library does not support arrays of unknown length")

    def rows(self, table: Array, ids: Array) -> Array:
        """Return rows of a table (n, size), at ids whose shape may be unknown."""
        raise NotImplementedError("this library does not support arrays of unknown length")

    def with_rows(self, memory: Array, rows: Array, at: Array) -> Array | None:
        """Return the memory of a cache with rows in place of those from a number on.

        The memory is (..., capacity, size), the rows (..., n, size), and the number is an array
        without axes, known only where it is computed. None if the library has no operation for
        this.
        """
        return None

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call a function on every item, in any order, on as many threads as attention uses."""
        for item in items:
            work(item)
