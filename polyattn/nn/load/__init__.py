"""Load the weights that other libraries trained.

Each function takes the weights as a mapping of names to arrays of any library, such as a state
dict; the functions for models also take a ``.safetensors`` file, or a folder that
``save_pretrained`` of transformers wrote. The parameters are copies, in the library, device and
dtype of `like`. All names and shapes are checked before anything is copied; one ValueError lists
the first twenty that do not fit.
"""

from polyattn.nn.load.layers import torch_attention, torch_encoder_layer
from polyattn.nn.load.models import model

__all__ = ["model", "torch_attention", "torch_encoder_layer"]
__dir__ = __all__.copy
