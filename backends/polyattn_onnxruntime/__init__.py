"""polyattn's plugin for ONNX Runtime, which computes on arrays of NumPy if it is named."""

from polyattn.plugin import CONTRACT_VERSION, BackendSpec

SPEC = BackendSpec(
    name="onnxruntime",
    namespaces=("numpy",),
    implementation="polyattn_onnxruntime.backend:OnnxruntimeBackend",
    requires=("onnx", "onnxruntime"),
    install='pip install "polyattn[onnxruntime]"',
    contract_version=CONTRACT_VERSION,
    devices=("cpu", "cuda", "coreml", "dml", "openvino", "webgpu"),
    dtypes=("float16", "float32", "float64"),
    only_on_request=True,
)
