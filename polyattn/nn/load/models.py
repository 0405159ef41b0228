"""Models of three families that transformers made common, from their weights and config.

What a config asks for that `polyattn.nn` does not do is refused by name: a model is loaded right or
not at all.
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
    fill,
    joined,
    layer_norm,
    linear,
    numbered,
    renamed,
    rms_norm,
    vector,
)
from polyattn.nn.models import Transformer
from polyattn.nn.positions import LearnedPositions, Rotary

__all__ = ["bert", "gpt2", "llama"]


def bert(weights: Weights, config: Mapping[str, Any] | None = None, *, like: Array) -> Transformer:
    """Make a model of the weights of a BERT.

    Parameters
    ----------
    weights : mapping of str to Array, or path
        A state dict of ``BertModel`` or of a model with a head, a ``.safetensors`` file, or a
        folder of ``save_pretrained``. The pooler and heads are left out.
    config : mapping, optional
        What its ``config.json`` says, or ``config.to_dict()``; by default the file beside the
        weights.
    like : Array
        An array of the library, device and dtype that the parameters are to have.

    Returns
    -------
    Transformer
        From token ids to the last hidden states. It knows no padding but by ``mask``, such as
        ``mask=attention_mask[:, None, None, :] == 1``.

    Raises
    ------
    ValueError
        If names or shapes do not fit, all of which are listed, the config asks for what there is
        not, or a file is damaged or names one outside its folder.
    FileNotFoundError, ImportError
        If there is no file, or safetensors is not installed to read it.

    See Also
    --------
    gpt2, llama : Models that write.

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
        one = joined(maps, size, [size, size, size])
        return EncoderBlock(
            MultiHeadAttention(None, None, None, output, heads, heads, size // heads, one),
            FeedForward(
                linear(f"{name}.intermediate.dense", size, inner),
                linear(f"{name}.output.dense", inner, size),
                activation=activation,
            ),
            layer_norm(f"{name}.attention.output.LayerNorm", size, epsilon),
            layer_norm(f"{name}.output.LayerNorm", size, epsilon),
            pre_norm=False,
        )

    own = _own(
        read_weights(weights),
        prefix="bert.",
        left_out=r"(pooler|cls|classifier|qa_outputs)\..*|embeddings\.(position|token_type)_ids",
        # As the first BERT's files name them.
        old={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
    )
    names = numbered(own, "encoder.layer.", layers, "num_hidden_layers")
    model = Transformer(
        Embedding(vector("embeddings.word_embeddings.weight", tokens, size)),
        Stack(tuple([block(name) for name in names])),
        LearnedPositions(vector("embeddings.position_embeddings.weight", positions, size)),
        Embedding(vector("embeddings.token_type_embeddings.weight", kinds, size)),
        layer_norm("embeddings.LayerNorm", size, epsilon),
    )
    return fill(model, own, like=like, origin="a BERT of this config")


def gpt2(
    weights: Weights,
    config: Mapping[str, Any] | None = None,
    *,
    like: Array,
    logits: bool = True,
) -> Transformer:
    """Make a model of the weights of a GPT-2.

    Parameters
    ----------
    weights : mapping of str to Array, or path
        A state dict of ``GPT2Model`` or ``GPT2LMHeadModel``, a ``.safetensors`` file, or a folder
        of ``save_pretrained``.
    config : mapping, optional
        As of `bert`.
    like : Array
        An array of the library, device and dtype that the parameters are to have.
    logits : bool
        Whether the model gives logits, rather than the last hidden states.

    Returns
    -------
    Transformer
        From token ids to logits, to be called with ``is_causal=True``.

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        As of `bert`.

    See Also
    --------
    llama : A later family.

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
        # Its Conv1D stores (inputs, outputs), as Linear here.
        return Linear(vector(f"{name}.weight", inputs, outputs), vector(f"{name}.bias", outputs))

    def block(name: str) -> EncoderBlock:
        output = conv(f"{name}.attn.c_proj", size, size)
        one = conv(f"{name}.attn.c_attn", size, 3 * size)
        return EncoderBlock(
            MultiHeadAttention(None, None, None, output, heads, heads, size // heads, one),
            FeedForward(
                conv(f"{name}.mlp.c_fc", size, inner),
                conv(f"{name}.mlp.c_proj", inner, size),
                activation=activation,
            ),
            layer_norm(f"{name}.ln_1", size, epsilon),
            layer_norm(f"{name}.ln_2", size, epsilon),
        )

    own = _own(
        read_weights(weights),
        prefix="transformer.",
        left_out=r"h\.\d+\.attn\.(bias|masked_bias)|(score|multiple_choice_head)\..*",
    )
    own = _without_idle_output(own, output, "wte.weight", tied=tied)
    names = numbered(own, "h.", layers, "n_layer")
    model = Transformer(
        Embedding(vector("wte.weight", tokens, size)),
        Stack(tuple([block(name) for name in names]), layer_norm("ln_f", size, epsilon)),
        LearnedPositions(vector("wpe.weight", positions, size)),
        output=output,
        tied=tied,
    )
    return fill(model, own, like=like, origin="a GPT-2 of this config")


def llama(
    weights: Weights,
    config: Mapping[str, Any] | None = None,
    *,
    like: Array,
    logits: bool = True,
    length: int | None = None,
) -> Transformer:
    """Make a model of the weights of a Llama.

    Parameters
    ----------
    weights : mapping of str to Array, or path
        A state dict of ``LlamaModel`` or ``LlamaForCausalLM``, a ``.safetensors`` file, or a folder
        of ``save_pretrained``.
    config : mapping, optional
        As of `bert`.
    like : Array
        An array of the library, device and dtype that the parameters are to have.
    logits : bool
        Whether the model gives logits, rather than the last hidden states.
    length : int, optional
        For dynamic scaling of rotary positions, the length that the frequencies are to be those of;
        by default the length that the model was trained on, up to which it scales nothing.

    Returns
    -------
    Transformer
        From token ids to logits, to be called with ``is_causal=True``.

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        As of `bert`.

    See Also
    --------
    gpt2 : An earlier family.

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
        one = joined(maps, size, [width, key_width, key_width], biased)
        return EncoderBlock(
            MultiHeadAttention(None, None, None, output, heads, key_heads, head_size, one),
            FeedForward(
                linear(f"{name}.mlp.up_proj", size, inner, inner_biased),
                linear(f"{name}.mlp.down_proj", inner, size, inner_biased),
                linear(f"{name}.mlp.gate_proj", size, inner, inner_biased),
                activation,
            ),
            rms_norm(f"{name}.input_layernorm", size, epsilon),
            rms_norm(f"{name}.post_attention_layernorm", size, epsilon),
        )

    own = _own(
        read_weights(weights),
        prefix="model.",
        left_out=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(score|qa_outputs)\..*",
    )
    own = _without_idle_output(own, output, "embed_tokens.weight", tied=tied)
    names = numbered(own, "layers.", layers, "num_hidden_layers")
    model = Transformer(
        Embedding(vector("embed_tokens.weight", tokens, size)),
        Stack(tuple([block(name) for name in names]), rms_norm("norm", size, epsilon)),
        output=output,
        tied=tied,
    )
    filled = fill(model, own, like=like, origin="a Llama of this config")
    return _turned(filled, make_rotary())


def _own(
    weights: Mapping[str, Array],
    *,
    prefix: str,
    left_out: str,
    old: Mapping[str, str] | None = None,
) -> dict[str, Array]:
    """Return the weights by the base model's own names, without buffers and other heads."""

    def name_of(name: str) -> str | None:
        name = name.removeprefix(prefix)
        for pattern, new in (old or {}).items():
            name = re.sub(pattern, new, name)
        return None if re.fullmatch(left_out, name) else name

    return renamed(weights, name_of)


def _turned(model: Transformer, turn: Rotary) -> Transformer:
    """Return a model whose attention has rotary positions."""
    blocks = [
        replace(block, attention=replace(block.attention, rotary=turn))
        for block in model.stack.blocks
    ]
    return replace(model, stack=replace(model.stack, blocks=tuple(blocks)))


def _output(
    settings: Settings, logits: bool, size: int, tokens: int, *, tied: bool
) -> tuple[Linear | None, bool]:
    """Return the output map and whether the embedding takes its place."""
    if not logits:
        return None, False
    if settings.flag("tie_word_embeddings", tied):
        return None, True
    return linear("lm_head", size, tokens, bias=False), False


def _without_idle_output(
    weights: dict[str, Array], output: Linear | None, embedding: str, *, tied: bool
) -> dict[str, Array]:
    """Leave out an output map that is not asked for, or that the embedding is said to be."""
    if output is not None or "lm_head.weight" not in weights:
        return weights
    head = weights.pop("lm_head.weight")
    known = weights.get(embedding)
    if (
        tied
        and known is not None
        and not (head.shape == known.shape and bool((head == known).all()))
    ):
        raise ValueError(
            f"config says that lm_head.weight and {embedding} are tied, and they are not equal;"
            ' if they are meant to differ, pass a config with "tie_word_embeddings": False'
        )
    return weights
