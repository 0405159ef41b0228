"""Draw attention: the weights of each head, their entropy, and the keys that a mask shows."""

from polyattn.plot.mask_picture import mask
from polyattn.plot.weights_picture import attention_map, entropy

__all__ = ["attention_map", "entropy", "mask"]
__dir__ = __all__.copy
