"""Plan encoders of images and sound: ViT and the encoder of Whisper."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyattn._base.arrays import Array
from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock, Stack
from polyattn.nn.inputs import FrameEmbedding, PatchEmbedding
from polyattn.nn.layers import FeedForward, Linear
from polyattn.nn.load.plan import Blocks, Family, Plan, Wanted
from polyattn.nn.load.settings import Settings
from polyattn.nn.load.stored import Stored, layer_norm, linear, vector
from polyattn.nn.models import Transformer
from polyattn.nn.positions import LearnedPositions


def _block(
    name: str, sizes: tuple[int, int, int], epsilon: float, activation: str, parts: tuple[str, ...],
    biases: tuple[bool, bool, bool] = (True, True, True),
) -> EncoderBlock:  # fmt: skip
    """Return a block with norms before its parts, by the names of its maps and norms."""
    size, heads, inner = sizes
    *maps, output, up, down, before, after = (f"{name}.{part}" for part in parts)
    query, key, value = (linear(x, size, size, b) for x, b in zip(maps, biases, strict=True))
    merge = linear(output, size, size)
    return EncoderBlock(
        MultiHeadAttention(query, key, value, merge, heads, heads, size // heads),
        FeedForward(linear(up, size, inner), linear(down, inner, size), activation=activation),
        layer_norm(before, size, epsilon),
        layer_norm(after, size, epsilon),
    )


# ---- ViT ---------------------------------------------------------------------------------------

VIT = (
    *(f"attention.attention.{part}" for part in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
    *("layernorm_before", "layernorm_after"),
)


def _plan_vit(settings: Settings, blocks: Blocks, wanted: Wanted) -> Plan:
    """Return the plan of a ViT."""
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
    sizes = (size, heads, inner)
    model = Transformer(
        PatchEmbedding(
            Linear(weight, vector(f"{projection}.bias", size)),
            _reshaped("embeddings.cls_token", (1, 1, size), (size,)),
            (channels, side, side),
            patch,
        ),
        Stack(
            tuple([_block(name, sizes, epsilon, activation, VIT, biases) for name in names]),
            layer_norm("layernorm", size, epsilon),
        ),
        LearnedPositions(
            _reshaped("embeddings.position_embeddings", (1, tokens, size), (tokens, size))
        ),
    )
    return Plan(model)


def _flat(size: int, xp: Any, weight: Array) -> Array:
    """Return the map of a patch from a convolution's weight, (size, C, P, P)."""
    return xp.matrix_transpose(xp.reshape(weight, (size, -1)))


def _reshaped(name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> Stored:
    return Stored(shape, {name: stored}, lambda xp, array: xp.reshape(array, shape))


# ---- Whisper -----------------------------------------------------------------------------------

WHISPER = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")),
    *("fc1", "fc2", "self_attn_layer_norm", "final_layer_norm"),
)


def _plan_whisper(settings: Settings, blocks: Blocks, wanted: Wanted) -> Plan:
    """Return the plan of Whisper's encoder."""
    size, heads = settings.sizes("d_model", "encoder_attention_heads")
    inner, bands = settings.whole("encoder_ffn_dim"), settings.whole("num_mel_bins")
    activation = settings.activation("activation_function", "gelu")
    layers, positions = settings.whole("encoder_layers"), settings.whole("max_source_positions")

    def convolution(name: str, inputs: int) -> Linear:
        stored = {f"{name}.weight": (size, inputs, 3)}
        weight = Stored((3 * inputs, size), stored, _convolution)
        return Linear(weight, vector(f"{name}.bias", size))

    names = blocks("encoder.layers.", layers, "encoder_layers")
    sizes, biases = (size, heads, inner), (True, False, True)
    model = Transformer(
        FrameEmbedding(convolution("encoder.conv1", bands), convolution("encoder.conv2", size)),
        Stack(
            tuple([_block(name, sizes, 1e-5, activation, WHISPER, biases) for name in names]),
            layer_norm("encoder.layer_norm", size, 1e-5),
        ),
        LearnedPositions(vector("encoder.embed_positions.weight", positions, size)),
    )
    return Plan(model)


def _convolution(xp: Any, weight: Array) -> Array:
    """Return the map of three frames in a row from a convolution's weight, (size, inputs, 3)."""
    x = xp.permute_dims(weight, (2, 1, 0))
    return xp.reshape(x, (-1, x.shape[-1]))


SENSES = {
    "vit": Family(
        "a ViT",
        _plan_vit,
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
    "whisper": Family(
        "a Whisper",
        _plan_whisper,
        prefix="model.",
        skip=r"(decoder|proj_out|projector|classifier)\..*|layer_weights",
    ),
}
