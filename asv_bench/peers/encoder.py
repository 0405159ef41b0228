"""A whole encoder on NumPy against transformers on torch, as ratios of alternating runs.

The model is all-MiniLM-L6-v2 with its published weights, the batch 32 English sentences of mixed
length, and the result an embedding of each. transformers takes them padded to the longest; the
encoder of ``examples/minilm`` packs them, and is timed on padded ones as well. Each round runs all
in turn and then in reverse, after a rest in which threads that spin for more work give up; a ratio
is the median over the rounds. All may use the same number of threads.

``make bench-minilm`` prints the figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

import polyattn
from polyattn import nn
from polyattn.bench.machine import processor, versions

# Seconds between two contenders: OpenBLAS's threads spin for more work for a tenth of one.
REST = 0.2

SENTENCES = """
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of \
foolishness.
Call me Ishmael.
All happy families are alike; each unhappy family is unhappy in its own way.
The sky above the harbour was grey all morning.
She closed the door quietly and walked down the stairs without looking back.
A train left the station.
Water boils at a lower temperature on a mountain, because the air presses less on it there.
He had gone many days now without taking a fish.
The committee will meet on Thursday to discuss the budget for the coming year and to elect a new \
treasurer.
Do you take milk?
In the beginning the room was empty, and then, one after another, the guests came in from the \
rain, shook their coats, and sat down near the fire to wait for the host.
Bees see ultraviolet light, which shows them patterns on petals that we cannot see.
The cat drank the milk because it was sweet.
The cat drank the milk because it was hungry.
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be \
in want of a wife.
Prices rose by three per cent last month.
Please send the signed form back before the end of the week.
The old bridge was closed after the flood, and traffic was led through the village for nearly two \
years.
Nobody knew why the lighthouse had gone dark.
A sonnet has fourteen lines.
The patient was given a small dose twice a day, and the fever went down within a week.
My grandmother kept her recipes in a tin box, written on cards in a hand that only she could read.
Snow fell on the fields.
The engine failed over the sea, but the pilot brought the plane down safely on a beach.
Copper conducts electricity better than iron does.
We walked along the river until the path ended at a fence, and then we turned round and walked \
back the way we had come.
The exhibition opens in the spring.
If the temperature of the reactor rises above the limit, the valves open by themselves and the \
operators are warned by a bell.
Good morning!
The library holds some forty thousand maps, of which the oldest shows the coast as sailors thought \
of it six hundred years ago.
His answer surprised everyone at the table.
The museum is free on Sundays.
""".strip().splitlines()


def contenders() -> tuple[dict[str, Callable[[], Any]], Any]:
    """Return what makes the batch's embeddings, by name, and which tokens are no padding."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import torch
    import transformers
    from minilm import encoder, weights

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = weights.find_model()
    ids, keep = weights.tokenize(weights.load_tokenizer(folder), SENTENCES)
    model = nn.load.bert(folder, like=np.zeros(1, dtype=np.float32))
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
    }, keep


def measure(threads: int, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds that each contender took in each round."""
    import torch

    running, _ = contenders()
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    order = list(running)
    with ThreadpoolController().limit(limits=threads), polyattn.use_threads(threads):
        for _ in range(rounds):
            order.reverse()
            for name in order:
                time.sleep(REST)
                running[name]()
                start = clock()
                running[name]()
                seconds[name].append(clock() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], name: str = "polyattn") -> list[float]:
    """Return a contender's time over that of transformers, round by round, sorted."""
    pairs = zip(seconds[name], seconds["transformers"], strict=True)
    return sorted(ours / theirs for ours, theirs in pairs)


def main(arguments: list[str] | None = None) -> int:
    """Print the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds (default: 15)")
    parser.add_argument("--threads", type=int, default=0, help="of either (default: all)")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the processor's time, for a machine that is busy; with one thread",
    )
    options = parser.parse_args(arguments)
    threads = 1 if options.cpu_time else options.threads or len(os.sched_getaffinity(0))
    print(f"{processor()}; {threads} threads each; {versions()}; float32; {options.rounds} rounds")
    clock = time.process_time if options.cpu_time else time.perf_counter
    seconds = measure(threads, options.rounds, clock)
    for name, own in seconds.items():
        found = ratios(seconds, name)
        quarter = len(found) // 4
        spread = f"{found[quarter]:.2f} to {found[-1 - quarter]:.2f}"
        print(
            f"{name:16} {statistics.median(own) * 1e3:6.1f} ms, best {min(own) * 1e3:6.1f} ms,"
            f" ratio {statistics.median(found):.2f} ({spread})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
