"""A packed BERT without padding: rotary positions, RMS norms, the loss of masked tokens."""

import torch
from by_hand import each
from flash_attn import flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.layer_norm import RMSNorm
from torch import nn

VOCABULARY, IGNORED = 61, -100


class Layer(nn.Module):
    def __init__(self, width, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.rotary = RotaryEmbedding(width // heads, base=100.0)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, indices, starts, shape):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        qkv = self.rotary(pad_input(qkv, indices, *shape))  # its positions are those of the items
        qkv = index_first_axis(qkv.flatten(0, 1), indices)
        x = x + self.out(self.attend(qkv, starts, shape[1]).flatten(1))
        return x + self.mlp(self.norm2(x))

    def attend(self, qkv, starts, longest):
        return flash_attn_varlen_qkvpacked_func(qkv, starts, longest, window_size=self.window)


class Model(nn.Module):
    layer = Layer

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(self.layer(width, heads, one) for one in ((-1, -1), (4, 4)))
        self.head, self.loss = nn.Linear(width, VOCABULARY), CrossEntropyLoss(ignore_index=IGNORED)

    def forward(self, tokens, mask, labels):
        x, indices, starts, _, *_ = unpad_input(self.embedding(tokens), mask)
        for layer in self.layers:
            x = layer(x, indices, starts, tokens.shape)
        logits = self.head(x)
        loss = self.loss(logits, labels.flatten()[indices])
        return pad_input(logits, indices, *tokens.shape), loss


class LayerByHand(Layer):
    def attend(self, qkv, starts, longest):
        return each(starts, *qkv.unbind(1), self.window)


class ByHand(Model):
    layer = LayerByHand


def inputs(length=25):
    tokens = torch.randint(VOCABULARY, (3, length))
    mask = torch.arange(length) < torch.tensor([[length], [length // 3], [length // 2]])
    labels = torch.where(torch.rand(3, length) < 0.3, tokens, IGNORED)
    return tokens, mask, labels
