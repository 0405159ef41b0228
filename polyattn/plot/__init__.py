"""Pictures of attention: the weights of each head, their entropy, and what a mask lets see."""

from polyattn.plot.weights import attention_map, entropy, mask

__all__ = ["attention_map", "entropy", "mask"]
