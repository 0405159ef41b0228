"""The compiled kernel of the NumPy backend."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Gradients,
    Kernel,
    Operands,
    Problem,
    Quantized,
    Residuals,
    sum_to,
    thread_count,
)
from polyattn_native.arrays import DATA, KNOWS_ADDRESSES, QUIETLY, is_readable, numbers, readable
from polyattn_native.call import PLAIN, NativeCall
from polyattn_native.distance_scores import is_supported
from polyattn_native.library import library
from polyattn_native.product import product
from polyattn_native.ready import Ready
from polyattn_native.selected import SelectedCall, remark, selects
from polyattn_native.selected import reasons_against as against_selected

# Those that it says all about if the expressions have no arrays.
EXPRESSIONS = {"mask_expression", "score_expression"}
# Calls that are kept ready to run again, at most.
MOST_READY = 256


class Native(Kernel):
    """Tiles of the scores in vectors, with the rows as lanes."""

    name = "native"
    features = frozenset({
        "batch_broadcast", "bias", "block_table", "causal", "dropout", "grouped_heads", "logsumexp",
        "mask", "mask_expression", "mask_mod", "query_offset", "query_offset_array", "scale",
        "score_expression", "sinks", "softcap", "value_size", "window",
    })  # fmt: skip
    differentiates: ClassVar = {"backward": frozenset({
        "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "mask", "mask_expression",
        "mask_mod", "query_offset", "query_offset_array", "scale", "score_expression", "sinks",
        "softcap", "value_size", "window",
    })}  # fmt: skip
    promises = Kernel.promises | {
        "batch_invariant", "cut_invariant", "reads_selections", "skips_documents",
    }  # fmt: skip
    takes_empty = False
    counts_far = frozenset({"causal", "window"})

    def __init__(self) -> None:
        # By problem and kind of arrays. The problem is kept too, so that its id stays its own.
        self._ready: dict[Any, Ready] = {}

    def threads(self) -> int:
        """Return how many threads a call may use."""
        return thread_count()

    def bytes_of(self, array: Array) -> bytes:
        """Return what an array holds."""
        held: bytes = array.tobytes()
        return held

    def in_numpy(self, operands: Operands) -> Operands:
        """Return operands with arrays of NumPy beside query, key and value."""
        return operands

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why an expression is left to tiles."""
        reasons = against_selected(problem)
        mask = problem.mask_spec
        if (
            not selects(problem)
            and "mask_mod" in problem.features
            and (mask is None or mask.has_rule)
        ):
            reasons.append(
                "it evaluates masks that are functions if masks.compile knows their tiles"
            )
        if not is_supported(problem):
            reasons.append("of score_mod it supports temperatures followed by relative biases")
        if "backward" in problem.features and problem.scale == 0:
            reasons.append("its gradients need a scale other than 0")
        return reasons

    def remark(self, problem: Problem) -> str | None:
        """Return which selected keys are read."""
        return remark(problem)

    def reads_quantized(self, problem: Problem) -> bool:
        """Return whether there are numbers, and nothing but these is asked for."""
        is_asked = problem.traced or problem.requires_grad or problem.transforms
        return not (is_asked or selects(problem))

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        query, key, value = operands[:3]
        kind = None
        if not isinstance(key, Quantized):
            kind = (id(problem), query.strides, key.strides, value.strides, query.dtype, key.dtype,
                    value.dtype)  # fmt: skip
        ready = self._ready.get(kind)
        output = np.empty((*problem.scores[:-1], problem.value_size), query.dtype)
        logsumexp = None
        if "logsumexp" in problem.features:
            logsumexp = np.empty(problem.scores[:-1], problem.accumulator)
        if ready is not None and ready.problem is problem:
            pointers = id(query) + DATA, id(key) + DATA, id(value) + DATA, id(output) + DATA
            of_logsumexp = None if logsumexp is None else id(logsumexp) + DATA
            if ready.run(self, *pointers, of_logsumexp, x=operands):
                return output, logsumexp
        if not query.dtype.isnative:
            native_order = query.astype(query.dtype.newbyteorder("="))
            output, logsumexp = self(problem, operands._replace(query=native_order), backend)
            return output.astype(query.dtype), logsumexp
        native = self._prepared(problem, operands, output, logsumexp)
        native.run(library().polyattn_attend)
        if kind and KNOWS_ADDRESSES and all(map(is_readable, (query, key, value))):
            self._keep(kind, native)
        return output, logsumexp

    def _keep(self, kind: Any, native: NativeCall, **more: Any) -> None:
        """Keep a call ready to run again, if it ran at once."""
        if not native.is_made:
            if len(self._ready) >= MOST_READY:
                self._ready.clear()
            is_plain = native.problem.features - EXPRESSIONS <= PLAIN
            self._ready[kind] = Ready(native, is_whole=native.forget() and is_plain, **more)

    def _call(self, problem: Problem, operands: Operands, products: int = 2) -> Any:
        made = SelectedCall if selects(problem) else NativeCall
        return made(problem, operands, self.threads(), products=products)

    def _prepared(
        self, problem: Problem, operands: Operands, output: Array, logsumexp: Array | None
    ) -> Any:
        native = self._call(problem, operands)
        native.array("output", output)
        if logsumexp is not None:
            native.rows_of("logsumexp", logsumexp)
        return native

    def multiply(self, x: Array, weight: Array, bias: Array | None) -> Array | None:
        """Return x · weight + bias, whose rows have the same bits in every product."""
        return product(x, weight, bias, self.threads())

    @QUIETLY
    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients."""
        native = self._call(problem, operands, products=5)
        dtype, rows = native.accumulator, problem.scores[:-1]
        native.array("output", readable(residuals.output, dtype))
        native.array("output_gradient", readable(cotangents.output, dtype))
        logsumexp = np.asarray(residuals.logsumexp, dtype)
        native.rows_of("logsumexp", logsumexp)
        if cotangents.logsumexp is not None:
            native.rows_of("logsumexp_gradient", np.asarray(cotangents.logsumexp, dtype))
        given = {name: getattr(operands, name) for name in ("query", "key", "value")}
        whole = {
            name: native.gradient_of(name, (*problem.batch, *x.shape[-3:]))
            for name, x in given.items()
        }
        delta = np.empty(rows, dtype)
        native.rows_of("delta", delta)
        softcap = None
        if problem.softcap is not None:
            softcap = np.empty(rows, dtype)
            native.rows_of("softcap_gradient", softcap)
        bias: Any = operands.bias
        of_bias = None
        if bias is not None and "bias" not in problem.constants:
            of_bias = native.bias_gradient()
        of_distance = native.distance_gradient() if _has_arrays(problem) else None
        native.run(library().polyattn_differentiate)
        scale = np.einsum("...d,...d->...", whole["query"], numbers(operands.query))
        scale = scale.sum(where=logsumexp != -np.inf) / problem.scale
        return Gradients(
            **{name: sum_to(np, array, given[name].shape) for name, array in whole.items()},
            bias=None if of_bias is None else sum_to(np, of_bias, bias.shape),
            sinks=None if operands.sinks is None else _of_sinks(operands.sinks, logsumexp, delta),
            score_mod=[] if of_distance is None else of_distance.pullback(),
            similarity=[],
            scale=np.asarray(scale, dtype),
            softcap=None if softcap is None else np.asarray(softcap.sum(), dtype),
        )


def _has_arrays(problem: Problem) -> bool:
    carried = [] if problem.score_spec is None else problem.score_spec.carried()
    return any(hasattr(thing, "dtype") for _, thing in carried)


def _of_sinks(sinks: Array, logsumexp: Array, delta: Array) -> Array:
    shift = np.where(logsumexp == -np.inf, 0, logsumexp)
    weights = np.exp(np.asarray(sinks, delta.dtype)[:, None] - shift) * delta
    return -weights.sum(axis=(*range(weights.ndim - 2), -1))
