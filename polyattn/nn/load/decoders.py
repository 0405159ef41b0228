"""Plan decoders: GPT-2, and Llama with what other families add to it, one row for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock, Stack
from polyattn.nn.layers import Embedding, FeedForward, Linear, RMSNorm
from polyattn.nn.load.model_plan import Blocks, Family, ModelPlan, Wanted, output_map
from polyattn.nn.load.rope import rotary
from polyattn.nn.load.settings import FULL, SLIDING, Settings
from polyattn.nn.load.stored import joined_linear, layer_norm, linear, part_linear, rms_norm, vector
from polyattn.nn.models import Transformer
from polyattn.nn.positions import LearnedPositions, Rotary

#: The norms before and after attention, and before and after the feed-forward layer.
Norms = tuple[str | None, str | None, str | None, str | None]


#: Makes from settings whether block n has something.
Which = Callable[[Settings], Callable[[int], bool]]


@dataclass(frozen=True)
class Decoder:
    """The differences of a family from Llama's decoder; a bias given as a string is a setting."""

    title: str  # with an article
    query_bias: bool | str = "attention_bias"  # whether maps to queries, keys and values have it
    output_bias: bool | str = "attention_bias"  # of the map from the heads
    inner_bias: bool | str = False  # of the feed-forward layer
    #: Whether one stored map has queries, keys and values, and one the gate and the inner map.
    joined: bool = False
    #: Whether queries and keys are normalised: "each" head, "all" heads at once, or not.
    head_norms: str = ""
    #: The names in a block.
    norms: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
    norm_offset: float = 0.0  # added to the weights of the norms
    activation: str = "hidden_act"  # the setting of it
    #: Whether block n of a config without ``layer_types`` has the window of ``sliding_window``.
    window: Which | None = None
    turns: Which | None = None  # whether block n has rotary positions
    #: The setting of the base of rotary positions in blocks with a window, if it has its own.
    local_theta: str = ""
    partial_rotary: bool = False  # whether ``partial_rotary_factor`` counts
    #: Whether the embedding is scaled by the root of its size, scores by ``query_pre_attn_scalar``
    #: and both by their softcaps.
    gemma: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)  # as in `Family`
    refused: Mapping[str, Any] = field(default_factory=dict)  # as in `Family`


def _every(settings: Settings) -> Callable[[int], bool]:
    return lambda block: True


def _late(settings: Settings) -> Callable[[int], bool]:
    first = settings.whole("max_window_layers", zero=True)
    return lambda block: block >= first


def _even(settings: Settings) -> Callable[[int], bool]:
    return lambda block: block % 2 == 0


def _unless_last_of_pattern(settings: Settings) -> Callable[[int], bool]:
    pattern = settings.whole("sliding_window_pattern")
    return lambda block: (block + 1) % pattern > 0


def _turning(settings: Settings) -> Callable[[int], bool]:
    interval = settings.whole("no_rope_layer_interval")
    turns = settings.listed("no_rope_layers", (0, 1), lambda block: (block + 1) % interval)
    return lambda block: bool(turns(block))


def _not_turning(settings: Settings) -> Callable[[int], bool]:
    turns = _turning(settings)
    return lambda block: not turns(block)


AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
GEMMA: dict[str, Any] = {
    "norms": AROUND, "norm_offset": 1.0, "activation": "hidden_activation", "gemma": True,
}  # fmt: skip
CAUSAL = {"use_bidirectional_attention": False}
GEMMA_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
QWEN_DEFAULTS = {
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip


ROWS = {
    "llama": Decoder("a Llama", inner_bias="mlp_bias"),
    "mistral": Decoder(
        "a Mistral", query_bias=False, output_bias=False, window=_every,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        refused={"layer_types": None},
    ),
    "qwen2": Decoder(
        "a Qwen2", query_bias=True, output_bias=False, window=_late, defaults=QWEN_DEFAULTS
    ),
    "qwen3": Decoder(
        "a Qwen3", head_norms="each", window=_late, defaults=QWEN_DEFAULTS | {"head_dim": 128}
    ),
    "phi3": Decoder(
        "a Phi-3", query_bias=False, output_bias=False, joined=True,
        window=_every, partial_rotary=True,
        defaults={"rms_norm_eps": 1e-5}, refused={"layer_types": None},
    ),
    "gemma2": Decoder(
        "a Gemma 2", **GEMMA, window=_even, refused=CAUSAL,
        defaults=GEMMA_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Decoder(
        "a Gemma 3", **GEMMA, head_norms="each", local_theta="rope_local_base_freq",
        window=_unless_last_of_pattern,
        defaults=GEMMA_DEFAULTS
        | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        refused=CAUSAL | {"attn_logit_softcapping": None},  # transformers ignores it
    ),
    "olmo2": Decoder(
        "an OLMo 2", head_norms="all", norms=AFTER, defaults={"rms_norm_eps": 1e-5}
    ),
    "smollm3": Decoder(
        "a SmolLM3", inner_bias="mlp_bias", turns=_turning,
        window=_not_turning,
        defaults={
            "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True,
            "no_rope_layer_interval": 4, "use_sliding_window": False,
        },
    ),
}  # fmt: skip


def _plan_decoder(row: Decoder, settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
    """Return the plan of a decoder in the manner of Llama."""
    size, heads = settings.sizes("hidden_size", "num_attention_heads", whole_heads=False)
    tokens, epsilon = settings.whole("vocab_size"), settings.number("rms_norm_eps", 1e-6)
    layers = settings.whole("num_hidden_layers")
    make_attention = _attention(row, settings, size, heads, epsilon)
    make_feed_forward = _feed_forward(row, settings, size)
    windows = _windows(row, settings)
    turns = _rotary(row, settings, _head_size(settings, size, heads), wanted.length)
    output, tied = output_map(settings, wanted, size, tokens)
    softcap = _softcap(row, settings, "final_logit_softcapping")

    def norm(*names: str | None) -> RMSNorm | None:
        if None in names:
            return None
        return rms_norm(".".join(map(str, names)), size, epsilon, row.norm_offset)

    def block(number: int, name: str) -> EncoderBlock:
        before, after, before_inner, after_inner = (norm(name, x) for x in row.norms)
        return EncoderBlock(
            make_attention(f"{name}.self_attn", windows(number)),
            make_feed_forward(f"{name}.mlp"),
            attention_norm=before,
            feed_forward_norm=before_inner,
            attention_output_norm=after,
            feed_forward_output_norm=after_inner,
        )

    names = blocks("layers.", layers, "num_hidden_layers")
    model = Transformer(
        Embedding(vector("embed_tokens.weight", tokens, size)),
        Stack(tuple([block(n, name) for n, name in enumerate(names)]), norm("norm")),
        output=output,
        tied=tied,
        embedding_scale=math.sqrt(size) if row.gemma else 1.0,
        logits_softcap=softcap,
    )
    return ModelPlan(model, tuple([turns(n, windows(n) is not None) for n in range(layers)]))


def _head_size(settings: Settings, size: int, heads: int) -> int:
    return settings.whole("head_dim", size // heads)


def _biased(settings: Settings, bias: bool | str) -> bool:
    return bias if isinstance(bias, bool) else settings.flag(bias)


def _softcap(row: Decoder, settings: Settings, name: str) -> float | None:
    return settings.number(name) if row.gemma and name in settings else None


def _attention(
    row: Decoder, settings: Settings, size: int, heads: int, epsilon: float
) -> Callable[[str, int | None], MultiHeadAttention]:
    """Return a function that makes the attention of a name and window."""
    key_heads = settings.whole("num_key_value_heads", heads)
    if heads % key_heads:
        wanted = f"a divisor of num_attention_heads {heads}"
        raise settings.refusal("num_key_value_heads", wanted, key_heads)
    head_size = _head_size(settings, size, heads)
    query_bias, output_bias = (_biased(settings, x) for x in (row.query_bias, row.output_bias))
    scale = settings.number("query_pre_attn_scalar") ** -0.5 if row.gemma else None
    softcap = _softcap(row, settings, "attn_logit_softcapping")
    causal = settings.flag("is_causal")
    width, key_width = heads * head_size, key_heads * head_size
    widths = [width, key_width, key_width]

    def make(name: str, window: int | None) -> MultiHeadAttention:
        if row.joined:
            fused = linear(f"{name}.qkv_proj", size, sum(widths), query_bias)
        else:
            maps = [f"{name}.{part}_proj" for part in "qkv"]
            fused = joined_linear(maps, size, widths, query_bias)
        output = linear(f"{name}.o_proj", width, size, output_bias)
        norms: dict[str, Any] = {}
        if row.head_norms:
            sizes = (head_size, head_size) if row.head_norms == "each" else (width, key_width)
            norms = {
                f"{full}_norm": rms_norm(f"{name}.{full[0]}_norm", n, epsilon, row.norm_offset)
                for full, n in zip(("query", "key"), sizes, strict=True)
            }
        return MultiHeadAttention(
            *(None, None, None, output, heads, key_heads, head_size, fused),
            **norms,
            is_causal=causal,
            scale=scale,
            softcap=softcap,
            window=None if window is None else (window - 1, 0) if causal else (window, window),
        )

    return make


def _feed_forward(row: Decoder, settings: Settings, size: int) -> Callable[[str], FeedForward]:
    """Return a function that makes the feed-forward layer of a name."""
    inner, biased = settings.whole("intermediate_size"), _biased(settings, row.inner_bias)
    activation = settings.activation(row.activation, row.defaults.get(row.activation, "silu"))

    def make(name: str) -> FeedForward:
        down = linear(f"{name}.down_proj", inner, size, biased)
        if row.joined:
            gate, up = part_linear(f"{name}.gate_up_proj", size, [inner, inner], biased)
        else:
            up = linear(f"{name}.up_proj", size, inner, biased)
            gate = linear(f"{name}.gate_proj", size, inner, biased)
        return FeedForward(up, down, gate, activation)

    return make


def _windows(row: Decoder, settings: Settings) -> Callable[[int], int | None]:
    """Return a function from the number of a block to its window."""
    used = settings.flag("use_sliding_window", True)
    if row.window is None or not used or "sliding_window" not in settings:
        return lambda block: None
    width = settings.whole("sliding_window")
    slides = row.window(settings)
    kind_of = settings.kinds(lambda block: SLIDING if slides(block) else FULL)
    return lambda block: width if kind_of(block) == SLIDING else None


def _rotary(
    row: Decoder, settings: Settings, size: int, length: int | None
) -> Callable[[int, bool], Callable[[], Rotary] | None]:
    """Return a function from a block, and whether it has a window, to its rotary positions."""
    if row.local_theta:
        full = rotary(settings, size, length, kind=FULL)
        local = rotary(settings, size, None, kind=SLIDING, theta=row.local_theta)
        return lambda block, sliding: local if sliding else full
    make = rotary(settings, size, length, whole=not row.partial_rotary)
    turns = (row.turns or _every)(settings)
    return lambda block, sliding: make if turns(block) else None


# ---- GPT-2 -------------------------------------------------------------------------------------


def _plan_gpt2(settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
    """Return the plan of a GPT-2."""
    size, heads = settings.sizes("n_embd", "n_head")
    inner = settings.whole("n_inner", 4 * size)
    epsilon = settings.number("layer_norm_epsilon", 1e-5)
    activation = settings.activation("activation_function", "gelu_new")
    causal = settings.flag("is_causal")
    layers = settings.whole("n_layer")
    tokens, positions = settings.whole("vocab_size"), settings.whole("n_positions", 1024)
    output, tied = output_map(settings, wanted, size, tokens)

    def conv(name: str, inputs: int, outputs: int) -> Linear:
        # GPT-2's Conv1D stores (inputs, outputs), like our Linear.
        return Linear(vector(f"{name}.weight", inputs, outputs), vector(f"{name}.bias", outputs))

    def block(name: str) -> EncoderBlock:
        output = conv(f"{name}.attn.c_proj", size, size)
        fused = conv(f"{name}.attn.c_attn", size, 3 * size)
        maps = None, None, None, output
        return EncoderBlock(
            MultiHeadAttention(*maps, heads, heads, size // heads, fused, is_causal=causal),
            FeedForward(
                conv(f"{name}.mlp.c_fc", size, inner),
                conv(f"{name}.mlp.c_proj", inner, size),
                activation=activation,
            ),
            layer_norm(f"{name}.ln_1", size, epsilon),
            layer_norm(f"{name}.ln_2", size, epsilon),
        )

    names = blocks("h.", layers, "n_layer")
    model = Transformer(
        Embedding(vector("wte.weight", tokens, size)),
        Stack(tuple([block(name) for name in names]), layer_norm("ln_f", size, epsilon)),
        LearnedPositions(vector("wpe.weight", positions, size)),
        output=output,
        tied=tied,
    )
    return ModelPlan(model)


DECODERS = {
    "gpt2": Family(
        "a GPT-2",
        _plan_gpt2,
        prefix="transformer.",
        skip=r"h\.\d+\.attn\.(bias|masked_bias)|(score|multiple_choice_head)\..*",
        defaults={"is_causal": True, "tie_word_embeddings": True},
        refused={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    **{
        name: Family(
            row.title,
            partial(_plan_decoder, row),
            prefix="model.",
            skip=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(score|qa_outputs)\..*",
            defaults={"is_causal": True, **row.defaults},
            refused=row.refused,
        )
        for name, row in ROWS.items()
    },
}
