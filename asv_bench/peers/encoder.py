"""A whole encoder on NumPy against transformers on torch, as ratios of alternating runs.

The model is all-MiniLM-L6-v2 with its published weights, the batch 32 English sentences of mixed
length, and the result an embedding of each. transformers gets them padded to the longest; the
encoder of ``examples/minilm`` packs them, and is timed on padded ones as well. All use the same
number of threads.

``make bench-minilm`` prints the times.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import script
from threadpoolctl import ThreadpoolController

import polyattn
from polyattn import nn
from polyattn.bench import timing

REFERENCE = "transformers"
SENTENCES = Path(__file__).with_name("sentences.txt")


def contenders(threads: int) -> dict[str, Callable[[], Any]]:
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
        REFERENCE: run_transformers,
        "polyattn": lambda: packed.embed(ids, keep),
        "polyattn, padded": lambda: means(model(ids, mask=keep[:, None, None, :])),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the times and their ratios."""
    parser = script.parser(__doc__, 15)
    parser.add_argument("--threads", type=int, default=0, help="of each contender (default: all)")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count processor time, for a busy machine; with one thread",
    )
    options = parser.parse_args(arguments)
    threads = 1 if options.cpu_time else options.threads or script.all_threads()
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(f"{script.machine(threads)}; {options.rounds} rounds")
    calls = contenders(threads)

    def measure(name: str) -> float:
        time.sleep(2 * timing.REST)
        return timing.window(calls[name], 1e-9, clock=clock)  # one call, after one to warm up

    with ThreadpoolController().limit(limits=threads), polyattn.use_threads(threads):
        *_, times = timing.rounds(calls, measure, options.rounds)
    for name, ratio in timing.ratios(times, REFERENCE).items():
        print(
            f"{name:16} {statistics.median(times[name]) * 1e3:6.1f} ms,"
            f" best {min(times[name]) * 1e3:6.1f} ms,"
            f" ratio {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
