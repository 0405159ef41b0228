"""Run the conformance cases on a provider of ONNX Runtime: as nodes, and written out.

Each case is right, refused by name, or wrong. A written-out model may have nodes that the provider
leaves to the CPU: those that compute on numbers are listed.
"""

import argparse
import collections
import json
import pathlib
import sys
import tempfile

import onnxruntime
from exported import by

from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
from polyattn.conformance.checks.cases import check_case, is_applicable
from polyattn.conformance.checks.target import Target
from polyattn_onnxruntime.backend import PROVIDERS

#: What a provider cannot run: the device, the first digits of the releases, words of the error, and
#: the cause. In any other release the same error is wrong.
REFUSED = (
    # Four nodes are enough: a = Exp(x), b = IsNaN(a), c = Cast(b), y = Mul(a, c).
    ("openvino", "1.24.", "the graph is not acyclic",
     "it joins the nodes before and after an IsNaN, which it leaves to the CPU, to one"),
    ("openvino", "1.24.", "Tensor data equal nullptr", "it takes no array without memory"),
    ("openvino", "1.24.", "offset array and window beyond int32, float16: output",
     "an offset beyond 32 bits is another number there"),
    ("openvino", "1.24.", "dropout, seed of an array: output",
     "it drops others than with the same seed as a number"),
    ("webgpu", "", "the device does not support it", "no float16 on this device"),
    ("webgpu", "1.27.", "softcap 50: output", "its tanh of small numbers is 1e-6 off"),
    ("webgpu", "1.27.", "nan in a key seen by later rows, sigmoid: output",
     "a score of NaN is lost on the way to its sigmoid"),
)  # fmt: skip

#: Operators by which it is seen that a model's arithmetic is the provider's.
ARITHMETIC = {"MatMul", "Softmax", "Exp", "Tanh", "Mul", "Div", "Sub", "ReduceSum", "ReduceMax"}


class Written:
    """Runs models by a provider, and counts the arithmetic that the CPU did in its place."""

    def __init__(self, provider):
        self.provider, self.on_cpu, self.on_provider = provider, collections.Counter(), 0
        self.folder = pathlib.Path(tempfile.mkdtemp())

    def __call__(self, model, inputs):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.enable_profiling = True
        options.profile_file_prefix = str(self.folder / "run")
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[self.provider], enable_fallback=False
        )
        found = session.run(None, inputs)
        file = pathlib.Path(session.end_profiling())
        events = json.loads(file.read_text())
        file.unlink()
        nodes = [one["args"] for one in events if one.get("cat") == "Node"]
        for node in nodes:
            if node.get("provider") == self.provider:  # it may make one of several
                self.on_provider += 1
            elif "provider" in node and node["op_name"] in ARITHMETIC:
                self.on_cpu[node["op_name"]] += 1
        return found


def report(title, target, kernel, cases, known):
    """Check each case by a kernel; print what is wrong, and return how many are."""
    (variant,) = (v for v in target.kernels if v.kernel.name == kernel and not v.small_tiles)
    results, refused = collections.Counter(), collections.Counter()
    for case in cases:
        if not is_applicable(target, variant, case):
            continue
        try:
            outcome = check_case(target, variant, case)
        except AssertionError as error:
            if cause := next((why for words, why in known.items() if words in str(error)), None):
                results["refused"] += 1
                refused[cause] += 1
                continue
            results["wrong"] += 1
            print(f"{title}: WRONG {case}: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        results["refused" if outcome.refusal else "right"] += 1
        refused[outcome.refusal] += bool(outcome.refusal)
    counts = (f"{results[name]} {name}" for name in ("right", "refused", "wrong"))
    print(f"{title}: {', '.join(counts)}")
    for reason, count in refused.most_common(5):
        if count:
            print(f"  {count} refused: {reason[:200]}")
    return results["wrong"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=sorted(PROVIDERS))
    parser.add_argument("--essential", action="store_true", help="one case of each feature only")
    arguments = parser.parse_args()
    provider = PROVIDERS[arguments.device]
    print(f"{provider}, ONNX Runtime {onnxruntime.__version__}")
    cases = (ESSENTIAL if arguments.essential else CASES).values()
    cases = [case for case in cases if case.dtype != "bfloat16"]  # which ndonnx lacks
    known = {
        words: why
        for device, release, words, why in REFUSED
        if device == arguments.device and onnxruntime.__version__.startswith(release)
    }
    written = Written(provider)
    wrong = report("as nodes", Target(f"onnxruntime:{arguments.device}"), "node", cases, known)
    wrong += report("written out", Target("onnx", transform=by(written)), "dense", cases, known)
    print(f"  {written.on_provider} nodes ran by {provider}; arithmetic on the CPU:")
    print(f"  {dict(written.on_cpu) or 'none'}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
