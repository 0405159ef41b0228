"""A whole encoder on NumPy against transformers on torch, as ratios of alternating runs.

The model is all-MiniLM-L6-v2 with its published weights, the batch 32 English sentences of mixed
length, and the result an embedding of each. transformers gets them padded to the longest; the
encoder of ``examples/minilm`` packs them, and is timed on padded ones as well. All use the same
number of threads.

``make bench-minilm`` prints the times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import script
from threadpoolctl import ThreadpoolController

from polyattn import nn
from polyattn.bench import timing

SENTENCES = Path(__file__).with_name("sentences.txt")


def contenders(threads: int) -> dict[str, script.Call]:
    """Return the calls that embed the batch, by name."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import torch
    import transformers
    from minilm import encoder, weights

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = weights.find_model()
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    ids, keep = weights.tokenize(weights.load_tokenizer(folder), sentences)
    model = nn.load.model(folder, like=np.zeros(1, dtype=np.float32))
    packed = encoder.Encoder(model)
    theirs = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(keep.astype(np.int64)),
    }

    def run_transformers() -> Any:
        with torch.inference_mode():
            tokens = theirs(**batch).last_hidden_state.numpy()
        return means(tokens)

    def means(tokens: Any) -> Any:
        total = np.where(keep[..., None], tokens, 0).sum(axis=-2)
        return total / np.linalg.norm(total, axis=-1, keepdims=True)

    return {
        "transformers": run_transformers,
        "polyattn": lambda: packed.embed(ids, keep),
        "polyattn, padded": lambda: means(model(ids, mask=keep[:, None, None, :])),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the times and their ratios."""
    flags = ("quick", "threads", "json", "cpu-time")
    slow = {"window": script.ONE_CALL, "rest": 2 * timing.REST}
    parser = script.parser(__doc__, 15, *flags, **slow)
    options = script.read(parser, arguments)
    with (
        script.measuring(options) as show,
        ThreadpoolController().limit(limits=options.threads),
    ):
        rows = script.compare(contenders(options.threads), options, script.difference)
        show("32 sentences", rows, "", detail=lambda row: f", best {min(row.times) * 1e3:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
