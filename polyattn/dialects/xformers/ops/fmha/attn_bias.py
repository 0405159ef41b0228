"""The classes of `xformers.ops.fmha.attn_bias`; their names and fields are what they mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from polyattn.dialects._packed import PositionRule
from polyattn.dialects.xformers import BIASES, rule_of

Tensors = Sequence[torch.Tensor]
Lengths = Sequence[int]


def _moved(record: Any, device: Any) -> Any:
    """Return a record with its tensors on a device."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{k: x.to(device) for k, x in values.items() if hasattr(x, "to")})


@dataclass
class _SeqLenInfo:
    """The starts of sequences and the end of the last; of some, the number of tokens in use.

    Sequences of pages begin among their own pages, where `seqlen` is their end.
    """

    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]
    seqlen: torch.Tensor | None = None
    seqlen_py: list[int] | None = None
    padding: int | None = None
    to = _moved

    @classmethod
    def from_seqlens(
        cls, seqlens: Iterable[int], *, device: Any = None, starts: Lengths | None = None,
        shift: int = 0, padding: int | None = None,
    ) -> Self:  # fmt: skip
        """Return sequences that follow each other, or begin at `starts`."""
        lengths = [int(length) for length in seqlens]
        begins = [int(n) for n in starts or [0, *itertools.accumulate(lengths)]]
        room = math.inf if padding is None else padding
        if any(not 0 <= length <= room for length in lengths) or len(begins) != len(lengths) + 1:
            raise ValueError(
                f"sequences of 0 to {room} tokens have as many starts, and an end; got the lengths"
                f" {lengths} and the starts {begins}"
            )
        used = starts and [n + shift * at for n, at in zip(lengths, begins, strict=False)]
        tensors = [x and torch.tensor(x, dtype=torch.int32, device=device) for x in (begins, used)]
        least, most = min(lengths, default=-1), max(lengths, default=-1)
        return cls(tensors[0], most, least, begins, tensors[1], used, padding)  # type: ignore[arg-type]

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield the first token of each sequence, and its end."""
        for n, (start, stop) in enumerate(itertools.pairwise(self.seqstart_py)):
            yield start, stop if self.seqlen_py is None else start + self.seqlen_py[n]

    def split(self, x: torch.Tensor, batch_sizes: Lengths | None = None) -> list[torch.Tensor]:
        """Return batches of sequences, (batch, length, ...), of (1, tokens, ...)."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(f"split takes (1, {self.seqstart_py[-1]}, ...); got {tuple(x.shape)}")
        sizes = batch_sizes or [1] * (len(self.seqstart_py) - 1)
        ends = [self.seqstart_py[n] for n in itertools.accumulate(sizes, initial=0)]
        parts = torch.split(x, [stop - start for start, stop in itertools.pairwise(ends)], dim=1)
        pairs = zip(sizes, parts, strict=True)
        return [one.reshape(n, one.shape[1] // max(n, 1), *x.shape[2:]) for n, one in pairs]


@dataclass
class AttentionBias:
    """A bias that is no array."""

    to = _moved

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        """Return the bias as an array, 0 where a row sees a key and −inf elsewhere."""
        rule = rule_of(self) or PositionRule()
        seen = torch.zeros(*shape[-2:], dtype=torch.bool, device=device)
        for (row, stop), (key, end) in self._blocks(shape):
            shift = 0 if rule.from_first else end - key - (stop - row)
            left, right = rule.window[0], 0 if rule.causal else rule.window[1]
            part = torch.ones(stop - row, end - key, dtype=torch.bool, device=device)
            part = part if left is None else part.triu(shift - left)
            seen[row:stop, key:end] = part if right is None else part.tril(shift + right)
        bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -math.inf)
        return bias.expand(*shape) + getattr(self, "_bias", 0)

    def _blocks(self, shape: Sequence[int]) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        return [((0, shape[-2]), (0, shape[-1]))]


@dataclass
class LowerTriangularMask(AttentionBias):
    def __init__(self, *, device: Any = None) -> None: ...

    def add_bias(self, bias: torch.Tensor) -> AttentionBias:
        return LowerTriangularMaskWithTensorBias(bias)


@dataclass
class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    _bias: torch.Tensor


@dataclass
class LowerTriangularFromBottomRightMask(AttentionBias):
    def __init__(self, *, device: Any = None) -> None: ...

    def make_local_attention(self, window_size: int) -> Any:
        return _made("LowerTriangularFromBottomRightLocalAttentionMask", window_size)


@dataclass
class _OfBlocks(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def _blocks(self, shape: Sequence[int]) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        ends = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if hasattr(self, "block_tables") or ends != tuple(shape[-2:]):
            name = type(self).__name__
            raise ValueError(f"{name} of {ends} has no array of shape {tuple(shape)}")
        return zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)


@dataclass
class BlockDiagonalMask(_OfBlocks):
    _batch_sizes: Lengths | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Lengths, kv_seqlen: Lengths | None = None, *, device: Any = None
    ) -> Self:
        rows = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or list(kv_seqlen) == list(q_seqlen):
            return cls(rows, rows)
        return cls(rows, _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Tensors) -> tuple[Self, torch.Tensor]:
        """Return the bias of tensors, (batch, length, ...), and all of their tokens."""
        return cls.from_tensor_lists_qkv(tensors, tensors)[:2]

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Tensors, tensors_k: Tensors, tensors_v: Tensors | None = None
    ) -> tuple[Self, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the bias of lists of tensors, and the tokens of each list."""
        lengths = [[n for x in xs for n in [x.shape[1]] * len(x)] for xs in (tensors_q, tensors_k)]
        bias, lists = cls.from_seqlens(*lengths), (tensors_q, tensors_k, tensors_v)
        bias._batch_sizes = [len(x) for x in tensors_q]
        tokens = [xs and torch.cat([x.flatten(0, 1)[None] for x in xs], 1) for xs in lists]
        return bias, *tokens  # type: ignore[return-value]

    def split_queries(self, tensor: torch.Tensor) -> Tensors:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: torch.Tensor) -> Tensors:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    split = split_queries

    def _as(self, name: str, *window: int) -> Any:
        return _made(name, self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *window)

    def make_causal(self) -> Any:
        return self._as("BlockDiagonalCausalMask")

    def make_causal_from_bottomright(self) -> Any:
        return self._as("BlockDiagonalCausalFromBottomRightMask")

    def make_local_attention(self, window_size: int) -> Any:
        return self._as("BlockDiagonalCausalLocalAttentionMask", window_size)

    def make_local_attention_from_bottomright(self, window_size: int) -> Any:
        return self._as("BlockDiagonalCausalLocalAttentionFromBottomRightMask", window_size)


class _OfUsedKeys(_OfBlocks):
    """Blocks of which some keys are used: padded, with gaps, or in pages."""

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Lengths, *values: Any, device: Any = None, **named: Any
    ) -> Self:
        """Return the bias of ``q_seqlen, kv_padding or kv_seqstarts, kv_seqlen, window``.

        Pages have no `kv_padding`, and ``block_tables, page_size`` after `kv_seqlen`.
        """
        own = [one.name.removeprefix("_") for one in fields(cls)[2:]]
        is_paged, has_gaps = "page_size" in own, "Gappy" in cls.__name__
        first = ["kv_seqstarts"] if has_gaps else [] if is_paged else ["kv_padding"]
        names = [*first, "kv_seqlen", *own]
        given = dict(zip(names, values, strict=False)) | named
        if {*given} - {"causal_diagonal"} != {*names} or len(given) < len(values) + len(named):
            raise TypeError(
                f"{cls.__name__}.from_seqlens takes q_seqlen, {', '.join(names)}; got q_seqlen,"
                f" {', '.join([*map(repr, values), *named])}"
            )
        lengths, starts, room = given["kv_seqlen"], given.get("kv_seqstarts", []), None
        if not has_gaps:
            pages = given["block_tables"].shape[1] if is_paged else 1
            room = pages * given["page_size" if is_paged else "kv_padding"]
            starts = [n * room for n in range(len(lengths) + 1)]
        rows = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        shift = is_paged and has_gaps
        keys = _SeqLenInfo.from_seqlens(
            lengths, device=device, starts=[*starts, *[-1] * shift], shift=shift, padding=room
        )
        return cls(rows, keys, *(given[name] for name in own))

    from_seqlens_local = from_seqlens


def _made(name: str, *values: Any) -> Any:
    return globals()[name](*values)


def _derived(name: str) -> type:
    """Return a class by its name, which says its family and the fields of its window."""
    space: dict[str, Any] = {"__module__": __name__}
    names = ["block_tables", "page_size"] if name.startswith("Paged") else []
    if "CausalLocal" in name or "TriangularFrom" in name:
        names.append("_window_size")
    elif "Local" in name:
        names += ["window_left", "window_right"]
    base: type = AttentionBias
    if "Keys" in name:
        paged, kind = "Paged" * name.startswith("Paged"), "Padded" if "Padded" in name else "Gappy"
        base = globals().get(f"{paged}BlockDiagonal{kind}KeysMask", _OfUsedKeys)
    elif "Block" in name:
        base = BlockDiagonalMask
        space |= dict.fromkeys(names, 0)
    return dataclass(type(name, (base,), {"__annotations__": dict.fromkeys(names, "Any"), **space}))


for _name in BIASES:
    globals().setdefault(_name, _derived(_name))
