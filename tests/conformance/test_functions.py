"""Functions of others on our cases: what they are given, what is said of them, and the page."""

import functools
import importlib
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from optional import torch

from polyattn import attention, attention_partial
from polyattn.conformance import CASES, ESSENTIAL, make_case
from polyattn.conformance.cases.catalogue import IN_ORDER
from polyattn.conformance.cases.gradient_cases import GRADIENT_CASES
from polyattn.conformance.functions.check import (
    AGREES,
    DIFFERS,
    NO_ARGUMENT,
    RAISES,
    NoArgumentError,
    arguments_for,
    check_callable,
    check_gradients,
    check_logsumexp,
    load,
    target_of,
)
from polyattn.conformance.functions.report import lines, summarise, summary
from polyattn.dialects import scaled_dot_product_attention
from polyattn.dialects.flash_attn import flash_attn_func

DOCS = Path(__file__).parents[2] / "docs"
TOP_LEFT = "rows count from the first key (query_offset=0)"


def check(function, case):
    return check_callable(function, CASES[case], np.array, np.asarray)


def report_on(function, *names):
    """Return the rows of the report of some cases, by name."""
    cases = [CASES[name] for name in names]
    return {row.name: row for row in summarise(function, cases, np.array, np.asarray)}


def right(query, key, value, *, mask=None, is_causal=False, window=None, scale=None):
    """Attention with few arguments, whose mask is an array."""
    return attention(query, key, value, mask=mask, is_causal=is_causal, window=window, scale=scale)


# ---- results -----------------------------------------------------------------------------------


def writes(query, key, value):
    output = attention(query, key, value)
    value[...] = 0
    return output


