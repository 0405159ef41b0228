"""cuDNN's attention by way of `jax.nn`, for what that computes by the semantics exactly.

What `jax.nn` means otherwise is mended here or refused: its causal counts from the first key, rows
that see no key come out as an average, and its logsumexp is rounded to 16 bits.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from polyattn.plugin import Array, Backend, Indices, Kernel, Operands, Problem, Span, band
from polyattn_jax.devices import default_kind

__all__ = ["Cudnn"]

# Absent, where −inf would make cuDNN subtract infinities: far below all scores, and no infinity.
ABSENT = -(2.0**40)


class Cudnn(Kernel):
    """`jax.nn.dot_product_attention` with `implementation="cudnn"`."""

    name = "cudnn"
    features = frozenset(
        {
            "batch_broadcast",
            "bias",
            "causal",
            "grouped_heads",
            "mask",
            "query_offset",
            "scale",
            "window",
        }
    )
    poison_safe = False
    devices = frozenset({"cuda"})

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why cuDNN, or what `jax.nn` makes of it, cannot take the problem."""
        if not problem.device and default_kind() != "cuda":
            return [f"it runs on cuda alone, and JAX would put this on {default_kind()}"]
        reasons = mismatches(problem)
        return reasons or trial(problem)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output."""
        return attend(problem, operands), None


def mismatches(problem: Problem) -> list[str]:
    """Return what of the problem `jax.nn` would take to mean something else, or cannot."""
    reasons = []
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append(f"it computes 16-bit dtypes, and this is {problem.dtype}")
    if 0 in problem.scores or not problem.head_size:
        reasons.append("it takes no empty arrays")
    low, high = band(problem)
    square = problem.query_length == problem.key_length
    if (low, high) != (None, None) and (problem.query_offset != 0 or not square):
        reasons.append("its positions count from the first key, and these do not")
    if low is not None and high != 0:
        reasons.append("it has windows to the left of a causal row alone")
    if high not in (None, 0):
        reasons.append("it sees a row's own position and before, or all")
    has_array = not problem.features.isdisjoint(("bias", "mask"))
    if has_array and problem.dtype == "float16":
        reasons.append("float16 has no number so low that a masked key is surely absent")
    if problem.bias_dtype not in (None, problem.dtype):
        reasons.append(f"it cannot add a {problem.bias_dtype} bias to {problem.dtype} scores")
    if has_array and (problem.query_length % 2 or problem.key_length % 2):
        reasons.append("its gradient with a mask or bias needs even lengths")
    return reasons


@functools.lru_cache(maxsize=256)
def trial(problem: Problem) -> list[str]:
    """Return what `jax.nn` says against the problem when it is traced."""

    def array(*shape: int, dtype: str = problem.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

    keys = (*problem.batch, problem.key_heads, problem.key_length)
    x = Operands(
        array(*problem.scores[:-1], problem.head_size),
        array(*keys, problem.head_size),
        array(*keys, problem.value_size),
        None if problem.mask is None else array(*problem.mask, dtype="bool"),
        None if problem.bias is None else array(*problem.bias),
        None, None, None,
    )  # fmt: skip
    try:
        jax.eval_shape(functools.partial(attend, problem), x)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return [f"jax.nn says: {error}"]
    return []


def attend(problem: Problem, x: Operands) -> Array:
    """Return the output."""
    low, high = band(problem)
    visible, bias = absence(problem, x)
    output = jax.nn.dot_product_attention(
        length_first(problem, x.query),
        length_first(problem, x.key),
        length_first(problem, x.value),
        bias=bias,
        scale=problem.scale,
        is_causal=high is not None,
        local_window_size=None if low is None else (-low, 0),
        implementation="cudnn",
    )
    output = output.swapaxes(1, 2).reshape(*problem.scores[:-1], problem.value_size)
    if visible is None:
        return output
    return jnp.where(jnp.any(visible, axis=-1, keepdims=True), output, 0)


def length_first(problem: Problem, array: Array) -> Array:
    """Return an array (..., H, L, D) with the axes (b, L, H, D)."""
    shape = array.shape[-3:]
    array = jnp.broadcast_to(array, (*problem.batch, *shape))
    return array.reshape(math.prod(problem.batch), *shape).swapaxes(1, 2)


def absence(problem: Problem, x: Operands) -> tuple[Array | None, Array | None]:
    """Return which keys each row sees, and mask and bias as one bias, or None where all do."""
    if x.mask is None and x.bias is None:
        return None, None
    rows, columns = Span(0, problem.query_length), Span(0, problem.key_length)
    visible = jnp.asarray(True)
    bias = jnp.zeros((), x.query.dtype)
    if x.bias is not None:
        visible, bias = x.bias != -math.inf, x.bias
    for seen in Indices(problem, jnp, x, rows, columns).visible():
        visible = visible & seen
    bias = jnp.where(visible, bias, ABSENT)
    batch = (math.prod(problem.batch), *problem.scores[-3:])
    whole = jnp.broadcast_to(bias, problem.scores).reshape(batch)
    return jnp.broadcast_to(visible, problem.scores), whole
