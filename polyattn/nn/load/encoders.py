"""Plan encoders: of text, BERT, with what other families change, and ModernBERT; ViT; Whisper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from polyattn._base.arrays import Array
from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock, Stack
from polyattn.nn.inputs import FrameEmbedding, PatchEmbedding
from polyattn.nn.layers import Embedding, FeedForward, LayerNorm, Linear
from polyattn.nn.load.model_plan import Blocks, Family, ModelPlan, Wanted, plain_stack
from polyattn.nn.load.rope import rotary
from polyattn.nn.load.settings import FULL, SLIDING, Settings
from polyattn.nn.load.stored import (
    Stored,
    layer_norm,
    linear,
    part_linear,
    reshaped,
    vector,
)
from polyattn.nn.models import Transformer
from polyattn.nn.positions import LearnedPositions, RelativeBias

HEADS = r"(pooler|cls|classifier|qa_outputs|lm_head|pre_classifier|vocab_\w+)\..*"
# The names in the first BERT's files.
OLD = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
REFUSED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "relative_attention_num_buckets": 32,  # in transformers too
}


@dataclass(frozen=True)
class Encoder(Family):
    """BERT, the names of its weights and settings, and what a family changes of it."""

    skip: str = rf"{HEADS}|embeddings\.(position|token_type)_ids"
    old: Mapping[str, str] = field(default_factory=lambda: OLD)
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"pad_token_id": 1})
    refused: Mapping[str, Any] = field(default_factory=lambda: REFUSED)
    blocks: str = "encoder.layer."
    #: The maps to queries, keys and values, from the heads, to the inner size and back; the norms.
    parts: tuple[str, ...] = (
        *("attention.self.query", "attention.self.key", "attention.self.value"),
        *("attention.output.dense", "intermediate.dense", "output.dense"),
        *("attention.output.LayerNorm", "output.LayerNorm"),
    )
    segments: bool = True  # whether tokens have segments
    offset: int | str = 0  # the row of the first position, less 1 if it is that of a setting
    relative: str = ""  # the name of a relative bias for all blocks
    #: Of the size, heads, layers, inner size and activation.
    settings: tuple[str, ...] = (
        *("hidden_size", "num_attention_heads", "num_hidden_layers"),
        *("intermediate_size", "hidden_act"),
    )

    def plan(self, settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
        width, number, layer_count, inner_size, act = self.settings
        size, heads = settings.sizes(width, number)
        inner, tokens = settings.whole(inner_size), settings.whole("vocab_size")
        epsilon = settings.number("layer_norm_eps", 1e-12)
        activation = settings.activation(act, "gelu")
        layers = settings.whole(layer_count)
        positions = settings.whole("max_position_embeddings", 512)
        kinds = settings.whole("type_vocab_size", 2) if self.segments else 0
        offset = self.offset
        if isinstance(offset, str):
            offset = settings.whole(offset, zero=True) + 1

        names = blocks(self.blocks, layers, layer_count)
        place = vector("embeddings.position_embeddings.weight", positions, size)
        kind = vector("embeddings.token_type_embeddings.weight", kinds, size)
        model = Transformer(
            Embedding(vector("embeddings.word_embeddings.weight", tokens, size)),
            plain_stack(names, self.parts, (size, heads, inner), epsilon, activation),
            LearnedPositions(place, offset),
            Embedding(kind) if self.segments else None,
            layer_norm("embeddings.LayerNorm", size, epsilon),
            relative=RelativeBias(vector(self.relative, 32, heads)) if self.relative else None,
        )
        return ModelPlan(model)


# ---- ModernBERT --------------------------------------------------------------------------------


class _ModernBERT(Family):
    def plan(self, settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
        size, heads = settings.sizes("hidden_size", "num_attention_heads")
        inner, tokens = settings.whole("intermediate_size"), settings.whole("vocab_size")
        epsilon, norm_bias = settings.number("norm_eps"), settings.flag("norm_bias")
        activation = settings.activation("hidden_activation", "gelu")
        biased, inner_biased = settings.flag("attention_bias"), settings.flag("mlp_bias")
        layers, reach = settings.whole("num_hidden_layers"), settings.whole("local_attention") // 2
        makers = {
            kind: rotary(
                settings, size // heads, wanted.length, kind=kind, theta=f"{name}_rope_theta"
            )
            for kind, name in ((FULL, "global"), (SLIDING, "local"))
        }
        every = settings.whole("global_attn_every_n_layers")
        kind_of = settings.kinds(lambda n: SLIDING if n % every else FULL)

        def norm(name: str) -> LayerNorm:
            return layer_norm(name, size, epsilon, norm_bias)

        def block(number: int, name: str) -> EncoderBlock:
            fused = linear(f"{name}.attn.Wqkv", size, 3 * size, biased)
            output = linear(f"{name}.attn.Wo", size, size, biased)
            gate, up = part_linear(f"{name}.mlp.Wi", size, [inner, inner], inner_biased)
            return EncoderBlock(
                MultiHeadAttention(
                    *(None, None, None, output, heads, heads, size // heads, fused),
                    is_causal=False,
                    window=(reach, reach) if kind_of(number) == SLIDING else None,
                ),
                FeedForward(
                    up, linear(f"{name}.mlp.Wo", inner, size, inner_biased), gate, activation
                ),
                norm(f"{name}.attn_norm") if number else None,  # the embedding has one
                norm(f"{name}.mlp_norm"),
            )

        names = blocks("layers.", layers, "num_hidden_layers")
        model = Transformer(
            Embedding(vector("embeddings.tok_embeddings.weight", tokens, size)),
            Stack(tuple([block(n, name) for n, name in enumerate(names)]), norm("final_norm")),
            embedding_norm=norm("embeddings.norm"),
        )
        return ModelPlan(model, tuple([makers[kind_of(n)] for n in range(layers)]))


# ---- ViT ---------------------------------------------------------------------------------------

VIT = (
    *(f"attention.attention.{part}" for part in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
    *("layernorm_before", "layernorm_after"),
)


class _ViT(Family):
    def plan(self, settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
        size, heads = settings.sizes("hidden_size", "num_attention_heads")
        inner, epsilon = settings.whole("intermediate_size"), settings.number("layer_norm_eps")
        activation = settings.activation("hidden_act", "gelu")
        biases = (settings.flag("qkv_bias"),) * 3
        layers, channels = settings.whole("num_hidden_layers"), settings.whole("num_channels")
        side, patch = settings.whole("image_size"), settings.whole("patch_size")
        if side % patch:
            raise settings.refusal("patch_size", f"a divisor of image_size {side}", patch)
        tokens = (side // patch) ** 2 + 1

        projection = "embeddings.patch_embeddings.projection"
        inputs = channels * patch * patch
        stored = {f"{projection}.weight": (size, channels, patch, patch)}
        weight = Stored((inputs, size), stored, partial(_flat, size))
        names = blocks("encoder.layer.", layers, "num_hidden_layers")
        stack = plain_stack(
            *(names, VIT, (size, heads, inner), epsilon, activation),
            norm="layernorm",
            biases=biases,
        )
        model = Transformer(
            PatchEmbedding(
                Linear(weight, vector(f"{projection}.bias", size)),
                reshaped("embeddings.cls_token", (1, 1, size), (size,)),
                (channels, side, side),
                patch,
            ),
            stack,
            LearnedPositions(
                reshaped("embeddings.position_embeddings", (1, tokens, size), (tokens, size))
            ),
        )
        return ModelPlan(model)


def _flat(size: int, xp: Any, weight: Array) -> Array:
    """Return the map of a patch from a convolution's weight, (size, C, P, P)."""
    return xp.matrix_transpose(xp.reshape(weight, (size, -1)))