WRONG = {
    "an input is written to": writes,
    "the output is float64": lambda *x: attention(*x).astype("float64"),
    "the output has another shape": lambda *x: attention(*x)[..., :1],
    "": lambda *x: (1.01 * attention(*x)).astype("float32"),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_said(said):
    finding = check(lambda query, key, value: WRONG[said](query, key, value), "plain")
    assert (finding.status, finding.interpretation) == (DIFFERS, said)


async def later(query, key, value):
    return query


def one_by_one(query, key, value):
    yield query


def refuses(*arrays):
    raise TypeError("not these\nnor any other")


NO_ARRAYS = {
    "generator": (one_by_one, "TypeError: it returns a value of type generator, and not an array"),
    "coroutine": (later, "TypeError: it returns a value of type coroutine, and not an array"),
    "objects": (lambda *x: np.array([None]), "TypeError: it returns an array of object"),
    "exit": (lambda *x: sys.exit("no GPU"), "SystemExit: it calls sys.exit('no GPU')"),
    "error": (refuses, "TypeError: not these"),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
@pytest.mark.filterwarnings("error")
def test_a_function_that_returns_no_array_ends_no_report(name):
    function, said = NO_ARRAYS[name]
    rows = report_on(lambda query, key, value: function(query, key, value), "plain", "D = 80")
    found = [f for row in rows.values() for f in row.findings.values() if f.status != NO_ARGUMENT]
    assert len(found) >= 2
    assert {(f.status, f.error) for f in found} == {(RAISES, said)}


def test_parts_by_themselves_may_have_other_bits():
    def by_rows(query, key, value, *, key_lengths=None, is_causal=False, block_table=None):
        call = {"key_lengths": key_lengths, "block_table": block_table, "is_causal": is_causal}
        output = attention(query, key, value, **call)
        return output if query.shape[-2] == 1 else np.nextafter(output, np.float32(9))

    rows = report_on(by_rows, "plain", "cache, new rows", "pages, new rows")
    items, rows = rows["items by themselves"], rows["rows by themselves"]
    assert (items.count(AGREES), rows.count(AGREES)) == (3, 2)
    assert summary(items)[2] == ""
    assert summary(rows)[2] == "other bits than together (2)"


def test_nan_in_unused_slots_that_reaches_the_output_is_named():
    def leaks(query, key, value, *, block_table, key_lengths):
        last = block_table[np.arange(len(key_lengths)), (key_lengths - 1) // key.shape[-2]]
        output = attention(query, key, value, block_table=block_table, key_lengths=key_lengths)
        return output + 0 * value[last].sum()

    found = check(leaks, "pages, nan in unused slots")
    assert found.interpretation == "a hidden NaN or infinity reaches the row"


# ---- what a kernel author writes by mistake ----------------------------------------------------


def test_essential_cases_find_a_softcap_after_the_mask():
    def kernel(query, key, value, attn_mask=None, is_causal=False, softcap=None):
        if softcap is None:
            return scaled_dot_product_attention(query, key, value, attn_mask)
        s = query @ key.mT / np.sqrt(query.shape[-1])
        if is_causal:
            s = np.where(np.tri(*s.shape[-2:]), s, -1e30)
        elif attn_mask is not None:
            s = np.where(attn_mask, s, -1e30) if attn_mask.dtype == bool else s + attn_mask
        weights = np.exp(softcap * np.tanh(s / softcap))
        return (weights / weights.sum(-1, keepdims=True) @ value).astype(query.dtype)

    in_order = [name for name in ESSENTIAL if name in IN_ORDER]
    found = summary(report_on(kernel, *in_order)["order of the steps"])[2]
    assert found.startswith("softcap comes after the bias (1); softcap comes after the mask (2)")


def test_both_items_of_a_tuple_are_checked():
    def kernel(query, key, value, is_causal=False):
        output, lse = attention_partial(query, key, value, is_causal=is_causal)
        return output, lse / np.log(2.0)

    rows = report_on(kernel, "plain", "causal")
    head, *others = lines(rows.values())
    assert head.endswith("it returns a tuple of 2")
    assert not any("tuple" in row for row in others)
    assert summary(rows["logsumexp"])[2].startswith("the logsumexp is in base 2")
    right = report_on(attention_partial, "plain", "causal")["logsumexp"]
    assert summary(right)[2] == ""


def test_a_function_without_score_mod_gets_masks_as_arrays():
    assert check(right, "mask function").missing == "mask as a function"
    assert check(right, "mask array").status == AGREES
    assert check(attention, "mask function").status == AGREES


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda lse: lse / np.log(2.0), "the logsumexp is in base 2"),
        (
            lambda lse: np.where(np.isneginf(lse), np.inf, lse),
            "the logsumexp of a row without keys is inf",
        ),
        (lambda lse: lse[..., None], "the logsumexp has another shape"),
    ],
)
def test_the_logsumexp_of_a_known_signature_is_checked(wrong, said):
    @functools.wraps(flash_attn_func)
    def kernel(q, k, v, *, return_attn_probs=False, **options):
        output, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        return (output, wrong(lse), None) if return_attn_probs else output

    name = "causal, L > S" if "inf" in said else "causal"
    finding = check_logsumexp(kernel, CASES[name], np.array, np.asarray)
    assert (finding.status, finding.interpretation) == (DIFFERS, said)
    assert check(kernel, name)[0::4] == (AGREES, "")


# ---- arguments ---------------------------------------------------------------------------------


def test_arguments_go_by_name_else_to_attn_mask():
    mask, bias = np.array([True, False]), np.array([1.0, 2.0], "float16")

    def of_torch(query, key, value, attn_mask=None, is_causal=False, enable_gqa=False): ...
    def of_jax(query, key, value, bias=None, mask=None): ...
    def of_anything(query, key, value, **options): ...

    both = {"mask": mask, "bias": bias}
    joined = arguments_for(of_torch, both)["attn_mask"]
    assert (joined.dtype, joined.tolist()) == ("float16", [1, -np.inf])
    assert arguments_for(of_torch, {"mask": mask}) == {"attn_mask": mask}
    assert arguments_for(of_torch, {"bias": bias}, grouped=True) == {
        "attn_mask": bias,
        "enable_gqa": True,
    }
    assert arguments_for(of_jax, both, grouped=True) == both
    assert arguments_for(of_anything, both | {"sinks": 1}) == both | {"sinks": 1}
    with pytest.raises(NoArgumentError, match="window, mask as a function"):
        arguments_for(of_torch, {"window": (1, 1), "mask": lambda b, h, i, j: True})


def test_only_options_with_an_effect_need_an_argument_and_an_adapter_may_lack_one():
    case = make_case("offset alone", query_offset=2)
    assert check_callable(right, case, np.array, np.asarray).status == AGREES
    finding = check(right, "softcap")
    assert (finding.status, finding.missing) == (NO_ARGUMENT, "softcap")

    def adapter(query, key, value, mask=None):
        raise NoArgumentError("mask of rank 4")

    assert check(adapter, "mask array").missing == "mask of rank 4"
    with pytest.raises(ValueError, match="dropout"):
        check(right, "dropout")


