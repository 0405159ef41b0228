"""The examples that FlexAttention is published with, as they stand there, on arrays of any library.

They are of "FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention"
(PyTorch's blog, 2024) and, the dilated window and NATTEN's own kernel, which stays inside of the
image, of its attention-gym. Those that call torch by name call the same function of the arrays'
library here: `torch.tanh` and `torch.where` are `xp`'s, `torch.abs(x)` and `x.abs()` are `abs(x)`,
and NATTEN's `clamp` is by `where`. Functions count rows and keys from the first, whatever
``query_offset=`` is.
"""

import array_api_compat
import numpy as np
import pytest
from arrays import close
from optional import flex, jax, torch

from polyattn import attention, masks
from polyattn.conformance import Target

pytestmark = pytest.mark.slow

B, H, D = 2, 4, 16
HEIGHT, WIDTH, REACH = 6, 8, 2
SLIDING_WINDOW, DILATION = 12, 3
SOFTCAP = 2
LENGTH = HEIGHT * WIDTH

PREFIX_LENGTH = np.array([5, 30])
DOCUMENT_ID = np.repeat([0, 1, 2, 3], [7, 20, 1, 20])
ALIBI_BIAS = np.array([0.5, 0.25, 0.125, 0.0625])


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
    """Functions for a mask, of which one must show a key, and for scores, with arrays of `to`."""
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
        "prefix LM": ((prefix_mask, causal), None),
        "sliding window": ((sliding_window_causal,), None),
        "documents": ((document_masking,), None),
        "dilated": ((dilated_sliding_window,), None),
        "NATTEN": ((natten_mask,), None),
        "relative": ((), relative_positional),
        "softcap": ((), soft_cap),
        "causal ALiBi": ((causal,), alibi),
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", examples(np.asarray))
def test_a_published_function_gives_what_flex_attention_does(name):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(B, H, n, D)) for n in (19, LENGTH, LENGTH)]
    functions, score_mod = examples(torch.asarray)[name]
    block_mask = None
    if functions:
        mask_mod = flex.or_masks(*functions)
        block_mask = flex.create_block_mask(mask_mod, B, H, 19, LENGTH, device="cpu")
    expected = flex.flex_attention(
        *map(torch.asarray, arrays), score_mod=score_mod, block_mask=block_mask
    )
    with jax.enable_x64(True):
        for library in map(Target, ("numpy", "torch", "jax")):
            functions, score_mod = examples(library.to)[name]
            mask, *more = functions or (None,)
            for function in more:
                mask = masks.rule(mask) | masks.rule(function)
            options = {"mask": mask, "score_mod": score_mod}
            given = {option: one for option, one in options.items() if one is not None}
            close(library.back(attention(*map(library.to, arrays), **given)), expected, 1e3)
