"""How attention is computed, written once against the array API standard, for any library."""

from polyattn.kernels.dense import Dense
from polyattn.kernels.tiled import Tiled

__all__ = ["Dense", "Tiled"]
