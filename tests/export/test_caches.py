"""Models of ONNX that generate token by token: caches as inputs and outputs."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from runtimes import KNOWS_WINDOWS, by_onnxruntime, by_reference, kinds, onnxruntime, session

from polyattn import nn
from polyattn.export import onnx as export

LIKE = np.zeros(1, np.float32)
PROMPT = np.array([[5, 7, 11], [2, 3, 0]])
TOKENS = 5


@functools.cache
def transformer(layers=2, **options):
    given = {"rotary": nn.Rotary(8), "key_heads": 2} | options
    return nn.Transformer.init(50, 32, 4, layers, like=LIKE, is_causal=True, **given)


def inputs(model, capacity="S", batch="B"):
    return {"ids": (batch, "L"), "caches": model.caches(capacity, batch=(batch,))}


def step(model, opset=24, lengths=(), **options):
    return export(model, inputs(model, *lengths), dtype="int64", options=options, opset=opset)


def decode(exported, run, model, capacity=12, **options):
    """Yield the logits of each step, by a runtime and by NumPy."""
    names = [output.name for output in exported.graph.output]
    memory, layers = np.zeros((2, 2, capacity, 8), np.float32), range(len(model.stack.blocks))
    state = {f"caches.{layer}.{kind}": memory for layer in layers for kind in ("key", "value")}
    state["caches.length"] = np.array(0)
    caches, ids = model.caches(capacity, batch=(2,)), PROMPT
    for _ in range(1 + TOKENS):
        found = dict(zip(names, run({"ids": ids} | state), strict=True))
        logits, caches = model(ids, caches=caches, **options)
        yield found["output"], logits
        state = {name: found[f"next_{name}"] for name in state}
        assert state["caches.length"] == caches[0].length
        ids = logits[:, -1:].argmax(-1)


CALLS = {
    "causal": ({}, {}, 24),
    "window of opset 25": ({"layers": 1}, {"window": (2, 0)}, 25),
    "window as a mask": ({"layers": 1}, {"window": (2, 0)}, 24),
    "learned positions and softcap": (
        {"layers": 1, "rotary": None, "positions": 12, "softcap": 3.0}, {}, 24,
    ),
}  # fmt: skip


@functools.cache
def exported_step(name):
    built, options, opset = CALLS[name]
    return step(transformer(**built), opset, **options)


@pytest.mark.parametrize("name", CALLS)
def test_a_step_generates_what_numpy_generates(name):
    built, options, opset = CALLS[name]
    model = transformer(**built)
    exported = exported_step(name)
    layers = len(model.stack.blocks)
    assert kinds(exported).count("Attention") == layers
    assert kinds(exported).count("TensorScatter") == 2 * layers
    for run in (by_onnxruntime, by_reference)[: 1 + (opset == 25)]:
        if opset == 25 and run is by_onnxruntime and not KNOWS_WINDOWS:
            with pytest.raises(Exception, match="left_window_size"):
                run(exported)
            continue
        for found, wanted in decode(exported, run(exported), model, **options):
            assert abs(found - wanted).max() < 2e-6


def test_a_step_has_names_and_lengths_and_its_nodes_read_what_tensorscatter_wrote():
    exported, memory = exported_step("causal"), ["B", 2, "S", 8]
    shapes = {
        one.name: [d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim]
        for one in exported.graph.input
    }
    caches = {f"caches.{n}.{kind}": memory for n in (0, 1) for kind in ("key", "value")}
    assert shapes == {"ids": ["B", "L"], **caches, "caches.length": []}
    outputs = [one.name for one in exported.graph.output]
    assert outputs == ["output", *[f"next_{name}" for name in shapes if name != "ids"]]
    for node in exported.graph.node:
        if node.op_type == "Attention":
            layer = node.input[1].split(".")[1]
            memory = [f"next_caches.{layer}.key", f"next_caches.{layer}.value"]
            assert list(node.input[1:6]) == [*memory, "", "", ""]  # and no mask
            assert node.input[6]  # the number of tokens
            assert {a.name: a.i for a in node.attribute}["is_causal"] == 1


def test_onnxruntime_writes_to_memory_that_is_bound_twice():
    model, exported = transformer(), exported_step("causal")
    run = session(exported)
    memory = {
        one.name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, 2, 12, 8), np.float32))
        for one in exported.graph.input[1:-1]
    }
    caches, ids, length = model.caches(12, batch=(2,)), PROMPT, np.array(0)
    for _ in range(1 + TOKENS):
        binding = run.io_binding()
        binding.bind_cpu_input("ids", ids)
        binding.bind_cpu_input("caches.length", length)
        for name, value in memory.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(f"next_{name}", value)
        binding.bind_output("output")
        binding.bind_output("next_caches.length")
        run.run_with_iobinding(binding)
        *_, found, length = binding.copy_outputs_to_cpu()
        logits, caches = model(ids, caches=caches, is_causal=True)
        assert abs(found - logits).max() < 2e-6
        ids = logits[:, -1:].argmax(-1)
    written = memory["caches.1.key"].numpy()[..., : caches[1].length, :]
    assert abs(written - caches[1].keys).max() < 2e-6


def test_a_layer_has_one_cache():
    layer = nn.MultiHeadAttention.init(32, 4, like=LIKE)
    given = {"x": ("B", "L", 32), "cache": layer.cache("S", like=LIKE, batch=("B",))}
    exported = export(layer, given)
    names = ["cache.key", "cache.value", "cache.length"]
    assert [one.name for one in exported.graph.input] == ["x", *names]
    assert [one.name for one in exported.graph.output] == ["output", *[f"next_{n}" for n in names]]
    x = np.random.default_rng(0).standard_normal((2, 3, 32), dtype=np.float32)
    memory = np.zeros((2, 4, 9, 8), np.float32)
    feed = {"x": x, "cache.key": memory, "cache.value": memory, "cache.length": np.array(0)}
    wanted, cache = layer(x, cache=layer.cache(9, like=LIKE, batch=(2,)))
    found, key, _, length = by_onnxruntime(exported)(feed)
    assert abs(found - wanted).max() < 2e-6  # all rows see all tokens so far, and no memory after
    assert abs(key[..., :length, :] - cache.keys).max() < 2e-6


(WHOLE,) = transformer(1).caches(12, batch=(2,))
PAGED, QUANTIZED = (
    transformer(1).caches(12, batch=(2,), kind=kind) for kind in (nn.PagedCache, nn.QuantizedCache)
)
NAMED = nn.KVCache.init(2, 8, "S", like=LIKE, batch=("B",))
REFUSED = {
    "opset": ([NAMED], {"opset": 23}, r"opset must be 24 or 25 for the cache caches, .* got 23"),
    "length": (transformer(1).caches("a b"), {}, r"caches\.0\.key must hold positive lengths"),
    "dtype": ([NAMED], {"dtype": {"caches": "float16"}}, "dtype must not name the cache caches"),
    "slid": ([replace(WHOLE, dropped=1)], {}, r"the cache caches\.0 has slid: a model cannot know"),
    "without its first": ([replace(WHOLE, first=1)], {}, "has slid"),
    "paged": (PAGED, {}, "caches holds a PagedCache, .*: give KVCaches"),
    "quantised": (QUANTIZED[0], {}, "caches holds a QuantizedCache, .*: give KVCaches"),
    "not returned": ([NAMED], {}, "which are 1; this one returned 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_caches_that_do_not_fit_are_refused(name):
    caches, options, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=said):
        export(lambda x, caches: x, {"x": ("B", "L"), "caches": caches}, **options)
