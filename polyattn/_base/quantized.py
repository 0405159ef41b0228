"""Keys or values as integers of 8 or 4 bits."""

from __future__ import annotations

from typing import NamedTuple

from polyattn._base.arrays import Array


class Quantized(NamedTuple):
    """Keys or values as integers, and the steps to multiply them by."""

    #: (..., G, S, size) of int8; or of 4 bits (..., G, S, size / 2) of uint8, each of which has the
    #: integer of an even place in its low bits, and that of the next place in its high ones.
    codes: Array
    #: In the dtype of sums: of keys (..., G, n, D), of which S / n keys share a row; of values
    #: (..., G, S, 1). Of 4 bits (..., G, S, 2, n): the steps of n groups of size / n numbers, and
    #: what to add to the products.
    steps: Array

    @property
    def bits(self) -> int:
        """The bits of a number: 8 or 4."""
        return 4 if len(self.steps.shape) > len(self.codes.shape) else 8

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what they stand for."""
        *lead, size = self.codes.shape
        return (*lead, size * 8 // self.bits)
