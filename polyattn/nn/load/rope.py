"""Create rotary positions from a config, with the scalings to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from polyattn._base.arguments import check_int
from polyattn.nn.angles import frequencies_of, linear_scaling, ntk_scaling, yarn_scaling
from polyattn.nn.load.settings import Settings
from polyattn.nn.positions import Rotary

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


def rotary(
    settings: Settings,
    size: int,
    length: int | None,
    *,
    kind: str | None = None,
    theta: str = "rope_theta",
    whole: bool = True,
) -> Callable[[], Rotary]:
    """Return a function that creates the rotary positions for a head size.

    The settings are checked now. The function computes the size / 2 frequencies once the weights
    are known to have this size: a damaged config may ask for billions. Older configs have
    ``rope_theta`` and ``rope_scaling`` in place of ``rope_parameters``. If blocks differ in their
    positions, `kind` is the section of a block, and `theta` the older setting of its base. Unless
    `whole`, only a part of each head may rotate.
    """
    if size % 2:
        raise settings.refusal("head_dim", "even, for rotary positions", size)
    rope = settings.section("rope_parameters")
    if len(rope) and kind is not None:
        rope = rope.section(kind)
    elif theta == "rope_theta":
        rope = rope or settings.section("rope_scaling")
    size = _part(settings, rope, size, whole)
    kind = rope.choice("rope_type" if "rope_type" in rope else "type", KINDS, "default")
    base = rope.number("rope_theta", settings.number(theta, 10000.0))
    _check_length(length, kind)
    longest = settings.whole("max_position_embeddings", 2048)
    trained = rope.whole("original_max_position_embeddings", longest)
    trained = settings.whole("original_max_position_embeddings", trained)
    if kind == "default":
        return lambda: Rotary(size, base)
    null = kind == "yarn" and "factor" in rope.nulls
    factor = rope.number("factor", longest / trained if null else None)
    if kind == "yarn":
        return _yarn(rope, size, base, factor, trained)
    if kind == "llama3":
        scaled = _llama3(rope, size, base, factor, trained)
    elif kind == "linear":
        scaled = partial(linear_scaling, size, factor, base=base)
    elif length is None:
        return lambda: Rotary(size, base, dynamic=(factor, longest))
    else:
        beyond = max(length, longest) / longest - 1
        scaled = partial(ntk_scaling, size, 1 + factor * beyond, base=base)
    return lambda: Rotary(size, base, frequencies=scaled())


def _part(settings: Settings, rope: Settings, size: int, whole: bool) -> int:
    """Return how many components of a head rotate."""
    if whole:
        for section in (rope, settings):
            section.only("partial_rotary_factor", 1.0)
        return size
    section = rope if "partial_rotary_factor" in rope else settings
    share = section.number("partial_rotary_factor", 1.0)
    part = int(size * share) if share <= 1 else 0
    if part < 2 or part % 2:
        wanted = f"at most 1, and rotate an even number of the {size} components"
        raise section.refusal("partial_rotary_factor", wanted, share)
    return part


def _check_length(length: int | None, kind: str) -> None:
    if length is None:
        return
    if kind != "dynamic" or not 0 < check_int("length", length) < 2**63:
        raise ValueError(
            f"length needs dynamic scaling and must be positive; got {length!r}, with rope_type"
            f" {kind!r}"
        )


def _yarn(
    rope: Settings, size: int, base: float, factor: float, trained: int
) -> Callable[[], Rotary]:
    rope.only("truncate", True)
    if base <= 1:
        raise rope.refusal("rope_theta", "larger than 1, for yarn", base)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    for name in ("mscale", "mscale_all_dim"):
        rope.only(name, None)
    override = rope.number("attention_factor") if "attention_factor" in rope else None

    def make() -> Rotary:
        frequencies, magnitude = yarn_scaling(
            size, factor, base=base, trained=trained, fast=fast, slow=slow
        )
        magnitude = magnitude if override is None else override
        return Rotary(size, base, frequencies=frequencies, magnitude=magnitude)

    return make


def _llama3(
    rope: Settings, size: int, base: float, factor: float, trained: int
) -> Callable[[], tuple[float, ...]]:
    """Return a function that computes the frequencies of Llama 3.1, with slow ones divided."""
    slow, fast = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if fast <= slow:
        raise rope.refusal("high_freq_factor", f"larger than low_freq_factor, {slow}")

    def make() -> tuple[float, ...]:
        frequencies = []
        for frequency in frequencies_of(size, base):
            turns = trained * frequency / (2 * math.pi)
            share = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
            frequencies.append(frequency * share + frequency / factor * (1 - share))
        return tuple(frequencies)

    return make
