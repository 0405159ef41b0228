"""Load models of three families, as transformers stores their weights and config.

A setting that `polyattn.nn` does not support is refused by name: a model is loaded correctly or not
at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyattn.arrays import Array
from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock, Stack
from polyattn.nn.layers import Embedding, FeedForward, Linear
from polyattn.nn.load.files import Weights, read_settings, read_weights
from polyattn.nn.load.rope import rotary
from polyattn.nn.load.settings import Settings
from polyattn.nn.load.stored import (
    block_names,
    fill,
    joined_linear,
    layer_norm,
    linear,
    renamed,
    rms_norm,
    vector,
)
from polyattn.nn.models import Transformer
from polyattn.nn.positions import LearnedPositions, Rotary

__all__ = ["bert", "gpt2", "llama"]


def bert(weights: Weights, config: Mapping[str, Any] | None = None, *, like: Array) -> Transformer:
    """Load a BERT.

    Parameters
    ----------
    weights : mapping of str to Array, or path
        A state dict of ``BertModel`` or of a model with a head, a ``.safetensors`` file, or a
        folder of ``save_pretrained``. The pooler and heads are left out.
    config : mapping, optional
        The content of ``config.json``, or ``config.to_dict()``; by default the file beside the
        weights.
    like : Array
        An array of the library, device and dtype of the parameters.

    Returns
    -------
    Transformer
        A model from token ids to the last hidden states. Padding needs a ``mask``, such as
        ``mask=attention_mask[:, None, None, :] == 1``.

    Raises
    ------
    ValueError
        If names or shapes do not fit, the config has an unsupported setting, or a file is damaged
        or names one outside its folder.
    FileNotFoundError, ImportError
        If there is no file, or safetensors is not installed to read it.

    References
    ----------
    .. [1] Devlin et al., "BERT", 2018, arXiv:1810.04805.
    """
    settings = read_settings("bert", weights, config)
    settings.only("position_embedding_type", "absolute")
    settings.only("is_decoder", False)
    size, heads = settings.sizes("hidden_size", "num_attention_heads")
    inner, tokens = settings.whole("intermediate_size"), settings.whole("vocab_size")
    epsilon = settings.number("layer_norm_eps", 1e-12)
    activation = settings.activation("hidden_act", "gelu")
    layers = settings.whole("num_hidden_layers")
    positions = settings.whole("max_position_embeddings", 512)
    kinds = settings.whole("type_vocab_size", 2)

    def block(name: str) -> EncoderBlock:
        maps = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        output = linear(f"{name}.attention.output.dense", size, size)
        fused = joined_linear(maps, size, [size, size, size])
        return EncoderBlock(
            MultiHeadAttention(None, None, None, output, heads, heads, size // heads, fused),
            FeedForward(
                linear(f"{name}.intermediate.dense", size, inner),
                linear(f"{name}.output.dense", inner, size),
                activation=activation,
            ),
            layer_norm(f"{name}.attention.output.LayerNorm", size, epsilon),
            layer_norm(f"{name}.output.LayerNorm", size, epsilon),
            pre_norm=False,
        )

    arrays = _base_weights(
        weights,
        prefix="bert.",
        skip=r"(pooler|cls|classifier|qa_outputs)\..*|embeddings\.(position|token_type)_ids",
        # The names in the first BERT's files.
        old={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
    )
    names = block_names(arrays, "encoder.layer.", layers, "num_hidden_layers")
    model = Transformer(
        Embedding(vector("embeddings.word_embeddings.weight", tokens, size)),
        Stack(tuple([block(name) for name in names])),
        LearnedPositions(vector("embeddings.position_embeddings.weight", positions, size)),
        Embedding(vector("embeddings.token_type_embeddings.weight", kinds, size)),
        layer_norm("embeddings.LayerNorm", size, epsilon),
    )
    return fill(model, arrays, like=like, origin="a BERT of this config")


def gpt2(
    weights: Weights,
    config: Mapping[str, Any] | None = None,
    *,
    like: Array,
    logits: bool = True,
) -> Transformer:
    """Load a GPT-2.

    Parameters
    ----------
    weights, config, like : mapping or path, mapping, Array
        As for `bert`; a state dict is one of ``GPT2Model`` or ``GPT2LMHeadModel``.
    logits : bool
        Whether the model returns logits, rather than the last hidden states.

    Returns
    -------
    Transformer
        A model from token ids to logits, to be called with ``is_causal=True``.

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        As for `bert`.

    References
    ----------
    .. [1] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    settings = read_settings("gpt2", weights, config)
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    settings.only("add_cross_attention", False)
    size, heads = settings.sizes("n_embd", "n_head")
    inner = settings.whole("n_inner", 4 * size)
    epsilon = settings.number("layer_norm_epsilon", 1e-5)
    activation = settings.activation("activation_function", "gelu_new")
    layers = settings.whole("n_layer")
    tokens, positions = settings.whole("vocab_size"), settings.whole("n_positions", 1024)
    output, tied = _output(settings, logits, size, tokens, tied=True)

    def conv(name: str, inputs: int, outputs: int) -> Linear:
        # GPT-2's Conv1D stores (inputs, outputs), like our Linear.
        return Linear(vector(f"{name}.weight", inputs, outputs), vector(f"{name}.bias", outputs))

    def block(name: str) -> EncoderBlock:
        output = conv(f"{name}.attn.c_proj", size, size)
        fused = conv(f"{name}.attn.c_attn", size, 3 * size)
        return EncoderBlock(
            MultiHeadAttention(None, None, None, output, heads, heads, size // heads, fused),
            FeedForward(
                conv(f"{name}.mlp.c_fc", size, inner),
                conv(f"{name}.mlp.c_proj", inner, size),
                activation=activation,
            ),
            layer_norm(f"{name}.ln_1", size, epsilon),
            layer_norm(f"{name}.ln_2", size, epsilon),
        )

    skip = r"h\.\d+\.attn\.(bias|masked_bias)|(score|multiple_choice_head)\..*"
    arrays = _base_weights(weights, prefix="transformer.", skip=skip)
    _drop_unused_head(arrays, output, "wte.weight", tied=tied)
    names = block_names(arrays, "h.", layers, "n_layer")
    model = Transformer(
        Embedding(vector("wte.weight", tokens, size)),
        Stack(tuple([block(name) for name in names]), layer_norm("ln_f", size, epsilon)),
        LearnedPositions(vector("wpe.weight", positions, size)),
        output=output,
        tied=tied,
    )
    return fill(model, arrays, like=like, origin="a GPT-2 of this config")


def llama(
    weights: Weights,
    config: Mapping[str, Any] | None = None,
    *,
    like: Array,
    logits: bool = True,
    length: int | None = None,
) -> Transformer:
    """Load a Llama.

    Parameters
    ----------
    weights, config, like : mapping or path, mapping, Array
        As for `bert`; a state dict is one of ``LlamaModel`` or ``LlamaForCausalLM``.
    logits : bool
        Whether the model returns logits, rather than the last hidden states.
    length : int, optional
        For dynamic scaling of rotary positions, the sequence length to scale to; by default the
        length that the model was trained on, for which nothing is scaled.

    Returns
    -------
    Transformer
        A model from token ids to logits, to be called with ``is_causal=True``.

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        As for `bert`.

    References
    ----------
    .. [1] Touvron et al., "LLaMA", 2023, arXiv:2302.13971.
    """
    settings = read_settings("llama", weights, config)
    size, heads = settings.sizes("hidden_size", "num_attention_heads", whole_heads=False)
    key_heads = settings.whole("num_key_value_heads", heads)
    if heads % key_heads:
        wanted = f"a divisor of num_attention_heads {heads}"
        raise settings.refusal("num_key_value_heads", wanted, key_heads)
    head_size = settings.whole("head_dim", size // heads)
    inner, tokens = settings.whole("intermediate_size"), settings.whole("vocab_size")
    epsilon = settings.number("rms_norm_eps", 1e-6)
    activation = settings.activation("hidden_act", "silu")
    biased, inner_biased = settings.flag("attention_bias"), settings.flag("mlp_bias")
    make_rotary = rotary(settings, head_size, length)
    layers = settings.whole("num_hidden_layers")
    output, tied = _output(settings, logits, size, tokens, tied=False)
    width, key_width = heads * head_size, key_heads * head_size

    def block(name: str) -> EncoderBlock:
        maps = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        output = linear(f"{name}.self_attn.o_proj", width, size, biased)
        fused = joined_linear(maps, size, [width, key_width, key_width], biased)
        return EncoderBlock(
            MultiHeadAttention(None, None, None, output, heads, key_heads, head_size, fused),
            FeedForward(
                linear(f"{name}.mlp.up_proj", size, inner, inner_biased),
                linear(f"{name}.mlp.down_proj", inner, size, inner_biased),
                linear(f"{name}.mlp.gate_proj", size, inner, inner_biased),
                activation,
            ),
            rms_norm(f"{name}.input_layernorm", size, epsilon),
            rms_norm(f"{name}.post_attention_layernorm", size, epsilon),
        )

    skip = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(score|qa_outputs)\..*"
    arrays = _base_weights(weights, prefix="model.", skip=skip)
    _drop_unused_head(arrays, output, "embed_tokens.weight", tied=tied)
    names = block_names(arrays, "layers.", layers, "num_hidden_layers")
    model = Transformer(
        Embedding(vector("embed_tokens.weight", tokens, size)),
        Stack(tuple([block(name) for name in names]), rms_norm("norm", size, epsilon)),
        output=output,
        tied=tied,
    )
    filled = fill(model, arrays, like=like, origin="a Llama of this config")
    return _with_rotary(filled, make_rotary())


def _base_weights(
    weights: Weights, *, prefix: str, skip: str, old: Mapping[str, str] | None = None
) -> dict[str, Array]:
    """Return the weights by their names in the base model, without buffers and other heads."""

    def name_of(name: str) -> str | None:
        name = name.removeprefix(prefix)
        for pattern, new in (old or {}).items():
            name = re.sub(pattern, new, name)
        return None if re.fullmatch(skip, name) else name

    return renamed(read_weights(weights), name_of)


def _with_rotary(model: Transformer, rotary: Rotary) -> Transformer:
    """Return a model whose attention has rotary positions."""
    blocks = [
        replace(block, attention=replace(block.attention, rotary=rotary))
        for block in model.stack.blocks
    ]
    return replace(model, stack=replace(model.stack, blocks=tuple(blocks)))


def _output(
    settings: Settings, logits: bool, size: int, tokens: int, *, tied: bool
) -> tuple[Linear | None, bool]:
    """Return the output map, and whether the embedding computes the logits instead."""
    if not logits:
        return None, False
    if settings.flag("tie_word_embeddings", tied):
        return None, True
    return linear("lm_head", size, tokens, bias=False), False


def _drop_unused_head(
    weights: dict[str, Array], output: Linear | None, embedding: str, *, tied: bool
) -> None:
    """Remove an output map that is not used, and check that tied weights are equal."""
    if output is not None or "lm_head.weight" not in weights:
        return
    head, known = weights.pop("lm_head.weight"), weights.get(embedding)
    if not tied or known is None or (head.shape == known.shape and bool((head == known).all())):
        return
    raise ValueError(
        f"config says that lm_head.weight and {embedding} are tied, but they are not equal; if they"
        ' are meant to differ, pass a config with "tie_word_embeddings": False'
    )
