"""What cuDNN says of the graphs that are made for it, on a machine without a GPU.

cuDNN itself is asked whether it supports each case on a device of compute capability 9.0, whose
properties are in sm90_device.json. No driver is needed: one is made up, which fails at everything.

``make cudnn-plans`` fetches cuDNN and cuBLAS, about 1 GB, into a folder that it hands to this.
It ends with 1 where cuDNN answers otherwise than is written here.

With ``--frontend`` only NVIDIA's frontend is asked. It has rules of its own, and needs of cuDNN
only the version: tests/backends/test_cupy_frontend.py makes up the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

LONG, SHORT, ROW = (2, 8, 512, 64), (2, 8, 100, 64), (2, 8, 1, 64)
GROUPED, ODD, ONE = (2, 2, 512, 64), (2, 2, 511, 64), (2, 2, 1, 64)
CAUSAL = {"is_causal": True}


def case(query: Any, key: Any = None, *, value: Any = None, said: str = "", **options: Any) -> Any:
    """Return the shapes of a call, its options, and a part of cuDNN's refusal, "" for none."""
    key = key or query
    return (query, key, value or key), options, said


def of_size(size: int, **more: Any) -> Any:
    return case((2, 8, 77, size), **more)


CASES = {
    "plain": case(LONG),
    "one head": case((512, 64), (300, 64)),
    "grouped": case(LONG, GROUPED),
    "logsumexp": case(LONG, GROUPED, logsumexp=True),
    "value size": case(LONG, GROUPED, value=(2, 2, 512, 40)),
    "size 8": of_size(8),
    "size 128": of_size(128),
    "size 256": of_size(256),
    "causal": case(SHORT, GROUPED, **CAUSAL),
    "causal, square": case(LONG, GROUPED, **CAUSAL),
    "causal, from the first": case(SHORT, GROUPED, **CAUSAL, query_offset=0),
    "causal, more queries": case(LONG, SHORT, **CAUSAL),
    "causal, elsewhere": case(SHORT, GROUPED, **CAUSAL, query_offset=9),
    "left window": case(SHORT, GROUPED, window=(7, None)),
    "right window": case(SHORT, GROUPED, window=(None, 7)),
    "window": case(LONG, GROUPED, window=(7, 3), logsumexp=True),
    "window, more queries": case(LONG, SHORT, window=(7, 3)),
    "offsets": case(SHORT, GROUPED, **CAUSAL, query_offset=(2,)),
    "decode": case(ROW, GROUPED, **CAUSAL),
    "one query, one key": case(ROW, ONE),
    "few keys": case((2, 8, 3, 64), (2, 2, 7, 64), window=(2, 0)),
    "mask of keys": case(SHORT, GROUPED, mask=(2, 1, 1, 512)),
    "mask, odd": case(SHORT, ODD, mask=(100, 511)),
    "mask, decode": case(ROW, GROUPED, mask=(2, 1, 1, 512)),
    "mask of heads, odd": case(SHORT, ODD, mask=(1, 8, 100, 511)),
    "mask and causal": case(SHORT, GROUPED, mask=(2, 1, 1, 512), **CAUSAL),
    "mask and causal, square": case(LONG, GROUPED, mask=(512,), **CAUSAL),
    "mask and window, square": case(LONG, GROUPED, mask=(512,), window=(9, 9)),
    "key lengths": case(SHORT, ODD, key_lengths=(2,)),
    "key lengths, causal": case(SHORT, GROUPED, key_lengths=(2,), **CAUSAL),
    "key lengths, decode": case(ROW, GROUPED, key_lengths=(2,), **CAUSAL),
    "bias": case(LONG, GROUPED, bias=(1, 8, 512, 512)),
    "bias of an item": case(SHORT, GROUPED, bias=(2, 8, 100, 512)),
    "softcap": case(LONG, GROUPED, softcap=30.0),
    "size 12": of_size(12, said="multiple of 8"),
}
#: Those whose gradients are refused otherwise, and more of gradients.
NOT_DIFFERENTIATED = ("softcap", "logsumexp", "offsets", "bias", "bias of an item")
GRADIENTS = {name: row for name, row in CASES.items() if name not in NOT_DIFFERENTIATED} | {
    "odd": case(SHORT, ODD),
    "size 192, values 128": of_size(192, value=(2, 8, 77, 128)),
    "window, causal": case(SHORT, GROUPED, window=(7, 0)),
    "size 264": of_size(264, said="less than or equal to 256"),
    "one query, one key": case(ROW, ONE, said="s_q = s_kv = 1"),
}


