"""Greedy generation, on NumPy or torch, against transformers, as ratios of alternating runs.

The model is a decoder of GPT-2's or Llama's family with random weights, 6 layers and a width of
384 by default, saved by transformers and read by ``nn.load``. Both continue the same prompt with a
cache, all tokens are compared, and a time is that of one token.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import script
from threadpoolctl import ThreadpoolController

import polyattn
from polyattn import nn
from polyattn.bench import timing

REFERENCE = "transformers"
TOKENS = 1000
FAMILIES = ("gpt2", "llama")
LIBRARIES = ("numpy", "torch")


def their_model(family: str, layers: int, size: int, length: int) -> Any:
    """Return a decoder of transformers with random weights, whose heads have 64 components."""
    import transformers

    if family == "gpt2":
        sizes = {"n_embd": size, "n_layer": layers, "n_head": size // 64, "n_positions": length}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=TOKENS, **sizes))
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=size,
        intermediate_size=4 * size,
        num_hidden_layers=layers,
        num_attention_heads=size // 64,
        max_position_embeddings=length,
    )
    return transformers.LlamaForCausalLM(config)


def contenders(options: Any) -> dict[str, Callable[[], Any]]:
    """Return the functions that continue the prompt, by name."""
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    length = options.prompt + options.steps
    theirs = their_model(options.family, options.layers, options.size, length).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        like = {"numpy": np.zeros(1, np.float32), "torch": torch.zeros(1)}[options.library]
        ours = nn.load.model(folder, like=like, logits=True)
    ids = np.random.default_rng(0).integers(0, TOKENS, (1, options.prompt))
    prompt = torch.from_numpy(ids)
    settings = {"max_new_tokens": options.steps, "min_new_tokens": options.steps, "pad_token_id": 0}

    def run_transformers() -> Any:
        with torch.inference_mode():
            return theirs.generate(prompt, do_sample=False, use_cache=True, **settings).numpy()

    def run_polyattn() -> Any:
        with torch.inference_mode():
            first = ids if options.library == "numpy" else prompt
            return np.asarray(nn.generate(ours, first, options.steps))

    return {REFERENCE: run_transformers, "polyattn": run_polyattn}


def main(arguments: list[str] | None = None) -> int:
    """Print the times and their ratios; return 1 if the tokens differ."""
    parser = script.parser(__doc__, 15)
    add = parser.add_argument
    add("--family", choices=FAMILIES, default="gpt2", help="(default: %(default)s)")
    add("--library", choices=LIBRARIES, default="numpy", help="of polyattn (default: %(default)s)")
    add("--layers", type=int, default=6, help="number of blocks (default: %(default)s)")
    add("--size", type=int, default=384, help="width, a multiple of 64 (default: %(default)s)")
    add("--prompt", type=int, default=32, help="tokens of the prompt (default: %(default)s)")
    add("--steps", type=int, default=64, help="tokens to add (default: %(default)s)")
    add("--threads", type=int, default=2, help="of each contender (default: %(default)s)")
    add(
        "--cpu-time",
        action="store_true",
        help="count processor time, for a busy machine; with one thread",
    )
    options = parser.parse_args(arguments)
    options.threads = 1 if options.cpu_time else options.threads
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(f"{script.machine(options.threads)}; {options.rounds} rounds")
    print(f"{options.family}, {options.layers} layers of {options.size}, {options.steps} tokens")
    calls = contenders(options)

    def measure(name: str) -> float:
        time.sleep(2 * timing.REST)
        return timing.window(calls[name], 1e-9, clock=clock) / options.steps

    threads = options.threads
    with ThreadpoolController().limit(limits=threads), polyattn.use_threads(threads):
        expected, *found = (call() for call in calls.values())
        if not all(np.array_equal(tokens, expected) for tokens in found):
            print("the tokens differ", file=sys.stderr)
            return 1
        *_, times = timing.rounds(calls, measure, options.rounds)
    for name, ratio in timing.ratios(times, REFERENCE).items():
        spread = timing.spread_of(times[name])
        print(
            f"{name:12} {statistics.median(times[name]) * 1e3:6.2f} ms a token"
            f" ({spread.low * 1e3:.2f} to {spread.high * 1e3:.2f}),"
            f" ratio {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
