"""Check cases of the conformance suite on ranks of any engine, by its oracle and its tolerances.

As a program it is one process of some: ``on_ranks.py ENGINE CHECK…``, where a check is
``strategy-layout:case`` and the engine is torch, mpi or jax.
"""

import os
import sys
from dataclasses import replace

import numpy as np

from polyattn import parallel
from polyattn.conformance import CASES
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES
from polyattn.conformance.checks.gradients import compare, compare_slopes, leaves
from polyattn.conformance.reference.differences import direction
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks, has_formula
from polyattn.conformance.reference.tolerance import deviation, output_yardstick

WHOLE = ("query", "key", "value")


def resized(case, size):
    """Return a case whose tokens and heads the ranks can share, with two chunks each."""
    times = size if case.H % size and not case.one_head else 1
    tokens = {x: -(-getattr(case, x) // (2 * size)) * 2 * size for x in ("L", "S")}
    grouped = None if case.G is None else case.G * times
    name = f"{case}, over {size}"
    return replace(case, name=name, **tokens, H=case.H * times, G=grouped, view=None)


def check_value(name, ranks, strategy, layout, kind=np.asarray):
    """Check the output of a case; return None, or why the strategy refuses it."""
    case = resized(CASES[name], ranks.size)
    arrays, options = arguments(case, kind)
    own = shares(arrays, ranks, strategy, layout)
    try:
        output = parallel.attention(
            *own, over=ranks, strategy=strategy, layout=layout, **options
        )
    except NotImplementedError as error:
        return check_refusal(case, strategy, error)
    found = joined(output, ranks, strategy, layout)
    if ranks.rank == 0:  # the oracle takes longer than the kernels
        off = deviation(found, output_yardstick(case), f"{case}: {strategy}, {layout}")
        assert off.fault is None, off.fault


def check_gradients(name, ranks, strategy, layout, kind=np.asarray, differentiate=None):
    """Check the gradients of a case; return None, or why the strategy refuses it."""
    case = resized(BACKWARD_CASES[name], ranks.size)
    arrays, options = arguments(case, kind)
    own = shares(arrays, ranks, strategy, layout)
    (along,) = shares([kind(cotangent(case))], ranks, strategy, layout)
    how = {"over": ranks, "strategy": strategy, "layout": layout}
    try:
        found = (differentiate or by_pullback)(own, along, how, options)
    except NotImplementedError as error:
        return check_refusal(case, strategy, error)
    gradients = {
        name: [joined(of, ranks, strategy if name == "query" else "", layout)]
        for name, of in zip(WHOLE, found, strict=False)
    }
    for name, of in found._asdict().items():
        if name not in WHOLE:
            parts = [joined(x[None, ...], ranks, strategy, "contiguous", 0) for x in leaves(of)]
            gradients[name] = [x[0] if strategy == "decode" else x.sum(axis=0) for x in parts]
    if ranks.rank == 0 and has_formula(case):
        compare(case, {name: gradients[name][0] for name in gradient_yardsticks(case)})
    if ranks.rank == 0 and case.dtype == "float64":
        compare_slopes_of_output(case, gradients)


def compare_slopes_of_output(case, gradients):
    """Compare with differences of the textbook, in cases without a gradient of the logsumexp."""
    missing = [name for name in direction(case) if not gradients[name]]
    assert not missing, f"{case}: no gradient of {missing}"
    if "normalizer" in case.features:  # others have differences of the logsumexp too
        compare_slopes(case, gradients)


def arguments(case, kind):
    """Return the arrays and options of a case in some library."""
    from polyattn.conformance.cases.case import with_arrays

    arrays, options = case.arguments()
    return [kind(x) for x in arrays], {n: with_arrays(x, kind) for n, x in options.items()}


def shares(arrays, ranks, strategy, layout):
    """Return this rank's tokens of arrays, of which the first has all with "decode"."""
    own = [parallel.shard(x, over=ranks, layout=layout) for x in arrays]
    return [arrays[0], *own[1:]] if strategy == "decode" else own


def joined(part, ranks, strategy, layout, axis=-2):
    """Return the whole from the parts of the ranks, in NumPy."""
    if strategy == "decode" and axis:
        return in_numpy(part)
    return in_numpy(parallel.unpermute(ranks.gather(part, axis), ranks.size, layout=layout, axis=axis))


def in_numpy(array):
    if hasattr(array, "detach"):
        array = array.detach()
        return array.float().numpy().astype("bfloat16") if "bfloat16" in str(array.dtype) else array.numpy()
    return np.asarray(array)


def by_pullback(own, along, how, options):
    _, pullback = parallel.attention_vjp(*own, **how, **options)
    return pullback(along)


def check_refusal(case, strategy, error):
    """Check that a refusal names what the strategy cannot do, and return the message."""
    refused = {"dropout"}
    refused |= {"normalizer", "score_norm"} if strategy in ("ring", "decode") else set()
    refused |= {"score_mod"} if "differentiates no function" in str(error) else set()
    heads = strategy == "heads" and "ranks" in str(error)
    assert case.features & refused or heads, f"{case}: {strategy} refuses it: {error}"
    return str(error)
