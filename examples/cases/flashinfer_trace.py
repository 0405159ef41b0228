"""Write cases as definitions and workloads of FlashInfer-Trace, those that it can express.

``python flashinfer_trace.py DIR TRACE`` reads what ``polyattn check --write-cases DIR`` wrote and
writes a folder TRACE. The cases are caches, pages and batches whose causal rows count from the
last key; a batch is written as one page for each item. FlashInfer's logsumexp is in base 2.
"""

# ruff: noqa: N806 -- the letters are those of docs/semantics.md

import itertools
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from check_cases import read_cases

KIND = "gqa_paged"
TAKEN = {"query", "key", "value", "is_causal", "key_lengths", "block_table", "layout", "scale"}
CONSTANT = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
AXES = {
    "q": ("total_q", "num_qo_heads", "head_dim"),
    "k_cache": ("num_pages", "page_size", "num_kv_heads", "head_dim"),
    "v_cache": ("num_pages", "page_size", "num_kv_heads", "head_dim"),
    "qo_indptr": ("len_indptr",),
    "kv_indptr": ("len_indptr",),
    "kv_indices": ("num_kv_indices",),
    "kv_last_page_len": ("batch_size",),
    "output": ("total_q", "num_qo_heads", "head_dim"),
    "lse": ("total_q", "num_qo_heads"),
}
RESULTS = ("output", "lse")
CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
REFERENCE = '''import math
import torch

def run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    """Attend item by item and row by row; the last row sees all keys of its item."""
    output = torch.zeros(q.shape, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    for b, last_page in enumerate(kv_last_page_len.tolist()):
        first, last = qo_indptr[b : b + 2].tolist()
        pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        count = max(len(pages) - 1, 0) * k_cache.shape[1] + last_page
        keys, values = (x[pages].flatten(0, 1)[:count].float() for x in (k_cache, v_cache))
        for i in range(first, last):
            seen = len(keys) - (last - 1 - i)
            if seen > 0:
                k, v = (x[:seen].repeat_interleave(group, 1) for x in (keys, values))
                scores = sm_scale * torch.einsum("hd,jhd->hj", q[i].float(), k)
                lse[i] = torch.logsumexp(scores, -1) / math.log(2)
                output[i] = torch.einsum("hj,jhd->hd", torch.softmax(scores, -1), v)
    return output.to(q.dtype), lse
'''


def packed(case):
    """Return the arrays of a case as FlashInfer takes them; None if it cannot express the case."""
    given = case["arguments"]
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if {x.ndim for x in (q, k, v)} != {4} or k.shape != v.shape or not q.size or not k.size:
        return None
    is_first = given.get("layout") == "...LHD"
    q, k, v = (x if is_first else np.swapaxes(x, 1, 2) for x in (q, k, v))
    (B, L, H, D), S = q.shape, k.shape[1]
    table = given.get("block_table", np.arange(len(k))[:, None])
    is_causal = L == 1 or given.get("is_causal")
    if not (given.keys() <= TAKEN and is_causal and case["rows"] is None and len(table) == B):
        return None
    lengths = np.broadcast_to(given.get("key_lengths", S), (B,)).tolist()
    used = [row[: -(-n // S)] for row, n in zip(table, lengths, strict=True)]
    output, lse = (case["results"][name]["exact"] for name in ("output", "logsumexp"))
    output, lse = (x if is_first else np.swapaxes(x, 1, 2) for x in (output, lse))
    return {
        **{"q": q.reshape(B * L, H, D), "k_cache": k, "v_cache": v},
        **{"qo_indptr": starts([L] * B), "kv_indptr": starts(map(len, used))},
        "kv_indices": np.concatenate(used).astype(np.int32),
        "kv_last_page_len": np.array([n and (n - 1) % S + 1 for n in lengths], np.int32),
        "sm_scale": np.float32(given.get("scale", 1 / math.sqrt(D))),
        **{"output": output.reshape(B * L, H, D), "lse": lse.reshape(B * L, H) / math.log(2)},
    }


def starts(counts):
    """Return where each item begins, and where the last one ends."""
    return np.array(list(itertools.accumulate(counts, initial=0)), np.int32)


def lengths_of(arrays):
    """Return the length of each axis by name."""
    return {
        a: n for x in arrays for a, n in zip(AXES.get(x, ()), arrays[x].shape, strict=x in AXES)
    }


def definition(name, arrays):
    """Return a definition from the arrays of one of its workloads."""
    dtypes = {n: str(x.dtype) for n, x in arrays.items()}
    dtypes |= {"output": dtypes["q"], "lse": "float32"}
    specs = {n: {"shape": AXES.get(n), "dtype": dtype} for n, dtype in dtypes.items()}
    axes = {
        axis: {"type": "const", "value": n} if axis in CONSTANT else {"type": "var"}
        for axis, n in lengths_of(arrays).items()
    }
    return {
        **{"name": name, "op_type": KIND, "axes": axes, "reference": REFERENCE},
        "description": "Attention over a paged cache; causal rows count from the last key.",
        "tags": ["stage:prefill", "source:polyattn"],
        "constraints": ["total_q == qo_indptr[-1].item()"],
        "inputs": {n: spec for n, spec in specs.items() if n not in RESULTS},
        "outputs": {n: specs[n] for n in RESULTS},
    }


def workload(name, case, arrays, file):
    """Return a workload; the file of its inputs has the exact results too."""
    inputs = {
        n: {"type": "safetensors", "path": file, "tensor_key": f"{case}/{n}"}
        for n in arrays
        if n not in RESULTS
    }
    inputs["sm_scale"] = {"type": "scalar", "value": float(arrays["sm_scale"])}
    axes = {axis: n for axis, n in lengths_of(arrays).items() if axis not in CONSTANT}
    made = {"uuid": case, "axes": axes, "inputs": inputs}
    return {"definition": name, "workload": made, "solution": None, "evaluation": None}


def safetensors(tensors):
    """Return arrays as a safetensors file."""
    header, parts, at = {}, [], 0
    for name, x in tensors.items():
        parts.append(np.ascontiguousarray(x).tobytes())
        ends = [at, at := at + len(parts[-1])]
        header[name] = {"dtype": CODES[str(x.dtype)], "shape": x.shape, "data_offsets": ends}
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def write(cases, folder):
    """Write the cases that can be expressed to a folder, and return their number."""
    groups = defaultdict(dict)
    for case in cases:
        arrays = packed(case) if case["dtype"] != "float64" else None
        if arrays is not None:
            (_, H, D), (_, page, G, _) = arrays["q"].shape, arrays["k_cache"].shape
            name = f"{KIND}_prefill_causal_h{H}_kv{G}_d{D}_ps{page}_{case['dtype']}"
            groups[name][case["name"]] = arrays
    for name, workloads in groups.items():
        blob = f"blob/workloads/{KIND}/{name}.safetensors"
        lines = (json.dumps(workload(name, *item, blob)) + "\n" for item in workloads.items())
        tensors = {f"{case}/{n}": x for case, made in workloads.items() for n, x in made.items()}
        first = definition(name, next(iter(workloads.values())))
        for file, content in {
            f"definitions/{KIND}/{name}.json": json.dumps(first, indent=1).encode(),
            f"workloads/{KIND}/{name}.jsonl": "".join(lines).encode(),
            blob: safetensors(tensors),
        }.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    return sum(map(len, groups.values()))


if __name__ == "__main__":
    read, trace = map(Path, sys.argv[1:] if len(sys.argv) == 3 else sys.exit(__doc__))
    print(f"{write(read_cases(read), trace)} workloads in {trace}")
