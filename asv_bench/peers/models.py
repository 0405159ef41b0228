"""Whole models against transformers on torch, as ratios of alternating runs.

``make bench-minilm`` prints the times of an encoder: all-MiniLM-L6-v2 with its published weights
embeds 32 English sentences of mixed length. transformers gets them padded to the longest; the
encoder of ``examples/minilm`` packs them, and is timed on padded ones as well.

``python asv_bench/peers/models.py gpt2`` prints those of greedy generation, by a decoder of GPT-2's
or Llama's family with random weights. Both continue the same prompt with a cache, all tokens are
compared, and a time is that of one token.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import script
from threadpoolctl import ThreadpoolController

from polyattn import nn
from polyattn.bench import timing

SENTENCES = Path(__file__).with_name("sentences.txt")
TOKENS = 1000
PROMPT = 32  # tokens


def quiet_transformers() -> Any:
    """Return transformers, which neither asks its hub nor draws bars."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def encoders(options: script.Options) -> dict[str, script.Call]:
    """Return the calls that embed the batch, by name."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import torch
    from minilm import encoder, weights

    torch.set_num_threads(options.threads)
    folder = weights.find_model()
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    ids, keep = weights.tokenize(weights.load_tokenizer(folder), sentences)
    model = nn.load.model(folder, like=np.zeros(1, dtype=np.float32))
    packed = encoder.Encoder(model)
    made = quiet_transformers().BertModel.from_pretrained(folder, dtype=torch.float32)
    theirs = made.eval()
    mask = torch.from_numpy(keep.astype(np.int64))
    batch = {"input_ids": torch.from_numpy(ids), "attention_mask": mask}

    def run_transformers() -> Any:
        with torch.inference_mode():
            return means(theirs(**batch).last_hidden_state.numpy())

    def means(tokens: Any) -> Any:
        total = np.where(keep[..., None], tokens, 0).sum(axis=-2)
        return total / np.linalg.norm(total, axis=-1, keepdims=True)

    return {
        "transformers": run_transformers,
        "polyattn": lambda: packed.embed(ids, keep),
        "polyattn, padded": lambda: means(model(ids, mask=keep[:, None, None, :])),
    }


def decoder(family: str, layers: int, size: int, length: int) -> Any:
    """Return a decoder of transformers with random weights, whose heads have 64 components."""
    transformers = quiet_transformers()
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


def generators(options: script.Options) -> dict[str, script.Call]:
    """Return the functions that continue the prompt, by name."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    length = PROMPT + options.steps
    theirs = decoder(options.model, options.layers, options.size, length).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        like = {"numpy": np.zeros(1, np.float32), "torch": torch.zeros(1)}[options.library]
        ours = nn.load.model(folder, like=like, logits=True)
    ids = np.random.default_rng(0).integers(0, TOKENS, (1, PROMPT))
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
    """Print the times and their ratios; the error of a decoder is the number of other tokens."""
    slow = {"window": script.ONE_CALL, "rest": 2 * timing.REST}
    parser = script.parser(__doc__ or "", 15, "quick", "threads", "json", "cpu-time", **slow)
    add = parser.add_argument
    add("model", nargs="?", default="minilm", choices=("minilm", "gpt2", "llama"))
    add("--library", choices=("numpy", "torch"), default="numpy", help="of a decoder of polyattn")
    add("--layers", type=int, default=6, help="of a decoder (default: %(default)s)")
    add("--size", type=int, default=384, help="its width, a multiple of 64 (default: %(default)s)")
    add("--steps", type=int, default=64, help="tokens to add (default: %(default)s)")
    options = script.read(parser, arguments)
    is_encoder = options.model == "minilm"
    parts, title = 1, "32 sentences"
    if not is_encoder:
        parts, title = options.steps, f"{options.model}, {options.layers} layers, a token"
    calls = encoders(options) if is_encoder else generators(options)
    error = script.difference if is_encoder else lambda one, other: float(np.sum(one != other))
    limit = ThreadpoolController().limit(limits=options.threads)
    with script.measuring(options) as show, limit:
        results = script.compare(calls, options, error, parts=parts)
        show(title, results)
    return 0 if is_encoder else any(one.error for one in results)


if __name__ == "__main__":
    sys.exit(main())
