"""Functions over caches, pages and packed sequences, called by the signatures of others."""

import numpy as np
import pytest

from polyattn import attention
from polyattn.conformance import CASES, ESSENTIAL
from polyattn.conformance.cases.cache_cases import CACHES, MEMORIES
from polyattn.conformance.functions.check import AGREES, NO_ARGUMENT, check_callable
from polyattn.conformance.functions.report import summarise, summary


def check(function, case):
    return check_callable(function, CASES[case], np.array, np.asarray)


def of_pallas(
    q, k_pages, v_pages, lengths, page_indices, *, attn_logits_soft_cap, pages_per_compute_block
):
    pools = (np.moveaxis(x, 0, 1) for x in (k_pages, v_pages))
    call = {"block_table": page_indices, "key_lengths": lengths, "softcap": attn_logits_soft_cap}
    return attention(q[:, :, None], *pools, scale=1.0, **call)[:, :, 0]


def of_flashinfer(
    q, k, v, kv_layout="NHD", window_left=-1, logits_soft_cap=None, sm_scale=None, **more
):
    assert kv_layout == "HND"
    window = None if window_left < 0 else (window_left, 0)
    options = {"window": window, "softcap": logits_soft_cap, "scale": sm_scale}
    return attention(q[..., None, :], k, v, **options, **more)[..., 0, :]


class OfFlashInfer:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert (float_workspace_buffer.dtype, kv_layout) == (np.uint8, "HND")

    def plan(
        self, indptr, indices, last_page_len, heads, groups, size, page, *, window_left, sm_scale,
        logits_soft_cap, q_data_type,
    ):  # fmt: skip
        many = np.diff(indptr)
        table = np.full((len(many), max(many.max(), 1)), -1)
        for n, number in enumerate(many):
            table[n, :number] = indices[indptr[n] : indptr[n + 1]]
        lengths = np.maximum(many - 1, 0) * page + last_page_len
        self.call = {"window_left": window_left, "sm_scale": sm_scale, "kv_layout": "HND"}
        self.call |= {"logits_soft_cap": logits_soft_cap}
        self.call |= {"block_table": table, "key_lengths": lengths}

    def run(self, q, paged_kv_cache):
        return of_flashinfer(q, *paged_kv_cache, **self.call)


def of_onnxruntime(
    query, key, value, past_key, past_value, seqlens_k, total_sequence_length, *, attention_bias,
    head_sink, num_heads, kv_num_heads, scale, softcap, causal, local_window_size,
):  # fmt: skip
    """The new keys are not yet in the memory."""
    q, *new = (
        np.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)
        for x, heads in ((query, num_heads), (key, kv_num_heads), (value, kv_num_heads))
    )
    ends, rows = seqlens_k + 1, q.shape[2]
    memory = [np.zeros((*x.shape[:2], int(ends.max()), x.shape[3]), x.dtype) for x in new]
    for past, into, x in zip((past_key, past_value), memory, new, strict=True):
        for n, end in enumerate(ends):
            first = max(end - rows, 0)
            into[n, :, :first] = 0 if past is None else past[n, :, :first]
            into[n, :, first:end] = x[n, :, : end - first]
    window = None if local_window_size < 0 else (local_window_size - 1, 0)
    output = attention(
        q, *memory, key_lengths=ends, is_causal=bool(causal), window=window, scale=scale,
        softcap=softcap, sinks=head_sink, bias=attention_bias,
    )  # fmt: skip
    assert total_sequence_length.shape == ()
    return (np.swapaxes(output, 1, 2).reshape((*query.shape[:2], -1)), *memory)


def of_transformers(module, query, key, value, attention_mask, scaling=None, dropout=0.0):
    assert query.shape[1] == key.shape[1] * module.num_key_value_groups
    options = {"is_causal": module.is_causal, "scale": scaling, "mask": attention_mask}
    return np.swapaxes(attention(query, key, value, **options), 1, 2), None


#: The functions, and how many of the cases of caches and of pages they have arguments for.
SERVING = {
    "pallas": (of_pallas, 10, 14),
    "flashinfer": (of_flashinfer, 11, 0),
    "flashinfer in pages": (OfFlashInfer, 11, 15),
    "onnxruntime": (of_onnxruntime, 15, 0),
    "transformers": (of_transformers, 13, 0),
}


@pytest.mark.parametrize("name", SERVING)
def test_functions_over_caches_and_pages_agree(name):
    function, *numbers = SERVING[name]
    agreed = []
    for memory in MEMORIES:
        found = {case: check(function, case) for case in CACHES if case.startswith(memory)}
        agreed.append(sum(finding.status == AGREES for finding in found.values()))
        assert {f.status for f in found.values()} <= {AGREES, NO_ARGUMENT}, found
    assert agreed == numbers


def test_nan_in_unused_slots_that_reaches_the_output_is_named():
    def leaks(q, k_pages, v_pages, lengths, page_indices, **more):
        used = v_pages[:, page_indices[np.arange(len(lengths)), (lengths - 1) // 4]]
        return of_pallas(q, k_pages, v_pages, lengths, page_indices, **more) + 0 * used.sum()

    found = check(leaks, "pages, nan in unused slots")
    assert found.interpretation == "a hidden NaN or infinity reaches the row"


def test_parts_by_themselves_may_have_other_bits():
    def by_rows(query, key, value, *, key_lengths=None, is_causal=False, block_table=None):
        call = {"key_lengths": key_lengths, "block_table": block_table, "is_causal": is_causal}
        output = attention(query, key, value, **call)
        return output if query.shape[-2] == 1 else np.nextafter(output, np.float32(9))

    (items, rows) = summarise(by_rows, ESSENTIAL.values(), np.array, np.asarray)[-2:]
    assert (items.count(AGREES), rows.count(AGREES)) == (3, 2)
    assert summary(items)[2] == ""
    assert summary(rows)[2] == "other bits than together (2)"


def test_causality_beside_a_mask_is_asked_of_no_function_of_transformers():
    finding = check(of_transformers, "causal and mask share no key")
    assert (finding.status, finding.missing) == (NO_ARGUMENT, "is_causal beside a mask")
