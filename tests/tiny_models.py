"""Tiny models of transformers, one or more of each family, and the libraries to run them on."""

import numpy as np
import pytest
from arrays import from_torch, to_torch
from optional import array_api_strict, far, near

from polyattn import nn

FLOAT32 = np.zeros(1, dtype=np.float32)
IDS = np.random.default_rng(3).integers(3, 50, (2, 13)).astype(np.int32)
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
GEMMA = SIZES | {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5}
ROPE = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 5e4, "original_max_position_embeddings": 32,
}  # fmt: skip
#: Settings of tiny models, by family and what is special in them.
DECODERS = {
    "gpt2": {
        "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt2 untied": {
        "vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16,
        "n_inner": 20, "tie_word_embeddings": False,
    },
    "llama with biases, tied": SIZES
    | {
        "head_dim": 12, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2,
    },
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 4},
    "mistral without a window": SIZES | {"sliding_window": None, "head_dim": 12},
    "qwen2": SIZES,
    "qwen2 with windows": SIZES
    | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": SIZES | {"head_dim": 12, "rope_parameters": ROPE},
    "phi3": SIZES,
    "phi3 rotated in part": SIZES | {"partial_rotary_factor": 0.5, "sliding_window": 6},
    "gemma2": GEMMA,
    "gemma2 without softcaps": GEMMA
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    "gemma3_text": GEMMA
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma3_text with a softcap": GEMMA | {"final_logit_softcapping": 1.5},
    "olmo2": SIZES,
    "smollm3": SIZES | {"no_rope_layer_interval": 2},
    "smollm3 with windows": SIZES
    | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 4},
}  # fmt: skip
#: One of each family.
FAMILIES = [name for name in DECODERS if " " not in name]
ENCODERS = {
    "bert": SIZES,
    "roberta": SIZES | {"pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": SIZES | {"pad_token_id": 2},
    "distilbert": {
        "vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
        "max_position_embeddings": 32, "sinusoidal_pos_embds": True,
    },
    "mpnet": SIZES,
    "modernbert": SIZES | {"local_attention": 8},
    "modernbert with biases": SIZES
    | {
        "local_attention": 4, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip

#: Encoders of images and sound.
SENSES = {
    "vit": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "image_size": 12, "patch_size": 4,
    },
    "whisper": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_source_positions": 10, "vocab_size": 50, "num_mel_bins": 6, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
}  # fmt: skip


#: How NumPy arrays go to a library and come back.
LIBRARIES = {
    "numpy": (np.asarray, np.asarray),
    "torch": (to_torch, lambda x: from_torch(x.detach())),
    "torch on a device": (
        lambda x: far(to_torch(x)),
        lambda x: from_torch(near(x.detach())),
    ),
    "jax": (lambda x: pytest.importorskip("jax.numpy").asarray(x), np.asarray),
    "strict": (array_api_strict.asarray, np.asarray),
}


def library(name):
    """Return how NumPy arrays go to a library and come back."""
    return LIBRARIES[name]


def loaded(theirs, like=FLOAT32, changes=(), **options):
    """Return a model of the weights and the config of another, with changes to the config."""
    config = theirs.config.to_dict() | dict(changes)
    return nn.load.model(theirs.state_dict(), config, like=like, **options)


def refused(weights, config=None):
    """Return what is said of a model, or None if it is loaded."""
    try:
        nn.load.model(weights, config, like=FLOAT32)
    except ValueError as error:
        return str(error)
    return None
