"""The array-API kernels, written once for any library that follows the array API standard."""

from polyattn.kernels.dense import Dense
from polyattn.kernels.tiled import Tiled

__all__ = ["Dense", "Tiled"]
