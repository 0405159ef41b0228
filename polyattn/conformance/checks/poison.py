"""Check that what a hidden key or value holds changes no gradient that the library takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np

from polyattn import masks, scores
from polyattn.conformance.cases.case import Case, Generated, make_case
from polyattn.conformance.cases.expression_cases import STEPS as REPLACED
from polyattn.conformance.cases.expression_cases import VARIANTS
from polyattn.conformance.cases.generators import bias_with, hiding
from polyattn.conformance.cases.gradient_cases import BENT
from polyattn.conformance.cases.topics import PAIRED
from polyattn.conformance.checks.autodiff import by_library
from polyattn.conformance.checks.lazy import is_lazy
from polyattn.conformance.checks.target import KernelVariant, Target

#: The token that holds NaN or infinity, of so many.
BAD, L = 3, 7
_I, _J = np.arange(L)[:, None], np.arange(L)
_NAMED = np.where(_I + np.arange(3) > L, -1, _I + np.arange(3) - 1)


def is_far(i: Any, j: Any) -> Any:
    return (i - j) * (i - j) > 1


#: Ways to hide all keys of a row but its own and those beside it; with lengths, the last keys.
HIDING: dict[str, dict[str, Any]] = {
    "window": {"window": (1, 1)},
    "mask array": {"mask": Generated(lambda case, rng: ~is_far(_I, _J))},
    "mask value": {"mask": masks.window(1, 1)},
    "mask function": {"mask": lambda b, h, i, j: (i - j) * (i - j) < 2},
    "selected keys": {"mask": Generated(lambda case, rng: masks.selected(_NAMED[None]))},
    "key lengths": {"key_lengths": Generated(lambda case, rng: np.asarray([BAD]))},
    "bias": {"bias": bias_with(is_far)},
    "score_mod": {"score_mod": hiding(lambda b, h, i, j: is_far(i, j))},
}
STEPS: dict[str, dict[str, Any]] = {
    **{"plain": {}, "score value": {"score_mod": scores.softcap(1.5) >> BENT}},
    **{name: PAIRED[name] for name in ("softcap", "score_mod", "sinks")},
    **{name: REPLACED[name] for name in ("score norm", "dropout", "similarity")},
    **{name: VARIANTS[name] for name in ("distance", "sum of distances", "additive")},
}
#: The steps that softmax, the sigmoid and sparsemax are tried with.
NORMALIZED = {
    "softmax": ({}, STEPS),
    "sigmoid": (VARIANTS["sigmoid"], STEPS.keys() - {"sinks"}),
    "sparsemax": (REPLACED["normalizer"], ("plain", "softcap", "score norm")),
}
#: What is not finite, beside a NaN in a key, in turn.
OTHERS = ((math.nan, "value"), (math.nan, "query"), (math.inf, "key"))


def poisoned_cases() -> Iterator[tuple[Case, Any, Any]]:
    """Yield each step under some ways of hiding, with NaN in a key and with another of `OTHERS`.

    With the rows of the query and the keys that may have other gradients.
    """
    ways, others = cycle(HIDING), cycle(OTHERS)
    for normalizer, (fields, steps) in NORMALIZED.items():
        for step in sorted(steps):
            # A step that is a score function hides nothing; a norm counts what these hide.
            clashes = {"score_mod"} if "score_mod" in STEPS[step] else set()
            clashes |= {"score_mod", "bias"} if step == "score norm" else set()
            way = next(way for way in ways if way not in clashes)
            for poison, name in ((math.nan, "key"), next(others)):
                own = {"poison": poison, "poisoned": (BAD,), "poison_in": (name,)}
                own |= fields | STEPS[step] | HIDING[way]
                title = f"{poison} in a {name}, {normalizer}, {step}, {way}"
                case = make_case(title, **own, batch=(1,), L=L, S=L, D=4)
                seen = ~is_far(_I, _J) if way != "key lengths" else np.tile(_J < BAD, (L, 1))
                rows = np.arange(L) == BAD if name == "query" else seen[:, BAD]
                yield case, rows, np.any(seen[rows], axis=0)


def check_poison(target: Target, variant: KernelVariant) -> None:
    """Check that NaN in a token changes the gradients of those only that see it, to NaN."""
    step = 9 if is_lazy(target) else 1  # there each call takes a second
    for case, rows, keys in islice(poisoned_cases(), 0, None, step):
        kernel = variant.for_case(case)
        given, clean = target.arguments(case), target.placed(case.arguments(poisoned=False))
        computed, right = (by_library(target, case, kernel, x) for x in (given, clean))
        if computed is None or right is None:
            continue
        for name in ("query", "key", "value"):
            same = ~(rows if name == "query" else keys)
            one, other = (target.back(x[name])[..., same, :] for x in (computed, right))
            what = f"{case}: the gradient of {name} of a token that does not see it"
            assert np.allclose(one, other, rtol=1e-4, atol=1e-4), f"{what} changes"
        if case.poison != math.inf:
            lost = np.isnan(target.back(computed["query"])).any(axis=-1)
            assert np.all(lost == rows), f"{case}: the gradient of a row that sees it is no NaN"


def has_safe_gradients(target: Target, variant: KernelVariant) -> bool:
    """Return whether a kernel promises it, in a library whose differentiation keeps it."""
    if is_lazy(target) and variant.small_tiles:
        return False
    is_kept = target.library.partition(".")[0] in ("torch", "jax")
    return is_kept and "poison_safe" in variant.kernel.promises and "float32" in target.dtypes
