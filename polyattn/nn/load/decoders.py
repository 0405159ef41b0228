"""Plan decoders: GPT-2, and Llama with what other families add to it, one row for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock, Stack
from polyattn.nn.layers import Embedding, FeedForward, Linear, RMSNorm
from polyattn.nn.load.model_plan import Blocks, Family, ModelPlan, Wanted, output_map, plain_stack
from polyattn.nn.load.rope import rotary
from polyattn.nn.load.settings import FULL, SLIDING, Settings
from polyattn.nn.load.stored import joined_linear, linear, part_linear, rms_norm, vector
from polyattn.nn.models import Transformer
from polyattn.nn.positions import LearnedPositions, Rotary

#: The norms before and after attention, and before and after the feed-forward layer.
Norms = tuple[str | None, str | None, str | None, str | None]


#: Makes from settings whether block n has something.
Which = Callable[[Settings], Callable[[int], bool]]


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


@dataclass(frozen=True)
class Decoder(Family):
    """Llama, and what a family changes of it; a bias given as a string is a setting."""

    skip: str = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(score|qa_outputs)\..*"
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
    turns: Which = _every  # whether block n has rotary positions
    #: The setting of the base of rotary positions in blocks with a window, if it has its own.
    local_theta: str = ""
    partial_rotary: bool = False  # whether ``partial_rotary_factor`` counts
    #: Whether the embedding is scaled by the root of its size, scores by ``query_pre_attn_scalar``
    #: and both by their softcaps.
    gemma: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", {"is_causal": True, **self.defaults})

    def plan(self, settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
        size, heads = settings.sizes("hidden_size", "num_attention_heads", whole_heads=False)
        tokens, epsilon = settings.whole("vocab_size"), settings.number("rms_norm_eps", 1e-6)
        layers = settings.whole("num_hidden_layers")
        head_size = settings.whole("head_dim", size // heads)
        make_attention = self._attention(settings, (size, heads, head_size), epsilon)
        make_feed_forward = self._feed_forward(settings, size)
        windows = self._windows(settings)
        turns = self._rotary(settings, head_size, wanted.length)
        output, tied = output_map(settings, wanted, size, tokens)
        softcap = self._softcap(settings, "final_logit_softcapping")

        def norm(*names: str | None) -> RMSNorm | None:
            if None in names:
                return None
            return rms_norm(".".join(map(str, names)), size, epsilon, self.norm_offset)

        def block(number: int, name: str) -> EncoderBlock:
            before, after, before_inner, after_inner = (norm(name, x) for x in self.norms)
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
            embedding_scale=math.sqrt(size) if self.gemma else 1.0,
            logits_softcap=softcap,
        )
        return ModelPlan(model, tuple([turns(n, windows(n) is not None) for n in range(layers)]))

    def _softcap(self, settings: Settings, name: str) -> float | None:
        return settings.number(name) if self.gemma and name in settings else None

    def _attention(
        self, settings: Settings, sizes: tuple[int, int, int], epsilon: float
    ) -> Callable[[str, int | None], MultiHeadAttention]:
        """Return a function that makes the attention of a name and window."""
        size, heads, head_size = sizes
        key_heads = settings.whole("num_key_value_heads", heads)
        if heads % key_heads:
            wanted = f"a divisor of num_attention_heads {heads}"
            raise settings.refusal("num_key_value_heads", wanted, key_heads)
        query_bias, output_bias = (
            _biased(settings, x) for x in (self.query_bias, self.output_bias)
        )
        scale = settings.number("query_pre_attn_scalar") ** -0.5 if self.gemma else None
        softcap = self._softcap(settings, "attn_logit_softcapping")
        causal = settings.flag("is_causal")
        width, key_width = heads * head_size, key_heads * head_size
        widths = [width, key_width, key_width]

        def make(name: str, window: int | None) -> MultiHeadAttention:
            if self.joined:
                fused = linear(f"{name}.qkv_proj", size, sum(widths), query_bias)
            else:
                maps = [f"{name}.{part}_proj" for part in "qkv"]
                fused = joined_linear(maps, size, widths, query_bias)
            output = linear(f"{name}.o_proj", width, size, output_bias)
            norms: dict[str, Any] = {}
            if self.head_norms:
                each = self.head_norms == "each"
                for full, whole in (("query", width), ("key", key_width)):
                    length, norm = head_size if each else whole, f"{name}.{full[0]}_norm"
                    norms[f"{full}_norm"] = rms_norm(norm, length, epsilon, self.norm_offset)
            return MultiHeadAttention(
                *(None, None, None, output, heads, key_heads, head_size, fused),
                **norms,
                is_causal=causal,
                scale=scale,
                softcap=softcap,
                window=None if window is None else (window - 1, 0) if causal else (window, window),
            )

        return make

    def _feed_forward(self, settings: Settings, size: int) -> Callable[[str], FeedForward]:
        """Return a function that makes the feed-forward layer of a name."""
        inner, biased = settings.whole("intermediate_size"), _biased(settings, self.inner_bias)
        activation = settings.activation(
            self.activation, self.defaults.get(self.activation, "silu")
        )

        def make(name: str) -> FeedForward:
            down = linear(f"{name}.down_proj", inner, size, biased)
            if self.joined:
                gate, up = part_linear(f"{name}.gate_up_proj", size, [inner, inner], biased)
            else:
                up = linear(f"{name}.up_proj", size, inner, biased)
                gate = linear(f"{name}.gate_proj", size, inner, biased)
            return FeedForward(up, down, gate, activation)

        return make

    def _windows(self, settings: Settings) -> Callable[[int], int | None]:
        """Return a function from the number of a block to its window."""
        used = settings.flag("use_sliding_window", True)
        if self.window is None or not used or "sliding_window" not in settings:
            return lambda block: None
        width = settings.whole("sliding_window")
        slides = self.window(settings)
        kind_of = settings.kinds(lambda block: SLIDING if slides(block) else FULL)
        return lambda block: width if kind_of(block) == SLIDING else None

    def _rotary(
        self, settings: Settings, size: int, length: int | None
    ) -> Callable[[int, bool], Callable[[], Rotary] | None]:
        """Return a function from a block, and whether it has a window, to its rotary positions."""
        if self.local_theta:
            full = rotary(settings, size, length, kind=FULL)
            local = rotary(settings, size, None, kind=SLIDING, theta=self.local_theta)
            return lambda block, sliding: local if sliding else full
        make = rotary(settings, size, length, whole=not self.partial_rotary)
        turns = self.turns(settings)
        return lambda block, sliding: make if turns(block) else None


def _biased(settings: Settings, bias: bool | str) -> bool:
    return bias if isinstance(bias, bool) else settings.flag(bias)


# ---- GPT-2 -------------------------------------------------------------------------------------

GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")


class _GPT2(Family):
    def plan(self, settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
        size, heads = settings.sizes("n_embd", "n_head")
        inner = settings.whole("n_inner", 4 * size)
        epsilon = settings.number("layer_norm_epsilon", 1e-5)
        activation = settings.activation("activation_function", "gelu_new")
        causal = settings.flag("is_causal")
        layers = settings.whole("n_layer")
        tokens, positions = settings.whole("vocab_size"), settings.whole("n_positions", 1024)
        output, tied = output_map(settings, wanted, size, tokens)
        names, sizes = blocks("h.", layers, "n_layer"), (size, heads, inner)
        own: dict[str, Any] = {"norm": "ln_f", "is_causal": causal}
        model = Transformer(
            Embedding(vector("wte.weight", tokens, size)),
            plain_stack(names, GPT2, sizes, epsilon, activation, _conv, **own),
            LearnedPositions(vector("wpe.weight", positions, size)),
            output=output,
            tied=tied,
        )
        return ModelPlan(model)


def _conv(name: str, inputs: int, outputs: int) -> Linear:
    # GPT-2's Conv1D stores (inputs, outputs), like our Linear.
    return Linear(vector(f"{name}.weight", inputs, outputs), vector(f"{name}.bias", outputs))


# ---- all of them ------------------------------------------------------------------------------

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


DECODERS: dict[str, Family] = {
    "gpt2": _GPT2(
        "a GPT-2",
        prefix="transformer.",
        skip=r"h\.\d+\.attn\.(bias|masked_bias)|(score|multiple_choice_head)\..*",
        defaults={"is_causal": True, "tie_word_embeddings": True},
        refused={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
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