# ---- Whisper -----------------------------------------------------------------------------------

WHISPER = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")),
    *("fc1", "fc2", "self_attn_layer_norm", "final_layer_norm"),
)


class _Whisper(Family):
    def plan(self, settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
        size, heads = settings.sizes("d_model", "encoder_attention_heads")
        inner, bands = settings.whole("encoder_ffn_dim"), settings.whole("num_mel_bins")
        activation = settings.activation("activation_function", "gelu")
        layers, positions = settings.whole("encoder_layers"), settings.whole("max_source_positions")

        def convolution(name: str, inputs: int) -> Linear:
            stored = {f"{name}.weight": (size, inputs, 3)}
            weight = Stored((3 * inputs, size), stored, _convolution)
            return Linear(weight, vector(f"{name}.bias", size))

        names = blocks("encoder.layers.", layers, "encoder_layers")
        stack = plain_stack(
            *(names, WHISPER, (size, heads, inner), 1e-5, activation),
            norm="encoder.layer_norm",
            biases=(True, False, True),
        )
        model = Transformer(
            FrameEmbedding(convolution("encoder.conv1", bands), convolution("encoder.conv2", size)),
            stack,
            LearnedPositions(vector("encoder.embed_positions.weight", positions, size)),
        )
        return ModelPlan(model)


def _convolution(xp: Any, weight: Array) -> Array:
    """Return the map of three frames in a row from a convolution's weight, (size, inputs, 3)."""
    x = xp.permute_dims(weight, (2, 1, 0))
    return xp.reshape(x, (-1, x.shape[-1]))


# ---- all of them ------------------------------------------------------------------------------

TEXT = {
    "bert": Encoder("a BERT", prefix="bert."),
    "roberta": Encoder("a RoBERTa", prefix="roberta.", offset="pad_token_id"),
    "xlm-roberta": Encoder("an XLM-R", prefix="roberta.", offset="pad_token_id"),
    "distilbert": Encoder(
        "a DistilBERT", prefix="distilbert.", blocks="transformer.layer.", segments=False,
        parts=(
            "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin",
            "ffn.lin1", "ffn.lin2", "sa_layer_norm", "output_layer_norm",
        ),
        settings=("dim", "n_heads", "n_layers", "hidden_dim", "activation"),
    ),
    "mpnet": Encoder(
        "an MPNet", prefix="mpnet.", segments=False, offset=2,
        relative="encoder.relative_attention_bias.weight",
        parts=(
            "attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o",
            "intermediate.dense", "output.dense", "attention.LayerNorm", "output.LayerNorm",
        ),
    ),
}  # fmt: skip
ENCODERS: dict[str, Family] = {
    **TEXT,
    "modernbert": _ModernBERT(
        "a ModernBERT",
        skip=r"(head|decoder|classifier)\..*|(layers\.\d+\.attn\.)?rotary_emb\.\w*inv_freq",
        defaults={
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160_000.0,
            "local_rope_theta": 10_000.0,
        },
        refused={"rope_scaling": None},
    ),
    "vit": _ViT(
        "a ViT",
        prefix="vit.",
        skip=r"(pooler|classifier|decoder)\..*|embeddings\.mask_token",
        # The names of a state dict, which files do not have.
        old={
            r"^layers\.(\d+)\.attention\.o_proj": r"encoder.layer.\1.attention.output.dense",
            r"^layers\.(\d+)\.attention\.q_proj": r"encoder.layer.\1.attention.attention.query",
            r"^layers\.(\d+)\.attention\.k_proj": r"encoder.layer.\1.attention.attention.key",
            r"^layers\.(\d+)\.attention\.v_proj": r"encoder.layer.\1.attention.attention.value",
            r"^layers\.(\d+)\.mlp\.fc1": r"encoder.layer.\1.intermediate.dense",
            r"^layers\.(\d+)\.mlp\.fc2": r"encoder.layer.\1.output.dense",
            r"^layers\.": "encoder.layer.",
        },
        defaults={
            "layer_norm_eps": 1e-12,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
            "qkv_bias": True,
        },
    ),
    "whisper": _Whisper(
        "a Whisper",
        skip=r"(decoder|proj_out|projector|classifier)\..*|layer_weights",
    ),
}
