"""The examples that FlexAttention is published with, as they stand there, on arrays of any library.

They are of "FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention"
(PyTorch's blog, 2024) and, the dilated window and NATTEN's own kernel, which stays inside of the
image, of its attention-gym. Those that call torch by name call the same function of the arrays'
library here: `torch.tanh` and `torch.where` are `xp`'s, `torch.abs(x)` and `x.abs()` are `abs(x)`,
and NATTEN's `clamp` is by `where`. Functions count rows and keys from the first, whatever
``query_offset=`` is.
"""

import functools
import operator
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
import pytest
from optional import flex, jax, torch

from polyattn import attention, masks
from polyattn.conformance import Target, assert_accurate, make_case

pytestmark = pytest.mark.slow

B, H = 2, 4
HEIGHT, WIDTH, REACH = 6, 8, 2
SLIDING_WINDOW, DILATION = 12, 3
SOFTCAP = 2
LENGTH = HEIGHT * WIDTH

PREFIX_LENGTH = np.array([5, 30])
DOCUMENT_ID = np.repeat([0, 1, 2, 3], [7, 20, 1, 20])
ALIBI_BIAS = np.array([0.5, 0.25, 0.125, 0.0625])


class Example(NamedTuple):
    """Functions over arrays of one library."""

    mask_mods: tuple[Any, ...] = ()
    join: Any = operator.and_
    score_mod: Any = None

    def options(self):
        """The options as attention takes them: one function, or functions joined as values."""
        mask, *more = self.mask_mods or (None,)
        for function in more:
            mask = self.join(masks.rule(mask), masks.rule(function))
        given = {"mask": mask, "score_mod": self.score_mod}
        return {name: option for name, option in given.items() if option is not None}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window_causal(b, h, q_idx, kv_idx):
    causal_mask = q_idx >= kv_idx
    window_mask = q_idx - kv_idx <= SLIDING_WINDOW
    return causal_mask & window_mask


def dilated_sliding_window(b, h, q_idx, kv_idx):
    diff = abs(q_idx - kv_idx)
    in_window = diff <= SLIDING_WINDOW
    is_dilated = (diff % DILATION) == 0
    return in_window & is_dilated


def get_x_y(idx):
    return idx // WIDTH, idx % WIDTH


def relative_positional(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def examples(to):
    """All of them, with arrays that `to` makes of NumPy's."""
    prefix_length, document_id = to(PREFIX_LENGTH), to(DOCUMENT_ID)
    xp = array_api_compat.array_namespace(document_id)

    def prefix_mask(b, h, q_idx, kv_idx):
        return kv_idx <= prefix_length[b]

    def document_masking(b, h, q_idx, kv_idx):
        return document_id[q_idx] == document_id[kv_idx]

    alibi_bias = to(ALIBI_BIAS)

    def alibi(score, b, h, q_idx, kv_idx):
        bias = alibi_bias[h] * (kv_idx - q_idx)
        return score + bias

    def soft_cap(score, b, h, q_idx, kv_idx):
        score = score / SOFTCAP
        score = xp.tanh(score)
        score = score * SOFTCAP
        return score

    def clamped(centre, last):
        centre = xp.where(centre < REACH, REACH, centre)
        return xp.where(centre > last - REACH, last - REACH, centre)

    def natten_mask(b, h, q_idx, kv_idx):
        q_x, q_y = get_x_y(q_idx)
        kv_x, kv_y = get_x_y(kv_idx)
        horizontal_mask = abs(clamped(q_x, HEIGHT - 1) - kv_x) <= REACH
        vertical_mask = abs(clamped(q_y, WIDTH - 1) - kv_y) <= REACH
        return horizontal_mask & vertical_mask

    return {
        "causal": Example((causal,)),
        "sliding window": Example((sliding_window_causal,)),
        "prefix LM": Example((prefix_mask, causal), operator.or_),
        "documents": Example((document_masking,)),
        "dilated": Example((dilated_sliding_window,)),
        "NATTEN": Example((natten_mask,)),
        "relative": Example(score_mod=relative_positional),
        "softcap": Example(score_mod=soft_cap),
        "causal ALiBi": Example((causal,), score_mod=alibi),
    }


NAMES = tuple(examples(np.asarray))
LENGTHS = {"L = S": (LENGTH, LENGTH), "L < S": (19, LENGTH)}

each_example = pytest.mark.parametrize("name", NAMES)
each_shape = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    """A library, in which float64 stays float64."""
    with jax.enable_x64(True):
        yield Target(request.param)


@functools.cache
def call(name, lengths):
    """The case of an example, by its functions of NumPy's arrays: what the oracle evaluates."""
    queries, keys = lengths
    return make_case(
        f"{name}, {lengths}",
        **{"dtype": "float64", "batch": (B,), "H": H, "L": queries, "S": keys},
        **examples(np.asarray)[name].options(),
    )


def torchs_own(example, case):
    """What torch's `flex_attention` gives, by its own arithmetic."""
    query, key, value = (torch.asarray(x) for x in case.arguments()[0])
    block_mask = None
    if example.mask_mods:
        joined = {operator.and_: flex.and_masks, operator.or_: flex.or_masks}[example.join]
        mask_mod = joined(*example.mask_mods) if example.mask_mods[1:] else example.mask_mods[0]
        block_mask = flex.create_block_mask(mask_mod, B, H, case.L, case.S, device="cpu")
    score_mod = example.score_mod
    return flex.flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@each_shape
@each_example
def test_torchs_own_result_is_that_of_our_oracle(name, lengths):
    """So that what is held to one is held to the other."""
    case = call(name, lengths)
    assert_accurate(torchs_own(examples(torch.asarray)[name], case), case)


@each_shape
@each_example
def test_a_published_function_runs_as_it_is(library, name, lengths):
    case = call(name, lengths)
    arrays, example = map(library.to, case.arguments()[0]), examples(library.to)[name]
    assert_accurate(library.back(attention(*arrays, **example.options())), case)
