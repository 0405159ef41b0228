"""Keys or values as integers of 8 bits."""

from __future__ import annotations

from typing import NamedTuple

from polyattn._base.arrays import Array


class Quantized(NamedTuple):
    """Keys or values as integers, and the steps to multiply them by."""

    #: (..., G, S, size) of int8.
    codes: Array
    #: In the dtype of sums: of keys (..., G, n, D), of which S / n keys share a row; of values
    #: (..., G, S, 1).
    steps: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what they stand for."""
        return tuple(self.codes.shape)
