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


@functools.cache
def transformer(layers=2, **options):
    given = {"rotary": nn.Rotary(8), "key_heads": 2} | options
    return nn.Transformer.init(50, 32, 4, layers, like=LIKE, is_causal=True, **given)


@functools.cache
def step(model, opset=24, **options):
    inputs = {"ids": ("B", "L"), "caches": model.caches("S", batch=("B",))}
    return export(model, inputs, dtype="int64", options=options, opset=opset)


CALLS = {
    "causal": ({}, {}, 24),
    "window of opset 25": ({"layers": 1}, {"window": (2, 0)}, 25),
    "learned positions and softcap": (
        {"layers": 1, "rotary": None, "positions": 12, "softcap": 3.0}, {}, 24,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_step_generates_what_numpy_generates(name):
    built, options, opset = CALLS[name]
    model = transformer(**built)
    exported, layers = step(model, opset, **options), range(len(model.stack.blocks))
    assert kinds(exported).count("Attention") == len(layers)
    assert kinds(exported).count("TensorScatter") == 2 * len(layers)
    if opset == 25 and not KNOWS_WINDOWS:
        with pytest.raises(Exception, match="left_window_size"):
            by_onnxruntime(exported)
    run = by_reference(exported) if opset == 25 else by_onnxruntime(exported)
    names, memory = [output.name for output in exported.graph.output], np.zeros((2, 2, 12, 8), "f")
    state = {f"caches.{layer}.{kind}": memory for layer in layers for kind in ("key", "value")}
    state["caches.length"] = np.array(0)
    caches, ids = model.caches(12, batch=(2,)), PROMPT
    for _ in range(6):
        found = dict(zip(names, run({"ids": ids} | state), strict=True))
        logits, caches = model(ids, caches=caches, **options)
        assert abs(found["output"] - logits).max() < 2e-6
        state = {name: found[f"next_{name}"] for name in state}
        assert state["caches.length"] == caches[0].length
        ids = logits[:, -1:].argmax(-1)


def test_a_step_has_names_and_lengths_and_its_nodes_read_what_tensorscatter_wrote():
    exported, memory = step(transformer()), ["B", 2, "S", 8]
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
    model, exported = transformer(), step(transformer())
    arrays = np.zeros((4, 2, 2, 12, 8), np.float32)
    names = [f"caches.{n}.{kind}" for n in (0, 1) for kind in ("key", "value")]
    memory = dict(zip(names, map(onnxruntime.OrtValue.ortvalue_from_numpy, arrays), strict=True))
    binding = (run := session(exported)).io_binding()
    binding.bind_cpu_input("ids", PROMPT)
    binding.bind_cpu_input("caches.length", np.array(0))
    for name, value in memory.items():
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"next_{name}", value)
    binding.bind_output("output")
    binding.bind_output("next_caches.length")
    run.run_with_iobinding(binding)
    _, caches = model(PROMPT, caches=model.caches(12, batch=(2,)))
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
    "paged": (PAGED, {}, "caches holds a PagedCache, .*: give KVCaches"),
    "quantised": (QUANTIZED[0], {}, "caches holds a QuantizedCache, .*: give KVCaches"),
    "not returned": ([NAMED], {}, "which are 1; this one returned 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_caches_that_do_not_fit_are_refused(name):
    caches, options, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=said):
        export(lambda x, caches: x, {"x": ("B", "L"), "caches": caches}, **options)
