"""Plan encoders of text: BERT, with what other families change, and ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock, Stack
from polyattn.nn.layers import Embedding, FeedForward, LayerNorm
from polyattn.nn.load.plan import Blocks, Family, Plan, Wanted
from polyattn.nn.load.rope import rotary
from polyattn.nn.load.settings import FULL, SLIDING, Settings
from polyattn.nn.load.stored import joined_linear, layer_norm, linear, part_linear, vector
from polyattn.nn.models import Transformer
from polyattn.nn.positions import LearnedPositions, RelativeBias


@dataclass(frozen=True)
class Encoder:
    """The names of BERT's weights and settings, and what a family changes of them."""

    title: str  # with an article
    blocks: str = "encoder.layer."
    #: To queries, keys and values, from the heads, to the inner size and back.
    maps: tuple[str, ...] = (
        *("attention.self.query", "attention.self.key", "attention.self.value"),
        *("attention.output.dense", "intermediate.dense", "output.dense"),
    )
    norms: tuple[str, str] = ("attention.output.LayerNorm", "output.LayerNorm")
    segments: bool = True  # whether tokens have segments
    offset: int | str = 0  # the row of the first position, less 1 if it is that of a setting
    relative: str = ""  # the name of a relative bias for all blocks
    #: Of the size, heads, layers, inner size and activation.
    settings: tuple[str, ...] = (
        *("hidden_size", "num_attention_heads", "num_hidden_layers"),
        *("intermediate_size", "hidden_act"),
    )


ROWS = {
    "bert": Encoder("a BERT"),
    "roberta": Encoder("a RoBERTa", offset="pad_token_id"),
    "xlm-roberta": Encoder("an XLM-R", offset="pad_token_id"),
    "distilbert": Encoder(
        "a DistilBERT", blocks="transformer.layer.", segments=False,
        maps=(
            "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin",
            "ffn.lin1", "ffn.lin2",
        ),
        norms=("sa_layer_norm", "output_layer_norm"),
        settings=("dim", "n_heads", "n_layers", "hidden_dim", "activation"),
    ),
    "mpnet": Encoder(
        "an MPNet", segments=False, offset=2, relative="encoder.relative_attention_bias.weight",
        maps=(
            "attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o",
            "intermediate.dense", "output.dense",
        ),
        norms=("attention.LayerNorm", "output.LayerNorm"),
    ),
}  # fmt: skip


def _plan_bert(row: Encoder, settings: Settings, blocks: Blocks, wanted: Wanted) -> Plan:
    """Return the plan of an encoder in the manner of BERT."""
    width, number, layer_count, inner_size, act = row.settings
    size, heads = settings.sizes(width, number)
    inner, tokens = settings.whole(inner_size), settings.whole("vocab_size")
    epsilon = settings.number("layer_norm_eps", 1e-12)
    activation = settings.activation(act, "gelu")
    layers = settings.whole(layer_count)
    positions = settings.whole("max_position_embeddings", 512)
    kinds = settings.whole("type_vocab_size", 2) if row.segments else 0
    offset = row.offset
    if isinstance(offset, str):
        offset = settings.whole(offset, zero=True) + 1

    def block(name: str) -> EncoderBlock:
        query, key, value, output, up, down = (f"{name}.{part}" for part in row.maps)
        fused = joined_linear([query, key, value], size, [size, size, size])
        merge = linear(output, size, size)
        return EncoderBlock(
            MultiHeadAttention(None, None, None, merge, heads, heads, size // heads, fused),
            FeedForward(linear(up, size, inner), linear(down, inner, size), activation=activation),
            layer_norm(f"{name}.{row.norms[0]}", size, epsilon),
            layer_norm(f"{name}.{row.norms[1]}", size, epsilon),
            pre_norm=False,
        )

    names = blocks(row.blocks, layers, layer_count)
    place = vector("embeddings.position_embeddings.weight", positions, size)
    kind = vector("embeddings.token_type_embeddings.weight", kinds, size)
    model = Transformer(
        Embedding(vector("embeddings.word_embeddings.weight", tokens, size)),
        Stack(tuple([block(name) for name in names])),
        LearnedPositions(place, offset),
        Embedding(kind) if row.segments else None,
        layer_norm("embeddings.LayerNorm", size, epsilon),
        relative=RelativeBias(vector(row.relative, 32, heads)) if row.relative else None,
    )
    return Plan(model)


# ---- ModernBERT --------------------------------------------------------------------------------


def _plan_modernbert(settings: Settings, blocks: Blocks, wanted: Wanted) -> Plan:
    """Return the plan of a ModernBERT."""
    size, heads = settings.sizes("hidden_size", "num_attention_heads")
    inner, tokens = settings.whole("intermediate_size"), settings.whole("vocab_size")
    epsilon, norm_bias = settings.number("norm_eps"), settings.flag("norm_bias")
    activation = settings.activation("hidden_activation", "gelu")
    biased, inner_biased = settings.flag("attention_bias"), settings.flag("mlp_bias")
    layers, reach = settings.whole("num_hidden_layers"), settings.whole("local_attention") // 2
    makers = {
        kind: rotary(settings, size // heads, wanted.length, kind=kind, theta=f"{name}_rope_theta")
        for kind, name in ((FULL, "global"), (SLIDING, "local"))
    }
    every = settings.whole("global_attn_every_n_layers")
    kind_of = settings.kinds(lambda n: SLIDING if n % every else FULL)

    def norm(name: str) -> LayerNorm:
        return layer_norm(name, size, epsilon, norm_bias)

    def block(number: int, name: str) -> EncoderBlock:
        options: dict[str, Any] = {}
        if kind_of(number) == SLIDING:
            options["window"] = (reach, reach)
        fused = linear(f"{name}.attn.Wqkv", size, 3 * size, biased)
        output = linear(f"{name}.attn.Wo", size, size, biased)
        gate, up = part_linear(f"{name}.mlp.Wi", size, [inner, inner], inner_biased)
        return EncoderBlock(
            MultiHeadAttention(
                *(None, None, None, output, heads, heads, size // heads, fused), **options
            ),
            FeedForward(up, linear(f"{name}.mlp.Wo", inner, size, inner_biased), gate, activation),
            norm(f"{name}.attn_norm") if number else None,  # the embedding has one
            norm(f"{name}.mlp_norm"),
        )

    names = blocks("layers.", layers, "num_hidden_layers")
    model = Transformer(
        Embedding(vector("embeddings.tok_embeddings.weight", tokens, size)),
        Stack(tuple([block(n, name) for n, name in enumerate(names)]), norm("final_norm")),
        embedding_norm=norm("embeddings.norm"),
    )
    return Plan(model, tuple([makers[kind_of(n)] for n in range(layers)]))


HEADS = r"(pooler|cls|classifier|qa_outputs|lm_head|pre_classifier|vocab_\w+)\..*"
PREFIXES = {"xlm-roberta": "roberta."}
ENCODERS = {
    **{
        name: Family(
            row.title,
            partial(_plan_bert, row),
            prefix=PREFIXES.get(name, f"{name}."),
            skip=rf"{HEADS}|embeddings\.(position|token_type)_ids",
            # The names in the first BERT's files.
            old={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
            defaults={"pad_token_id": 1} if row.offset else {},
            refused={
                "position_embedding_type": "absolute",
                "is_decoder": False,
                "relative_attention_num_buckets": 32,  # in transformers too
            },
        )
        for name, row in ROWS.items()
    },
    "modernbert": Family(
        "a ModernBERT",
        _plan_modernbert,
        prefix="model.",
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
}
