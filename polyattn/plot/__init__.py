"""Draw attention: the weights of each head, and the keys that a mask shows."""

from polyattn.plot.mask_picture import mask
from polyattn.plot.weights_picture import attention_map

__all__ = ["attention_map", "mask"]
__dir__ = __all__.copy
