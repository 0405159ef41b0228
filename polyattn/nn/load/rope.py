"""Rotary positions as a config describes them, with the scalings to longer contexts."""

from __future__ import annotations

import math

from polyattn.nn.load.settings import Settings
from polyattn.nn.positions import (
    Rotary,
    frequencies_of,
    linear_scaling,
    ntk_scaling,
    yarn_scaling,
)

__all__ = ["rotary"]

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


def rotary(settings: Settings, size: int, length: int | None) -> Rotary:
    """Return what turns the queries and keys of heads of a size.

    Parameters
    ----------
    settings : Settings
        With ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` as they once were called.
    size : int
        Of a head, even.
    length : int or None
        What dynamic scaling is to serve.
    """
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    rope = Settings("rope_parameters", given)
    rope.only("partial_rotary_factor", 1.0)
    settings.only("partial_rotary_factor", 1.0)
    base = rope.number("rope_theta", settings.number("rope_theta", 10000.0))
    if length is not None and (kind != "dynamic" or length < 1):
        raise ValueError(
            f"length is for dynamic scaling, and positive; got {length!r}, with rope_type {kind!r}"
        )
    longest = settings.whole("max_position_embeddings", 2048)
    trained = rope.whole("original_max_position_embeddings", longest)
    trained = settings.whole("original_max_position_embeddings", trained)
    if kind == "default":
        return Rotary(size, base)
    factor = rope.number("factor")
    if kind == "linear":
        return Rotary(size, base, frequencies=linear_scaling(size, factor, base=base))
    if kind == "dynamic":
        beyond = max(length or longest, longest) / longest - 1
        return Rotary(size, base, frequencies=ntk_scaling(size, 1 + factor * beyond, base=base))
    if kind == "yarn":
        return _yarn(rope, size, base, factor, trained)
    if kind == "llama3":
        return Rotary(size, base, frequencies=_llama3(rope, size, base, factor, trained))
    raise ValueError(f"config: rope_type must be one of {', '.join(KINDS)}; got {kind!r}")


def _yarn(rope: Settings, size: int, base: float, factor: float, trained: int) -> Rotary:
    rope.only("truncate", True)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    frequencies, magnitude = yarn_scaling(
        size, factor, base=base, trained=trained, fast=fast, slow=slow
    )
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below and factor > 1:
        magnitude = (above * math.log(factor) + 10) / (below * math.log(factor) + 10)
    magnitude = rope.number("attention_factor", magnitude)
    return Rotary(size, base, frequencies=frequencies, magnitude=magnitude)


def _llama3(
    rope: Settings, size: int, base: float, factor: float, trained: int
) -> tuple[float, ...]:
    """Return frequencies of which the slow are divided by the factor, as Llama 3.1 has them."""
    slow, fast = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    found = []
    for frequency in frequencies_of(size, base):
        turns = trained * frequency / (2 * math.pi)
        kept = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
        found.append(frequency * kept + frequency / factor * (1 - kept))
    return tuple(found)
