"""polyattn's plugin for graphs of ONNX, as ndonnx builds them."""

from polyattn.plugin import CONTRACT_VERSION, BackendSpec

SPEC = BackendSpec(
    name="onnx",
    namespaces=("ndonnx",),
    implementation="polyattn_onnx.backend:OnnxBackend",
    requires=("ndonnx", "onnx", "spox"),
    install='pip install "polyattn[onnx]"',
    contract_version=CONTRACT_VERSION,
    devices=("graph", "opset"),
    dtypes=("float16", "float32", "float64"),
)
