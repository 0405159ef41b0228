"""The example `examples/train` learns, alike in all libraries, and writes by its cache."""

import functools
import importlib.util
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "train"


def load():
    """Load the script by its path, as Python runs it."""
    spec = importlib.util.spec_from_file_location("train_script", FOLDER / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for the annotations of its classes
    spec.loader.exec_module(module)
    return module


script = load()
learners, text = sys.modules["train.learners"], sys.modules["train.text"]
writing = sys.modules["train.writing"]
JAX = pytest.param("jax", marks=pytest.mark.slow)  # which compiles for long
LIBRARIES = ["torch", JAX]
STEPS = 12


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    return request.param


@pytest.fixture(scope="module")
def whole():
    return text.read()


@pytest.fixture(scope="module")
def trained(whole):
    """A learner of a library after a few steps, with its losses."""

    @functools.cache
    def train(library):
        judged = text.windows(whole.held_out, learners.CONTEXT)[:16]
        learner = learners.LEARNERS[library](len(whole.letters))
        drawn = text.batches(whole.training, learners.CONTEXT, 4, seed=1)
        before = learner.loss(judged)
        losses = [learner.step(next(drawn), 4e-3) for _ in range(STEPS)]
        return learner, losses, (before, learner.loss(judged))

    return train


# ---- the text ----


def test_the_text_is_of_the_size_and_letters_that_the_page_states(whole):
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    number = len(whole.training) + len(whole.held_out)
    assert f"{number:,} letters" in page
    assert f"{len(whole.letters)} different ones" in page
    assert 100_000 < text.FILE.stat().st_size == number < 500_000


def test_what_is_held_out_is_never_trained_on(whole):
    assert 0.03 < len(whole.held_out) / len(whole.training) < 0.05
    letters = "".join(whole.letters[n] for n in np.concatenate([whole.training, whole.held_out]))
    assert letters == text.FILE.read_text(encoding="ascii")
    last = max(int(window.max()) for window in batches_of_places(len(whole.training)))
    assert last < len(whole.training)


def batches_of_places(length):
    """Batches whose letters are their own places in the text."""
    return itertools.islice(text.batches(np.arange(length), 64, 512, seed=0), 200)


def test_batches_are_windows_from_anywhere_and_the_seed_draws_them():
    for batch in itertools.islice(batches_of_places(1000), 3):
        assert batch.shape == (512, 65)
        assert (np.diff(batch) == 1).all()
    starts = {int(start) for batch in batches_of_places(1000) for start in batch[:, 0]}
    assert starts == set(range(1000 - 64))
    again = [next(text.batches(np.arange(1000), 64, 5, seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(again[0], again[1])
    assert (again[0] != again[2]).any()


# ---- learning ----


@pytest.mark.slow
def test_the_loss_falls(library, trained, whole):
    _, losses, (before, after) = trained(library)
    # At first all letters are about as likely as each other.
    assert before == pytest.approx(math.log(len(whole.letters)), abs=1)
    assert after < before - 0.5
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_libraries_begin_and_learn_alike(trained):
    one, other = trained("torch"), trained("jax")
    assert one[1][0] == pytest.approx(other[1][0], rel=1e-6)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-4)
    np.testing.assert_allclose(one[2], other[2], rtol=1e-4)


def test_the_loss_is_the_cross_entropy_of_the_logits(library, trained, whole):
    learner = trained(library)[0]
    window = text.windows(whole.held_out, learners.CONTEXT)[0]
    logits = learner.logits(window[:-1]).astype("float64")
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -logarithms[np.arange(learners.CONTEXT), window[1:]].mean()
    assert learner.loss(window[None]) == pytest.approx(expected, rel=1e-5)


# ---- writing ----


@pytest.mark.slow
def test_what_is_written_by_the_cache_is_what_full_passes_write(library, trained, whole):
    learner, prompt, number = trained(library)[0], "ORLANDO.\nI", learners.CONTEXT + 10
    written = prompt + "".join(writing.write(learner, whole, prompt, number, 0, 0))
    assert len(written) == len(prompt) + number
    # One full pass over the text says at each of its places what the likeliest letter is.
    logits = learner.logits(whole.encode(written))
    full = [whole.letters[n] for n in logits[len(prompt) - 1 : -1].argmax(-1)]
    assert "".join(full) == written[len(prompt) :]
    decode = learner.decoder(len(written))
    ids = whole.encode(written)
    steps = [decode(ids[: len(prompt)]), *(decode(ids[[n]]) for n in range(len(prompt), len(ids)))]
    np.testing.assert_allclose(np.stack(steps), logits[len(prompt) - 1 :], atol=1e-4)


def test_the_seed_and_the_temperature_draw_the_letters():
    logits = np.log(np.asarray([0.7, 0.2, 0.1]))
    random = np.random.default_rng(0)
    for temperature in (1, 0.5):
        found = [writing.sample(logits, temperature, random) for _ in range(4000)]
        shares = np.exp(logits / temperature)
        expected = shares / shares.sum()
        np.testing.assert_allclose(np.bincount(found, minlength=3) / 4000, expected, atol=0.03)
    assert writing.sample(logits, 0, random) == 0


# ---- the program ----


@pytest.mark.slow
def test_the_program_trains_draws_and_writes(library, tmp_path, capsys):
    file = tmp_path / "loss.png"
    options = ["--library", library, "--steps", "2", "--generate", "20", "--plot", str(file)]
    assert script.main([*options, "--target", "9", "--prompt", "DUKE."]) == 0
    printed = capsys.readouterr()
    assert "after 2 steps: the target of 9 is reached" in printed.out
    written = printed.out.partition("\n\n")[2]
    assert written.startswith("DUKE.")
    assert len(written) == len("DUKE.") + 20 + 1
    assert "100%" in printed.err
    assert "held-out" in printed.err
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", "naïve"], "has no 'ï'"),
        (["--prompt", ""], "at least one letter"),
        (["--steps", "0"], "--steps must be at least 1; got 0"),
        (["--minutes", "-1"], "--minutes must be at least 0; got -1"),
        (["--plot", "nowhere/loss.png"], "there is no folder nowhere"),
        (["--library", "cupy"], "invalid choice: 'cupy'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(options, says, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(options)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_the_page_states_the_target_and_the_model():
    page = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    assert f"target is {script.TARGET}" in page
    learner = learners.gpt(75, np.zeros(1, "float32"))
    number = sum(array.size for array in learner.parameters().values())
    assert f"{number:,} parameters" in page
