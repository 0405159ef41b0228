"""The array-API kernels, written once for any library that follows the array API standard."""

from polyattn.kernels.dense_kernel import Dense
from polyattn.kernels.tiled import Tiled

__all__ = ["Dense", "Tiled"]