# ---- load --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("numpy:", "got 'numpy:'"),
        ("no_such_module.py:norm", "No module named 'no_such_module'; leave out the .py"),
        ("numpy:matmull", "did you mean 'matmul'"),
        ("numpy:pi", "'numpy:pi' is not a function; it is 3.14"),
        ("a_script_that_ends:attend", "imported: SystemExit: it calls sys.exit(3)"),
    ],
)
def test_load_says_what_is_wrong(spec, reason, tmp_path, monkeypatch):
    (tmp_path / "a_script_that_ends.py").write_text("import sys; sys.exit(3)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("numpy:linalg.norm") is np.linalg.norm
    with pytest.raises(ValueError, match=re.escape(reason)):
        load(spec)


# ---- signatures ----------------------------------------------------------------------------------

KNOWN = {
    "flash_attn:flash_attn_func": {"causal", "window", "softcap", "grouped_heads", "logsumexp"},
    **{
        name: {"causal", "window", "scale", "caches and pages", "items by themselves"}
        for name in (
            *("flash_attn:flash_attn_with_kvcache", "flash_attn_interface:flash_attn_varlen_func"),
            "torch:varlen_attn",
        )
    },
    "jax:dot_product_attention": {"bias", "mask", "window", "scale"},
    "keras:dot_product_attention": {"bias", "mask", "softcap", "scale"},
    "xformers:memory_efficient_attention": {"bias", "mask", "scale"},
    "mlx": {"bias", "mask", "causal", "sinks", "scale"},
}


def of_mlx(q, k, v, *, scale, mask=None, sinks=None, force_fused=False):
    """Attention with the arguments of MLX's function, whose own has no signature to inspect."""
    options = {"is_causal": True} if isinstance(mask, str) else {"mask": mask}
    if isinstance(mask, np.ndarray) and mask.dtype != bool:
        options = {"bias": mask}
    return attention(q, k, v, scale=scale, sinks=sinks, **options)


def known(name):
    return of_mlx if name == "mlx" else load(f"polyattn.dialects.{name}")


@pytest.mark.parametrize("name", KNOWN)
def test_the_signatures_of_the_dialects_are_known(name):
    """All that a function has an argument for is asked; only causal rows may be elsewhere."""
    cases = {n: case for n, case in ESSENTIAL.items() if case.dtype == "float32"}
    rows = summarise(known(name), cases.values(), np.array, np.asarray)
    for row in rows:
        assert row.count(RAISES) == 0, row
        wrong = {f.interpretation for f in row.findings.values() if f.status == DIFFERS}
        assert wrong <= ({TOP_LEFT} if name.startswith(("jax", "keras")) else set()), row.name
    assert KNOWN[name] <= {row.name for row in rows if row.count(AGREES)}


def test_a_signature_of_another_library_lacks_some_arguments():
    assert check(of_mlx, "causal x mask array").status == NO_ARGUMENT
    assert check(of_mlx, "window").missing == "window"
    names = importlib.import_module("polyattn.dialects._names").NAMES
    for entry in KNOWN:
        given = inspect.signature(known(entry)).parameters
        one = next(n for n in names.values() if n.marks <= given.keys())
        # FlashAttention 3 has no pages of packed sequences.
        assert set(one.options.values()) - {"block_table"} <= given.keys(), entry


def test_arrays_on_the_device_of_a_backend():
    assert str(target_of("torch:nn", "torch:cpu").to(np.ones(1)).device) == "cpu"
    assert target_of("flash_attn:flash_attn_func", None).library == "torch"


# ---- gradients -----------------------------------------------------------------------------------


def test_wrong_gradients_are_named():
    def kernel(query, key, value, is_causal=False, bias=None):
        if bias is not None:  # twice the gradient, and the same numbers
            query, bias = (2 * x - x.detach() for x in (query, bias))
        return attention(query, key, value, bias=bias, is_causal=is_causal)

    for case, found in {"bias": (DIFFERS, "by query, bias"), "causal": (AGREES, "")}.items():
        finding = check_gradients(kernel, GRADIENT_CASES[case], torch.asarray, np.asarray)
        assert (finding.status, finding.interpretation) == found
