"""Texts of a batch that grows and shrinks are what each is by itself, and share pages."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tiny_models import library

from polyattn import nn

FILE = Path(__file__).resolve().parents[2] / "examples" / "serving" / "batching.py"


@pytest.fixture(scope="module")
def batching():
    spec = importlib.util.spec_from_file_location("batching", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_each_text_is_what_it_is_by_itself(batching, kind):
    to, _ = library(kind)

    def model(like):
        shared = {"like": like, "is_causal": True, "rotary": nn.Rotary(8)}
        return nn.Transformer.init(50, 32, 4, 2, **shared, seed=1)

    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 21).tolist()
    texts = [
        batching.Text(rng.integers(0, 50, n).tolist(), steps)
        for n, steps in ((3, 4), (1, 9), (9, 2), (2, 7), (5, 1), (1, 8))
    ]
    server = batching.Server(
        model(to(np.zeros(1, np.float32))), prompt, most=3, to=lambda x: to(np.asarray(x)), page=4
    )
    server.waiting.extend(texts)
    sizes, ended = [], []
    while server.waiting or any(server.running):
        ended += server.step()
        sizes.append(len(server.running))
        assert server.pages() <= 6 + 3 * 4  # those of the prompt once, and of three texts
    assert (max(sizes), sizes[-1]) == (3, 1)
    assert len(ended) == 6
    like = model(np.zeros(1, np.float32))
    for text in texts:
        whole = np.asarray(prompt + text.question)
        assert nn.generate(like, whole, text.steps)[len(whole) :].tolist() == text.answer


def test_the_program_says_how_the_batch_grows_and_shrinks(batching, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["batching.py"])
    batching.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 texts in ")
    assert sum(int(line.split()[-2]) for line in lines) == 10
