"""Check cases of the conformance suite on ranks of any engine, by its oracle and its tolerances.

As a program it is one process of torch or MPI: ``on_ranks.py ENGINE CHECK…``. A check is
``value:CASE`` or ``gradients:CASE``, and runs on all strategies and layouts, or ``death``, which
ends the program.
"""

import os
import sys
from dataclasses import replace

import numpy as np

from polyattn import Gradients, parallel
from polyattn.conformance import CASES, Target
from polyattn.conformance.cases.case import with_arrays
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES
from polyattn.conformance.checks.gradients import compare, compare_slopes, leaves
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks, has_formula
from polyattn.conformance.reference.tolerance import deviation, output_yardstick
from polyattn.parallel.over import communicator_of

WHOLE = ("query", "key", "value")
STRATEGIES = ("ring", "gather", "heads", "decode")
BOTH = [(strategy, layout) for strategy in STRATEGIES for layout in ("contiguous", "zigzag")]


def resized(case, size):
    """Return a case whose tokens and heads the ranks can share, with two chunks each."""
    times = size if case.H % size and not case.one_head else 1
    tokens = {x: -(-getattr(case, x) // (2 * size)) * 2 * size for x in ("L", "S")}
    grouped = None if case.G is None else case.G * times
    name = f"{case}, over {size}"
    options = dict(case.options)
    if case.poison is not None and "query_offset" in options:
        # More rows at the end must not see the keys that the case hides from all rows.
        options["query_offset"] -= tokens["L"] - case.L
        case = replace(case, options=tuple(options.items()))
    return replace(case, name=name, **tokens, H=case.H * times, G=grouped, view=None)


def check_value(name, ranks, strategy, layout, kind=np.asarray):
    """Check the output of a case; return None, or why the strategy refuses it."""
    case = resized(CASES[name], ranks.size)
    arrays, options = arguments(case, kind)
    own = shares(arrays, ranks, strategy, layout)
    try:
        output = parallel.attention(*own, over=ranks, strategy=strategy, layout=layout, **options)
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
    # By differences of the output; other cases have some of the logsumexp too.
    if ranks.rank == 0 and case.dtype == "float64" and "normalizer" in case.features:
        compare_slopes(case, gradients)


def arguments(case, kind):
    """Return the arrays and options of a case in some library."""
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
    return in_numpy(
        parallel.unpermute(ranks.gather(part, axis), ranks.size, layout=layout, axis=axis)
    )


def in_numpy(array):
    if hasattr(array, "detach"):
        return Target("torch").back(array.detach())
    return np.asarray(array)


def by_pullback(own, along, how, options):
    _, pullback = parallel.attention_vjp(*own, **how, **options)
    return pullback(along)


def check_refusal(case, strategy, error):
    """Check that a refusal names what the strategy cannot do, and return the message."""
    refused = {"normalizer", "score_norm"} if strategy in ("ring", "decode") else set()
    refused |= {"score_mod"} if "differentiates no function" in str(error) else set()
    heads = strategy == "heads" and "ranks" in str(error)
    assert case.features & refused or heads, f"{case}: {strategy} refuses it: {error}"
    return str(error)


def by_autograd(own, along, how, options):
    """Return the gradients by torch's autograd, as `Gradients`."""
    import torch

    def leaf(x):
        return x.detach().clone().requires_grad_() if x.is_floating_point() else x

    own = [leaf(x) for x in own]
    options = {name: with_arrays(x, leaf) for name, x in options.items()}
    output = parallel.attention(*own, **how, **options)
    assert isinstance(output, torch.Tensor)
    output.backward(along)
    fields = ("bias", "sinks", "score_mod", "similarity")
    others = {
        name: with_arrays(options[name], lambda x: x.grad) for name in fields if name in options
    }
    return Gradients(*[x.grad for x in own], **others)


def check_death(name, ranks, strategy, layout, **how):
    """Check that ranks stop with an error, and do not wait, when one of them dies."""
    x = how["kind"](np.ones((2, 8, 4)))
    if ranks.rank == ranks.size - 1:
        os._exit(0)
    try:
        parallel.attention(x, x, x, over=ranks, strategy=strategy, layout=layout)
    except RuntimeError as error:
        print(f"stopped: {error}", flush=True)
        os._exit(0)


CHECKS = {
    "death": check_death,
    "value": check_value,
    "gradients": check_gradients,
}


def main(engine, *checks):
    how = {}
    if engine == "torch":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        over = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        how["kind"] = Target("torch").to
    else:
        from mpi4py import MPI

        over = MPI.COMM_WORLD
    ranks = communicator_of(over)
    for check in checks:
        what, _, case = check.partition(":")
        if engine == "torch" and what != "value":
            how["differentiate"] = by_autograd
        for strategy, layout in BOTH:  # death ends the program in the first
            CHECKS[what](case, ranks, strategy, layout, **how)
        how.pop("differentiate", None)
        print(f"rank {ranks.rank} of {ranks.size}: {check}", flush=True)
    if engine == "torch":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
