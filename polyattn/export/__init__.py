"""Write calls and modules as models of ONNX, which other programs run without Python."""

from polyattn.export.model import onnx

__all__ = ["onnx"]
__dir__ = __all__.copy