def main(folder: Path) -> int:
    """Make up a driver, and ask again where the libraries are found."""
    with tempfile.TemporaryDirectory() as made:
        compiler = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/lib"
        libraries = [folder / "nvidia/cudnn/lib", folder / "nvidia/cu13/lib", compiler]
        make_driver(libraries, Path(made))
        paths = [made, *map(str, libraries)]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)}
        return subprocess.run([sys.executable, __file__, "--ask"], env=environment).returncode


def make_driver(folders: list[Path], where: Path) -> None:
    """Write a libcuda.so.1 that has all that the libraries look for, and says NOT_SUPPORTED."""
    names: set[bytes] = set()
    for library in (path for folder in folders for path in folder.glob("*.so.*")):
        names.update(re.findall(rb"\0(cu[A-Z][A-Za-z0-9_]{2,60})(?=\0)", library.read_bytes()))
    source = where / "driver.c"
    source.write_text("".join(f"int {name.decode()}(void) {{ return 801; }}\n" for name in names))
    library = where / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)


def graph_of_call(shapes: Any, dtype: str, is_gradient: bool, options: Any) -> Any:
    """Return the graph that the kernel makes of a call, or of its gradients."""
    from polyattn import explain
    from polyattn._core.call.problem import examine
    from polyattn.plugin import Cotangents, Residuals
    from polyattn_cupy.problem_graphs import graph_of

    call = explain(*shapes, library="numpy", device="cpu", dtype=dtype, **options).call
    if is_gradient:
        rows = call.query.shape[:-1]
        output = call.query._replace(shape=(*rows, call.value.shape[-1]))
        logsumexp = call.query._replace(shape=rows, dtype="float32")
        residuals = Residuals(output=output, logsumexp=logsumexp)
        call = call._replace(residuals=residuals, cotangents=Cotangents(output=output))
    return graph_of(examine(call))


def ask(*, only_frontend: bool) -> int:
    """Print the answer of cuDNN to each case, or that of its frontend."""
    import cudnn

    from polyattn_cupy import graphs, loading

    properties = cudnn.create_device_properties((HERE / "sm90_device.json").read_text())
    where = {"sm_version": 90, "device_property": properties}
    print(", ".join(f"{name} {version}" for name, version in loading.versions().items()))
    wrong = 0
    for dtype in ("float16", "bfloat16"):
        for is_gradient, cases in enumerate((CASES, GRADIENTS)):
            for name, (shapes, options, expected) in cases.items():
                graph = graph_of_call(shapes, dtype, bool(is_gradient), options)
                said = engine = ""
                try:
                    if only_frontend:
                        plan = graphs.describe(graph, **where)
                        plan.validate()
                        plan.build_operation_graph()
                        plan.key()  # from 1.32 on, this is what asks
                    else:
                        engine = graphs.build(graph, **where).get_plan_name_at_index(0)
                except Exception as error:
                    said = str(error).splitlines()[0]
                right = expected in said if expected else not said
                wrong += not right
                verdict = "as written" if right else "OTHERWISE"
                kind = "gradients" if is_gradient else ""
                print(f"{verdict:10}  {dtype:8}  {kind:9}  {name:26}  {said or engine}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] in (["--ask"], ["--frontend"]):
        sys.exit(ask(only_frontend=sys.argv[1] == "--frontend"))
    sys.exit(main(Path(sys.argv[1]).resolve()))
