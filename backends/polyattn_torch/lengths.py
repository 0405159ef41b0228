"""Calls over the keys that items have, where lengths on the CPU can be read."""

from __future__ import annotations

from typing import Any

import torch

from polyattn._core.call.narrowed import SEPARABLE, narrowed
from polyattn.plugin import Backend, Kernel, Operands, Problem, Span
from polyattn_torch.derived import derived

# The items of a ragged batch with more numbers have a call each: a copy with the padding zeroed,
# which an engine needs that is not safe from NaN, takes longer.
MANY_NUMBERS = 2**15


def calls_by_lengths(
    kernel: Kernel, problem: Problem, x: Operands, backend: Backend
) -> list[tuple[Problem, Operands]]:
    """Return the call over the keys that items have, or a call for each item."""
    numbers = _lengths(kernel, problem, x, backend)
    if numbers is None or (longest := max(numbers)) == 0:
        return [(problem, x)]
    offsets: list[Any] = [problem.query_offset]
    if problem.query_offset is None:
        offsets = x.query_offset.reshape(-1).tolist()  # type: ignore[union-attr]
    is_one = len({*numbers}) == len({*offsets}) == 1
    if not is_one and _has_one_call(kernel, problem, numbers, longest):
        calls = [(derived(narrowed, problem, Span(0, longest)), x)]
    else:
        unmasked, batch = x._replace(mask=None, query_offset=None), problem.batch
        items = [unmasked]
        if not is_one:
            split = zip(*[array.split(1) for array in x[:3]], strict=True)
            items = [unmasked._replace(query=q, key=k, value=v) for q, k, v in split]
            batch = (1,)
        calls = []
        for n, item in enumerate(items):
            facts = numbers[n % len(numbers)], offsets[n % len(offsets)], batch
            calls.append((derived(_without_mask, problem, *facts), item))
    for own, _ in calls:
        if not own.features <= kernel.features:
            return [(problem, x)]
    return [(own, _first_keys(item, own.key_length)) for own, item in calls]


def _without_mask(problem: Problem, length: int, offset: int, batch: tuple[int, ...]) -> Problem:
    keys = Span(0, length)
    return narrowed(problem, keys, mask_spec=None, query_offset=offset, batch=batch)


def _first_keys(x: Operands, length: int) -> Operands:
    return x._replace(key=x.key.narrow(-2, 0, length), value=x.value.narrow(-2, 0, length))


def _has_one_call(kernel: Kernel, problem: Problem, numbers: list[int], longest: int) -> bool:
    """Return whether items of several lengths have one call."""
    size = problem.key_heads * longest * (problem.head_size + problem.value_size)
    if (
        "poison_safe" in kernel.promises
        or size <= MANY_NUMBERS
        or min(numbers) == 0
        or len(problem.batch) != 1
    ):
        return True
    return "batch_broadcast" in problem.features or not problem.features <= SEPARABLE


def _lengths(kernel: Kernel, problem: Problem, x: Operands, backend: Backend) -> list[int] | None:
    """Return the length of each item, or of all, if keys behind them can be left out."""
    mask: Any = x.mask
    lengths = getattr(mask, "first_keys", None)
    if lengths is None or x.bias is not None:
        return None
    goes_by_lengths = "batch_invariant" in kernel.promises or x.block_table is not None
    if goes_by_lengths or kernel.compiles or problem.transforms or 0 in problem.batch:
        return None
    arrays = [array for array in (lengths, x.query_offset) if isinstance(array, torch.Tensor)]
    if not (backend.is_eager(x.query) and backend.is_plain(*arrays)):
        return None
    numbers = [lengths] if isinstance(lengths, int) else lengths.reshape(-1).tolist()
    if min(numbers) >= 0 and max(numbers) <= problem.key_length:
        return numbers
    return [min(max(n, 0), problem.key_length) for n in numbers]
