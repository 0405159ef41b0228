"""Greedy generation, on NumPy or torch, against transformers, as ratios of alternating runs.

The model is a decoder of GPT-2's or Llama's family with random weights, 6 layers and a width of
384 by default, saved by transformers and read by ``nn.load``. Both continue the same prompt with a
cache, all tokens are compared, and a time is that of one token.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import numpy as np
import script
from threadpoolctl import ThreadpoolController

from polyattn import nn
from polyattn.bench import timing

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


def contenders(options: Any) -> dict[str, script.Call]:
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

    return {"transformers": run_transformers, "polyattn": run_polyattn}


def main(arguments: list[str] | None = None) -> int:
    """Print the times and their ratios; return 1 if the tokens differ."""
    flags = ("quick", "threads", "json", "cpu-time")
    slow = {"window": script.ONE_CALL, "rest": 2 * timing.REST}
    parser = script.parser(__doc__, 15, *flags, threads=2, **slow)
    add = parser.add_argument
    add("--family", choices=FAMILIES, default="gpt2", help="(default: %(default)s)")
    add("--library", choices=LIBRARIES, default="numpy", help="of polyattn (default: %(default)s)")
    add("--layers", type=int, default=6, help="number of blocks (default: %(default)s)")
    add("--size", type=int, default=384, help="width, a multiple of 64 (default: %(default)s)")
    add("--prompt", type=int, default=32, help="tokens of the prompt (default: %(default)s)")
    add("--steps", type=int, default=64, help="tokens to add (default: %(default)s)")
    options = script.read(parser, arguments)
    if options.quick:
        options.layers, options.size, options.steps = 1, 64, 4
    title = f"{options.family}, {options.layers} layers of {options.size}, {options.steps} tokens"
    with (
        script.measuring(options) as show,
        ThreadpoolController().limit(limits=options.threads),
    ):
        print(f"{title}; times of a token")
        rows = script.compare(contenders(options), options, differ, parts=options.steps)
        if any(row.error for row in rows):
            print("the tokens differ", file=sys.stderr)
            return 1
        show(title, rows, "", detail=quartiles)
    return 0


def differ(tokens: Any, expected: Any) -> float:
    """Return the number of tokens that differ."""
    return float(np.sum(tokens != expected))


def quartiles(row: script.Row) -> str:
    """Return the quartiles of the times."""
    _, low, high = timing.spread_of(row.times)
    return f" ({low * 1e3:.2f} to {high * 1e3:.2f})"


if __name__ == "__main__":
    sys.exit(main())
