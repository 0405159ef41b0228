"""Calls over the keys that items have, where lengths on the CPU can be read."""

from __future__ import annotations

from typing import Any

import torch

from polyattn.plugin import Backend, Kernel, Operands, Problem
from polyattn_torch.derived import derived

# The items of a ragged batch with more numbers have a call each: a copy with the padding zeroed,
# which an engine needs that is not safe from NaN, takes longer.
MANY_NUMBERS = 2**15
# What a call of one item is told of; the rest goes by the items of the whole.
_OF_AN_ITEM = frozenset({
    "causal", "grouped_heads", "logsumexp", "mask_expression", "query_offset",
    "query_offset_array", "scale", "softcap", "value_size", "window",
})  # fmt: skip


def calls_by_lengths(
    kernel: Kernel, problem: Problem, x: Operands, backend: Backend
) -> list[tuple[Problem, Operands]]:
    """Return the call over the keys that items have, or a call for each item."""
    numbers = _lengths(kernel, problem, x, backend)
    if numbers is None or max(numbers) == 0:
        return [(problem, x)]
    longest, offsets = max(numbers), [problem.query_offset]
    if problem.query_offset is None:
        offsets = x.query_offset.reshape(-1).tolist()  # type: ignore[union-attr]
    is_one = len({*numbers}) == len({*offsets}) == 1
    size = problem.key_heads * longest * (problem.head_size + problem.value_size)
    share = "poison_safe" in kernel.promises or size <= MANY_NUMBERS or min(numbers) == 0
    if not is_one and (share or len(problem.batch) != 1 or problem.features - _OF_AN_ITEM):
        return _declared(kernel, problem, x, [_cut(problem, x, longest)])
    if is_one:
        own = derived(_of_first, problem, problem.batch, longest, offsets[0])
        first = _first_keys(x._replace(mask=None, query_offset=None), longest)
        return _declared(kernel, problem, x, [(own, first)])
    calls = []
    for n, arrays in enumerate(zip(*[one.split(1) for one in x[:3]], strict=True)):
        length = numbers[n % len(numbers)]
        own = derived(_of_first, problem, (1,), length, offsets[n % len(offsets)])
        calls.append((own, _first_keys(Operands(*arrays), length)))
    return _declared(kernel, problem, x, calls)


def _declared(
    kernel: Kernel, problem: Problem, x: Operands, calls: list[tuple[Problem, Operands]]
) -> list[tuple[Problem, Operands]]:
    """Return the calls, or the whole one if a call needs what the kernel does not declare."""
    declares = all(own.features <= kernel.features for own, _ in calls)
    return calls if declares else [(problem, x)]


def _lengths(kernel: Kernel, problem: Problem, x: Operands, backend: Backend) -> list[int] | None:
    """Return the length of each item, or of all, if keys behind them can be left out."""
    mask: Any = x.mask
    lengths = getattr(mask, "first_keys", None)
    if lengths is None or x.bias is not None:
        return None
    goes_by_lengths = "batch_invariant" in kernel.promises or x.block_table is not None
    if goes_by_lengths or kernel.compiles or problem.transforms or 0 in problem.batch:
        return None
    arrays = [one for one in (lengths, x.query_offset) if isinstance(one, torch.Tensor)]
    if not (backend.is_eager(x.query) and backend.is_plain(*arrays)):
        return None
    numbers = [lengths] if isinstance(lengths, int) else lengths.reshape(-1).tolist()
    return [min(max(n, 0), problem.key_length) for n in numbers]


def _cut(problem: Problem, x: Operands, length: int) -> tuple[Problem, Operands]:
    """Return a call over its first keys, whose offset may be another than that of the newest."""
    return _over_first(problem, length), _first_keys(x, length)


def _first_keys(x: Operands, length: int) -> Operands:
    key, value = (one.narrow(-2, 0, length) for one in (x.key, x.value))
    return x._replace(key=key, value=value)


def _of_first(problem: Problem, batch: tuple[int, ...], length: int, offset: int | None) -> Problem:
    """Return the problem of some items of one length without a mask."""
    features = problem.features - {"mask_expression", "query_offset_array"}
    of_all = problem._replace(mask_spec=None, query_offset=offset, features=features)
    return _over_first(of_all._replace(batch=batch), length)


def _over_first(problem: Problem, length: int) -> Problem:
    features, newest = problem.features - {"query_offset"}, length - problem.query_length
    if problem.query_offset not in (None, newest):
        if features.isdisjoint(("causal", "window", "mask_expression", "score_expression")):
            problem = problem._replace(query_offset=newest)
        else:
            features |= {"query_offset"}
    return problem._replace(key_length=length, features=features)
