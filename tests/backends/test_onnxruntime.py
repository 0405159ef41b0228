"""ONNX Runtime as a backend of NumPy's arrays: when it runs, its sessions, and what it refuses."""

import numpy as np
import pytest
import runtimes
from arrays import draw

import polyattn
from polyattn import attention, explain, masks, scores, use_threads
from polyattn_onnxruntime import backend as sessions

HIDING = np.full((8, 2), -np.inf)


def numbers(*shape, dtype="float32"):
    return draw(shape, dtype=dtype)[0]


def test_it_never_runs_unless_it_is_named():
    x = numbers(2, 5, 8)
    assert {c.backend for c in explain(x, x, x).candidates} == {"numpy"}
    assert explain(x, x, x, backend="onnxruntime").chosen.kernel == "node"
    assert explain(x, x, x, backend="onnxruntime:cpu").chosen.kernel == "node"


def test_a_node_that_a_provider_leaves_to_the_cpu_is_refused(monkeypatch):
    """Azure's provider is in every build, and runs no node."""
    monkeypatch.setitem(sessions.PROVIDERS, "cuda", "AzureExecutionProvider")
    x, said = numbers(2, 5, 8), "AzureExecutionProvider .* does not run the node Attention-24"
    sessions.session_of.cache_clear()
    sessions._refusal.cache_clear()
    explanation = explain(x, x, x, backend="onnxruntime:cuda")
    assert explanation.chosen.kernel != "node"
    assert explanation.candidates[0].status == "refused"
    with pytest.raises(polyattn.UnsupportedError, match=said):
        attention(x, x, x, backend="onnxruntime:cuda", kernel="node")
    # A provider that runs the plainest node may still not run another.
    monkeypatch.setattr(sessions, "_refusal", lambda *_: None)
    with pytest.raises(NotImplementedError, match=said):
        attention(x, x, x, backend="onnxruntime:cuda", kernel="node", softcap=2.0)


@pytest.fixture
def opened(monkeypatch):
    """Return the options of the sessions that are made from now on."""
    found, genuine = [], sessions.onnxruntime.InferenceSession

    def watched(model, options, **more):
        found.append(options)
        return genuine(model, options, **more)

    monkeypatch.setattr(sessions.onnxruntime, "InferenceSession", watched)
    sessions.session_of.cache_clear()
    return found


def test_calls_with_the_same_facts_share_a_session_whose_threads_are_ours(opened):
    with use_threads(2):
        for length in (3, 5, 9):
            x = numbers(2, length, 8)
            attention(x, x, x, backend="onnxruntime")
    (options,) = opened
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    attention(x, x, x, backend="onnxruntime", softcap=2.0)
    assert len(opened) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": np.ones((5, 5), bool)}, "NaN for a row without keys in float64"),
        ({"is_causal": True, "query_offset": -1}, "NaN for a row without keys"),
        ({"score_mod": scores.relative_bias(HIDING)}, "NaN for a row without keys"),
        ({"softcap": 0.1}, "the attribute softcap is a float32"),
    ],
)
def test_what_it_computes_wrongly_is_refused(options, reason):
    x = numbers(2, 5, 8, dtype="float64")
    found = attention(x, x, x, backend="onnxruntime", **options)
    assert abs(found - attention(x, x, x, **options)).max() < 1e-14
    with pytest.raises(polyattn.UnsupportedError, match=reason):
        attention(x, x, x, backend="onnxruntime", kernel="node", **options)


def test_a_mask_is_not_made_at_any_size():
    shape = (1, 2**14, 8)
    explanation = explain(shape, shape, shape, window=(5, 0), backend="onnxruntime")
    assert explanation.chosen.kernel == "tiled"
    assert "a mask of 268,435,456 elements, above 67,108,864" in str(explanation)
    whole = explain(shape, shape, shape, is_causal=True, backend="onnxruntime")
    assert whole.chosen.kernel == "node"


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ({"mask": masks.padding([9, 5])}, 2 * 16),
        ({"mask": (2, 1, 4, 4)}, 0),  # it is there already
        ({"score_mod": scores.alibi(3)}, 3 * 16),
        ({"sinks": (3,), "mask": (2, 1, 4, 4)}, 2 * 3 * 16),
    ],
)
def test_a_made_mask_counts_heads_and_items_that_differ(monkeypatch, options, elements):
    shape = (2, 3, 4, 8)
    for largest in (elements, elements - 1)[: elements + 1]:
        monkeypatch.setattr("polyattn._core.tiles.visibility.LARGEST_MADE", largest)
        explanation = explain(shape, shape, shape, backend="onnxruntime", **options)
        assert explanation.chosen.kernel == ("node" if largest == elements else "dense")
        named = explain(shape, shape, shape, backend="onnxruntime", kernel="node", **options)
        assert (named.chosen.on_request is None) == (largest == elements)


def test_another_byte_order_is_turned():
    x = numbers(2, 5, 8, dtype=">f4")
    wanted = attention(x, x, x, kernel="dense")
    assert abs(attention(x, x, x, backend="onnxruntime", kernel="node") - wanted).max() < 1e-3


def test_a_graph_without_numbers_says_what_gives_them():
    pytest.importorskip("ndonnx")
    x = numbers(2, 5, 8)
    assert abs(attention(x, x, x, backend="onnx") - attention(x, x, x)).max() < 1e-6
    if runtimes.KNOWS_WINDOWS:
        found = attention(x, x, x, window=(1, 0), backend="onnx:25")
        assert abs(found - attention(x, x, x, window=(1, 0))).max() < 1e-6
        return
    with pytest.raises(ValueError, match=r"values only when a runtime .* polyattn\.export\.onnx"):
        attention(x, x, x, window=(1, 0), backend="onnx:25")


def test_sinks_stand_beside_several_batch_axes():
    x = numbers(2, 3, 2, 5, 4)
    sinks = np.array([0.5, -1.0], np.float32)
    found = attention(x, x, x, sinks=sinks, backend="onnxruntime", kernel="node")
    assert np.allclose(found, attention(x, x, x, sinks=sinks), atol=1e-5)


def test_numbers_of_keys_follow_all_batch_axes():
    q, k, v = (numbers(2, 3, heads, n, 8) for heads, n in ((4, 2), (2, 7), (2, 7)))
    options = {"key_lengths": np.arange(3), "is_causal": True}
    found = attention(q, k, v, **options, backend="onnxruntime", kernel="node")
    np.testing.assert_allclose(found, attention(q, k, v, **options), atol=1e-5)
