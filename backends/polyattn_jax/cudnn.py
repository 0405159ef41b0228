"""Kernel that calls cuDNN through `jax.nn`, for calls that it computes as the semantics define.

Where `jax.nn` differs, the kernel corrects the result or refuses the call: its causal counts from
the first key, a row without keys gives an average, and its logsumexp is rounded to 16 bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from polyattn._core.tiles.visibility import band_from, finite_bias
from polyattn.plugin import (
    Array,
    Backend,
    Kernel,
    Operands,
    Problem,
    cleared,
    empty_rows,
    visible_keys,
)
from polyattn_jax.devices import default_kind

# The score of a masked key: far below all scores, and finite, since cuDNN subtracts it from itself.
MASKED = -(2.0**40)


class JaxCudnn(Kernel):
    """`jax.nn.dot_product_attention` with `implementation="cudnn"`."""

    name = "cudnn"
    features = frozenset({
        "batch_broadcast", "bias", "causal", "grouped_heads", "mask", "query_offset", "scale",
        "window",
    })  # fmt: skip
    promises = frozenset()
    takes_empty = False
    takes_band = True
    devices = frozenset({"cuda"})

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why cuDNN, or its wrapper in `jax.nn`, cannot compute the problem."""
        if problem.is_symbolic:
            return ["it is compiled for each length, and these are symbolic"]
        if not problem.device and default_kind() != "cuda":
            return [f"it runs on cuda only, and JAX would put this on {default_kind()}"]
        reasons = mismatches(problem)
        return reasons or trial(problem)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output."""
        query, key, value, mask, bias = operands[:5]
        return compiled(problem, Operands(query, key, value, mask=mask, bias=bias)), None


def mismatches(problem: Problem) -> list[str]:
    """Return the facts of the problem that `jax.nn` does not support or computes differently."""
    reasons = []
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append(f"it supports float16 and bfloat16 only, not {problem.dtype}")
    if problem.scale <= 0:  # NaN on an H200, of the output at 0 and of gradients below
        reasons.append(f"it needs a scale above 0; got {problem.scale}")
    counted = band_from(problem, 0)
    square = problem.query_length == problem.key_length
    if counted != (None, None) and (problem.query_offset != 0 or not square):
        reasons.append("with causal or a window it needs query_offset=0 and L = S")
    left, right = counted or problem.window
    if left is not None and right != 0:
        reasons.append("of windows it supports those to the left of a causal row")
    if right not in (None, 0):
        reasons.append("it supports causal or no band, not a window to the right")
    has_array = not problem.features.isdisjoint(("bias", "mask"))
    if has_array and problem.dtype == "float16":
        reasons.append("it needs bfloat16: a bias in float16 cannot surely hide a masked key")
    if problem.bias_dtype not in (None, problem.dtype):
        reasons.append(f"it cannot add a {problem.bias_dtype} bias to {problem.dtype} scores")
    if has_array and (problem.query_length % 2 or problem.key_length % 2):
        reasons.append("its gradient with a mask or bias needs even lengths")
    return reasons


@functools.lru_cache(maxsize=256)
def trial(problem: Problem) -> list[str]:
    """Return the error that `jax.nn` raises when the problem is traced, as a reason."""

    def array(*shape: int, dtype: str = problem.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

    keys = (*problem.batch, problem.key_heads, problem.key_length)
    x = Operands(
        array(*problem.scores[:-1], problem.head_size),
        array(*keys, problem.head_size),
        array(*keys, problem.value_size),
        mask=None if problem.mask is None else array(*problem.mask, dtype="bool"),
        bias=None if problem.bias is None else array(*problem.bias),
    )
    try:
        jax.eval_shape(functools.partial(attend, problem), x)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return [f"jax.nn says: {error}"]
    return []


@functools.partial(jax.jit, static_argnums=0)
def compiled(problem: Problem, x: Operands) -> Array:
    """Compute attention as one program, which moves no numbers to the device."""
    return attend(problem, x)


def attend(problem: Problem, x: Operands) -> Array:
    """Compute attention with `jax.nn`, and clear rows without keys."""
    visible, bias = visibility(problem, x)
    arrays = [length_first(problem, array) for array in x[:3]]
    output = _differentiable(problem, *arrays, *([] if bias is None else [bias]))
    output = output.swapaxes(1, 2).reshape(*problem.scores[:-1], problem.value_size)
    if visible is None:
        return output
    return cleared(output, None, empty_rows(visible, jnp), jnp)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(problem: Problem, *arrays: Array) -> Array:
    return _by_cudnn(problem, *_mapped_together(*arrays))


def _with_residuals(problem: Problem, *arrays: Array) -> tuple[Array, Any]:
    function = functools.partial(_of_even_lengths, problem)
    output, pullback = jax.vjp(function, *_mapped_together(*arrays))
    return output, (output, pullback)


def _pulled_back(problem: Problem, residuals: Any, gradient: Array) -> Any:
    output, pullback = residuals
    return pullback(_mapped_together(gradient, output)[0])


_differentiable.defvjp(_with_residuals, _pulled_back)


@jax.custom_batching.custom_vmap
def _mapped_together(*arrays: Array) -> tuple[Array, ...]:
    """Return the arrays so that vmap maps over all of them where it maps over one."""
    # jax.nn of JAX 0.10 fails on one that is not mapped.
    return arrays


@_mapped_together.def_vmap
def _mapped_together_under_vmap(
    size: int, batched: list[bool], *arrays: Array
) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    whole = [
        x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip(arrays, batched, strict=True)
    ]
    return _mapped_together(*whole), (True,) * len(whole)


def _of_even_lengths(
    problem: Problem, query: Array, key: Array, value: Array, *bias: Array
) -> Array:
    """Compute attention of padded arrays, since `jax.nn` differentiates only even lengths."""
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)
    )
    lengths: dict[str, Array] = {}
    # A row of a band does not see the key after it.
    if (band_from(problem, 0) or problem.window)[1] is None and problem.key_length % 2:
        ends = (jnp.full(len(query), n, "int32") for n in (query.shape[1], problem.key_length))
        _, rows, keys = _mapped_together(lax.stop_gradient(query), *ends)
        lengths = {"query_seq_lengths": rows, "key_value_seq_lengths": keys}
    output = _by_cudnn(problem, query, key, value, *bias, **lengths)
    return output[:, : problem.query_length]


def _by_cudnn(
    problem: Problem, query: Array, key: Array, value: Array, bias: Array | None = None,
    **lengths: Array,
) -> Array:  # fmt: skip
    left, right = band_from(problem, 0) or problem.window
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        scale=problem.scale,
        is_causal=right is not None,
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
        **lengths,
    )


def length_first(problem: Problem, array: Array) -> Array:
    """Turn (..., H, L, D) into (b, L, H, D)."""
    shape = array.shape[-3:]
    array = jnp.broadcast_to(array, (*problem.batch, *shape))
    return array.reshape(math.prod(problem.batch), *shape).swapaxes(1, 2)


def visibility(problem: Problem, x: Operands) -> tuple[Array | None, Array | None]:
    """Return which keys each row sees, and mask and bias as one bias; None without either."""
    if x.mask is None and x.bias is None:
        return None, None
    visible = visible_keys(problem, x, jnp)
    bias, visible = finite_bias(visible, x.bias, MASKED, x.query.dtype, jnp)
    batch = (math.prod(problem.batch), *problem.scores[-3:])
    whole = jnp.broadcast_to(bias, problem.scores).reshape(batch)
    return jnp.broadcast_to(visible, problem.scores), whole
