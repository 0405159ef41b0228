"""Check functions of others with our cases: differences are found and explained, as docs say."""

import functools
import importlib
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from polyattn import attention, attention_partial
from polyattn.conformance import CASES, ESSENTIAL, make_case
from polyattn.conformance.cases.cache_cases import CACHES, MEMORIES, of_item
from polyattn.conformance.functions.check import (
    AGREES,
    DIFFERS,
    NO_ARGUMENT,
    RAISES,
    NoArgumentError,
    arguments_for,
    check_callable,
    check_logsumexp,
    check_parts,
    load,
    target_of,
)
from polyattn.conformance.functions.interpretations import (
    INTERPRETATIONS,
    _in_plain_terms,
    interpretations_of,
)
from polyattn.conformance.functions.report import summarise, summary
from polyattn.conformance.reference.textbook import textbook
from polyattn.dialects import scaled_dot_product_attention
from polyattn.dialects.flash_attn import flash_attn_func

DOCS = Path(__file__).parents[2] / "docs"


def check(function, case):
    return check_callable(function, case, np.array, np.asarray)


def attention_with(*faults):
    """Return attention in NumPy, right but for its faults."""
    wide = "float32" if "float32" in faults else "float64"

    def attend(
        query,
        key,
        value,
        *,
        mask=None,
        bias=None,
        is_causal=False,
        window=(None, None),
        scale=None,
        softcap=None,
    ):
        if callable(mask):
            raise NoArgumentError("mask as a function")
        q, k, v = (x.astype(wide) for x in (query, key, value))
        L, S = q.shape[-2], k.shape[-2]  # noqa: N806
        if q.ndim > 2:
            times = q.shape[-3] // k.shape[-3]
            if "tiled" in faults:
                k, v = (np.concatenate([x] * times, -3) for x in (k, v))
            else:
                k, v = (np.repeat(x, times, -3) for x in (k, v))
        if scale is None or "scale" in faults:
            scale = 1 / np.sqrt(q.shape[-1])
        if "float32 scale" in faults:
            scale = float(np.float32(scale))
        if "unscaled" in faults:
            scale = 1
        if "scaled by 1 / D" in faults:
            scale = scale**2
        s = q @ k.mT * scale
        if "negative scale" in faults and scale < 0:
            s = s * np.nan
        if softcap is not None and not {"capped last", "capped under no mask"} & {*faults}:
            s = softcap * np.tanh(s / softcap)
        if bias is not None:
            if "padded" in faults and bias.shape[-1] < S:
                bias = np.where(np.arange(S) < 1, bias, -np.inf)
            s = s + (bias * scale if "scaled bias" in faults else bias)
        if softcap is not None and "capped last" in faults:
            s = softcap * np.tanh(s / softcap)
        if "mask added" in faults and mask is not None:
            s, mask = s + mask, None
        if "deaf" in faults:
            mask = None
        i, j = np.arange(L)[:, None], np.arange(S)
        p = i if "top-left" in faults else i + S - L
        left, right = window
        seen = np.ones(s.shape, bool)
        if is_causal:
            seen &= j <= p - ("strict" in faults)
        if left is not None:
            seen &= j >= p - left + ("short left" in faults)
        if right is not None:
            seen &= j <= p + right + ("long right" in faults)
        if mask is not None:
            seen &= ~mask if "inverted" in faults else mask
        if bias is not None:
            seen &= ~np.isneginf(bias)
        s = np.where(seen, s, np.finfo(wide).min if "mean" in faults else -np.inf)
        if softcap is not None and "capped under no mask" in faults:
            s = softcap * np.tanh(s / softcap)
        highest = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
        if "NaN" not in faults:
            highest = np.where(np.isneginf(highest), 0, highest)
        weights = np.exp(s - highest)
        total = weights.sum(-1, keepdims=True)
        weights = weights / (total if "NaN" in faults else np.where(total == 0, 1, total))
        if faults:
            return (weights @ v).astype(query.dtype)
        # Hidden values are not even multiplied by 0.
        terms = weights[..., None] * np.where(seen[..., None], v[..., None, :, :], 0)
        return terms.sum(-2).astype(query.dtype)

    return attend


def test_what_is_right_agrees():
    rows = summarise(attention_with(), ESSENTIAL.values(), np.array, np.asarray)
    assert {"causal", "window", "scale", "rank", "float64", "NaN and infinity"} <= {
        row.name for row in rows
    }
    assert sum(row.count(AGREES) for row in rows) > 60
    for row in rows:
        assert row.count(DIFFERS) == 0
        wrong = {n for n, f in row.findings.items() if f.status == RAISES}
        # NumPy broadcasts neither of these as the semantics do.
        assert wrong <= {"broadcast batch", "S = 0, rank 2", "no head"}
        assert row.interpretations == {}


TOP_LEFT = "rows count from the first key (query_offset=0)"
MEAN = "a row without keys is the mean of the values"
LESS_LEFT = "rows see one key less to the left"
MORE_RIGHT = "rows see one key more to the right"
PADDED = "the last axis of a mask is padded rather than broadcast"
LEAST = "softcap comes after the mask"
OF_FALSE = "a mask of False hides no key"
FAULTS = {
    "causal from the first": (["top-left"], {"is_causal": True, "L": 7, "S": 17}, TOP_LEFT),
    "more rows than keys": (["top-left"], {"is_causal": True, "L": 17, "S": 7}, TOP_LEFT),
    "window from the first": (["top-left"], {"window": (3, 2), "L": 7, "S": 17}, TOP_LEFT),
    "empty rows, mean": (["mean"], "mask hides some rows", MEAN),
    "empty rows by bias, NaN": (["NaN"], "bias hides some rows", "a row without keys is NaN"),
    "empty rows by causal, NaN": (["NaN"], "causal, L > S", "a row without keys is NaN"),
    "both": (["top-left", "mean"], {"window": (3, 2), "L": 17, "S": 7}, f"{TOP_LEFT} and {MEAN}"),
    "heads": (["tiled"], "grouped heads", "query head h reads key/value head h % G"),
    "scale": (["scale"], "scale", "scale is ignored"),
    "softcap": (["capped last"], "softcap and bias", "softcap comes after the bias"),
    "window to the left": (["short left"], "window", LESS_LEFT),
    "window to the right": (["long right"], "window", MORE_RIGHT),
    "window to both": (["short left", "long right"], "window", f"{LESS_LEFT} and {MORE_RIGHT}"),
    "poison": (["leak"], "nan under mask array", "a hidden NaN or infinity reaches the row"),
    "infinity": (["leak"], "inf under bias", "a hidden NaN or infinity reaches the row"),
    "precision": (["float32"], "plain, float64", "computed in float32"),
    "rounded scale": (["float32 scale"], "plain, float64", "the scale is rounded to float32"),
    "polarity": (["inverted"], "mask array", "True in a mask leaves a key out"),
    "mask as numbers": (["mask added"], "mask array", "a mask is added as 0 and 1"),
    "padded": (["padded"], "bias (B, 1, L, 1)", PADDED),
    "NaN": (["negative scale"], "scale below 0", "every row is NaN"),
    "softcap, mask": (["capped under no mask"], "softcap, then mask array", LEAST),
    "softcap, causal": (["capped under no mask"], "softcap, then causal", LEAST),
    "softcap, window": (["capped under no mask"], "softcap, then window", LEAST),
    "softcap, then": (["capped last"], "softcap, then bias", "softcap comes after the bias"),
    "scaled bias": (["scaled bias"], "scale, then bias", "the scale multiplies the bias too"),
    "no scale": (["unscaled"], "plain", "scores are not scaled"),
    "scale of 1 / D": (["scaled by 1 / D"], "causal", "the scale is squared (1 / D)"),
    "causal, strictly": (["strict"], "causal", "rows see one key less to the right"),
    "mask of False, inverted": (["inverted"], "mask hides all", OF_FALSE),
    "mask of False, ignored": (["deaf"], "mask hides all", OF_FALSE),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_difference_is_interpreted(name):
    faults, case, interpretation = FAULTS[name]
    case = CASES[case] if isinstance(case, str) else make_case(name, **case)
    assert check(attention_with("leak"), case).status == AGREES or case.poison is not None
    finding = check(attention_with(*faults), case)
    assert (finding.status, finding.interpretation) == (DIFFERS, interpretation)
    assert finding.deviation.units > 10


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_in_16_bits_are_named(dtype):
    case = make_case("sums", dtype=dtype, values="keys of mean 64", L=5, S=257, D=32)
    finding = check(lambda *arrays: textbook(*arrays)[0], case)
    assert (finding.status, finding.interpretation) == (DIFFERS, f"computed in {dtype}")


@pytest.mark.parametrize(
    "cases", [ESSENTIAL, pytest.param(CASES, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_pair_of_meanings_of_every_case_is_a_call(cases):
    """The textbook evaluates each: one row of the scores, once for all cases that ask the same."""
    asked = set()
    for case in cases.values():
        shapes = case.L > case.S, 0 in (*case.score_shape, case.D, case.value_size)
        for names, call in interpretations_of(_in_plain_terms(*case.arguments())):
            if (key := (case.features, names, case.poison is None, shapes)) in asked:
                continue
            asked.add(key)
            call.pop("computed in", None)
            with np.errstate(all="ignore"):
                output, _ = textbook(**call, rows=case.rows and case.rows[:1])
            assert output.shape[-1] == case.value_size, names
    alone = {name for _, names, *_ in asked for name in names if len(names) == 1}
    assert alone == INTERPRETATIONS.keys() or cases is ESSENTIAL
    assert sum(len(names) == 2 for _, names, *_ in asked) > 2000


def test_an_unexplained_difference_has_no_interpretation():
    finding = check(lambda q, k, v: attention_with()(q, k, v) + q, CASES["plain"])
    assert (finding.status, finding.interpretation) == (DIFFERS, "")
    assert "limit" in finding.deviation.fault


def writes(query, key, value):
    output = attention_with()(query, key, value)
    value[...] = 0
    return output


@pytest.mark.parametrize(
    ("function", "interpretation"),
    [
        (writes, "an input is written to"),
        (lambda *x: attention_with()(*x).astype("float64"), "the output is float64"),
        (lambda *x: attention_with()(*x)[..., :1], "the output has another shape"),
    ],
)
def test_beyond_the_numbers(function, interpretation):
    finding = check(function, CASES["plain"])
    assert (finding.status, finding.interpretation) == (DIFFERS, interpretation)


def test_a_function_that_raises():
    def refuse(query, key, value):
        raise TypeError("not these\nnor any other")

    finding = check(refuse, CASES["plain"])
    assert finding[:3] == (RAISES, None, "TypeError: not these")


async def later(query, key, value):
    return query


def one_by_one(query, key, value):
    yield query


NO_ARRAYS = {
    "None": (lambda *x: None, "TypeError: it returns None, and not an array"),
    "generator": (one_by_one, "TypeError: it returns a value of type generator, and not an array"),
    "coroutine": (later, "TypeError: it returns a value of type coroutine, and not an array"),
    "number": (lambda *x: 0.5, "TypeError: it returns a value of type float, and not an array"),
    "no output": (lambda *x: (), "TypeError: it returns a value of type tuple, and not an array"),
    "objects": (lambda *x: np.array([None]), "TypeError: it returns an array of object"),
    "exit": (lambda *x: sys.exit("no GPU"), "SystemExit: it calls sys.exit('no GPU')"),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
@pytest.mark.filterwarnings("error")
def test_what_returns_no_array_raises_in_every_case_and_ends_no_report(name):
    function, said = NO_ARRAYS[name]

    def given(query, key, value):
        return function(query, key, value)

    rows = summarise(given, ESSENTIAL.values(), np.array, np.asarray)
    found = [f for row in rows for f in row.findings.values() if f.status != NO_ARGUMENT]
    assert len(found) > 30
    assert {(f.status, f.error) for f in found} == {(RAISES, said)}


def test_outputs_of_parts_that_do_not_fit_together_are_said():
    finding = check_parts(lambda *x: np.float32(0), CASES["plain"], np.array, np.asarray, of_item)
    assert finding.error == "ValueError: the outputs of the parts do not fit together"


def test_a_function_that_is_a_little_off_is_reported_to_the_end():
    def off(query, key, value, mask=None, bias=None, is_causal=False, window=(None, None)):
        options = {"mask": mask, "bias": bias, "is_causal": is_causal, "window": window}
        return (1.01 * attention_with()(query, key, value, **options)).astype(query.dtype)

    cases = [CASES[name] for name in ("plain", "nan under mask array", "nan seen through a window")]
    rows = summarise(off, cases, np.array, np.asarray)
    by_name = {row.name: row for row in rows}
    assert by_name["float32"].interpretations == {"": 1}
    assert by_name["NaN and infinity"].interpretations == {"": 2}


# ---- what a kernel author writes by mistake ----------------------------------------------------


def report_on(function):
    """Return the remarks of the quick report by row."""
    rows = summarise(function, ESSENTIAL.values(), np.array, np.asarray)
    return {row.name: summary(row)[2] for row in rows}


def test_a_softcap_after_the_mask_is_found_by_the_quick_choice():
    def kernel(query, key, value, attn_mask=None, is_causal=False, softcap=None):
        names = {"mask" if attn_mask is not None and attn_mask.dtype == bool else "bias": attn_mask}
        options = {"is_causal": is_causal, "softcap": softcap, **names}
        return attention_with("capped under no mask")(query, key, value, **options)

    found = report_on(kernel)
    assert found["softcap"] == found["mask"] == found["causal"] == ""
    assert found["order of the steps"].startswith(f"softcap comes after the bias (1); {LEAST} (2)")


def test_a_kernel_of_heads_after_length_is_told_so():
    def kernel(query, key, value, is_causal=False, scale=None):
        swapped = (np.swapaxes(x, -3, -2) for x in (query, key, value))
        output = attention_with()(*swapped, is_causal=is_causal, scale=scale)
        return np.swapaxes(output, -3, -2)

    found = report_on(kernel)
    for row in ("causal", "scale", "grouped_heads", "float16", "float64", "memory layouts"):
        assert re.fullmatch(r"heads come after length \(\d\)", found[row]), row


def test_a_kernel_that_returns_a_tuple_is_told_so_and_both_are_looked_at():
    def kernel(query, key, value, is_causal=False):
        output, lse = attention_partial(query, key, value, is_causal=is_causal)
        return output, lse / np.log(2.0)

    found = report_on(kernel)
    assert found["causal"] == "it returns a tuple of 2 (1)"
    assert found["logsumexp"].startswith("the logsumexp is in base 2 (3)")
    right = report_on(attention_partial)
    assert right["logsumexp"] == ""


def test_a_kernel_that_takes_masks_as_arrays_is_given_no_function():
    def kernel(query, key, value, mask=None, **others):
        assert not callable(mask)
        return attention_with()(query, key, value, mask=mask)

    assert check(kernel, CASES["mask function"]).missing == "mask as a function"
    assert check(kernel, CASES["mask array"]).status == AGREES
    assert check(attention, CASES["mask function"]).status == AGREES


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda lse: lse / np.log(2.0), "the logsumexp is in base 2"),
        (lambda lse: np.where(np.isneginf(lse), np.inf, lse), "inf"),
        (lambda lse: lse[..., None], "the logsumexp has another shape"),
        (lambda lse: lse + 1, ""),
    ],
)
def test_the_logsumexp_of_a_known_signature_is_looked_at(wrong, said):
    @functools.wraps(flash_attn_func)
    def kernel(q, k, v, *, return_attn_probs=False, **options):
        output, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        return (output, wrong(lse), None) if return_attn_probs else output

    name = "causal, L > S" if said == "inf" else "causal"
    finding = check_logsumexp(kernel, CASES[name], np.array, np.asarray)
    said = "the logsumexp of a row without keys is inf" if said == "inf" else said
    assert (finding.status, finding.interpretation) == (DIFFERS, said)
    assert check(kernel, CASES[name])[0::4] == (AGREES, "")


@pytest.mark.slow
def test_our_own_dialect_of_torch():
    """It has torch's meaning, so causal counts from the first key."""
    agreed = 0
    for case in CASES.values():
        if case.dtype != "float32" or case.topic == "lengths" or "dropout" in case.features:
            continue
        finding = check(scaled_dot_product_attention, case)
        agreed += finding.status == AGREES
        assert finding.status != RAISES, finding.error
        if finding.status == DIFFERS:
            assert "causal" in case.features
            assert case.L != case.S
            assert finding.interpretation == TOP_LEFT
        elif finding.status == NO_ARGUMENT:
            assert finding.missing
        elif case.features == {"causal"} and case.L and case.S:
            assert case.L == case.S
    assert agreed > 100


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


def test_an_option_that_asks_for_nothing_needs_no_argument():
    def plain(query, key, value):
        return attention_with()(query, key, value)

    assert check(plain, make_case("offset alone", query_offset=2)).status == AGREES
    finding = check(plain, CASES["softcap"])
    assert (finding.status, finding.missing) == (NO_ARGUMENT, "softcap")


def test_an_adapter_may_say_that_it_has_no_argument():
    def adapter(query, key, value, mask=None):
        raise NoArgumentError("mask of rank 4")

    assert check(adapter, CASES["mask array"]).missing == "mask of rank 4"


def test_dropout_is_nobodys_to_agree_with():
    with pytest.raises(ValueError, match="dropout"):
        check(attention_with(), CASES["dropout"])


# ---- load --------------------------------------------------------------------------------------


def test_load():
    assert load("polyattn.dialects:scaled_dot_product_attention") is scaled_dot_product_attention
    assert load("numpy:linalg.norm") is np.linalg.norm


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("numpy", 'a function is written "module:function"'),
        (":norm", "got ':norm'"),
        ("numpy:", "got 'numpy:'"),
        (".numpy:norm", "'.numpy' cannot be imported"),
        ("no_such_module:norm", "cannot be imported: ModuleNotFoundError: No module named"),
        ("no_such_module.py:norm", "leave out the .py"),
        ("numpy:no_such.norm", "'numpy' has no 'no_such.norm'"),
        ("numpy:matmull", "did you mean 'matmul'"),
        ("numpy:pi", "'numpy:pi' is not a function; it is 3.14"),
    ],
)
def test_load_says_what_is_wrong(spec, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        load(spec)


def test_a_module_that_ends_the_process_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a_script_that_ends.py").write_text("import sys; sys.exit(3)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"imported: SystemExit: it calls sys.exit\(3\)"):
        load("a_script_that_ends:attend")


# ---- the page ----------------------------------------------------------------------------------


def without_figures(cell):
    return re.sub(r" \([^)]*\)", "", cell)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_the_page_says_what_is_found(peer):
    peers = importlib.import_module("peers")
    page = (DOCS / "peers.md").read_text(encoding="utf-8").splitlines()
    lines = [line for line in page if line[:1] == "|"]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    place = next(n for n, head in enumerate(table[0]) if head.startswith(f"{peer} "))
    written = {row[0]: without_figures(row[place]) for row in table}
    # The long cases take longest, and say the same.
    names = tuple(case.name for case in CASES.values() if case.topic != "lengths")
    found = {label: peers.cell(row) for label, row in peers.rows_of(peer, names).items()}
    assert len(found) > 20
    for label, cell in found.items():
        parts = 1 if label == "NaN and infinity" else None  # the processor decides about one NaN
        page, here = (text.split(";")[:parts] for text in (written[label], without_figures(cell)))
        if label.endswith("by themselves"):  # threads and the processor decide about bits
            page, here = ([x.removesuffix(", other bits") for x in cells] for cells in (page, here))
        assert page == here, label


KNOWN = {
    "flash_attn:flash_attn_func": {"causal", "window", "softcap", "grouped_heads", "logsumexp"},
    "flash_attn_interface:flash_attn_func": {"causal", "window", "softcap", "scale", "logsumexp"},
    **{
        name: {"causal", "window", "scale", "caches and pages", "items by themselves"}
        for name in (
            *("flash_attn:flash_attn_with_kvcache", "flash_attn_interface:flash_attn_with_kvcache"),
            *("flash_attn:flash_attn_varlen_func", "flash_attn_interface:flash_attn_varlen_func"),
            "torch:varlen_attn",
        )
    },
    "jax:dot_product_attention": {"bias", "mask", "window", "scale"},
    "keras:dot_product_attention": {"bias", "mask", "softcap", "scale"},
    "xformers:memory_efficient_attention": {"bias", "mask", "scale"},
    "mlx:scaled_dot_product_attention": {"bias", "mask", "causal", "sinks", "scale"},
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_signatures_of_the_dialects_are_known(name):
    """All that a function has an argument for is asked; only causal rows may be elsewhere."""
    cases = {n: case for n, case in ESSENTIAL.items() if case.dtype == "float32"}
    rows = summarise(load(f"polyattn.dialects.{name}"), cases.values(), np.array, np.asarray)
    for row in rows:
        assert row.count(RAISES) == 0, row
        wrong = {f.interpretation for f in row.findings.values() if f.status == DIFFERS}
        assert wrong <= ({TOP_LEFT} if name.startswith(("jax", "keras")) else set()), row.name
    assert KNOWN[name] <= {row.name for row in rows if row.count(AGREES)}


def test_a_signature_of_another_library_lacks_some_arguments():
    function = load("polyattn.dialects.mlx:scaled_dot_product_attention")
    seen = [CASES[n] for n in CASES if {"causal", "mask"} <= set(CASES[n].features)]
    assert check(function, seen[0]).status == NO_ARGUMENT
    assert check(function, CASES["window"]).missing == "window"
    names = importlib.import_module("polyattn.dialects._names").NAMES
    for entry in KNOWN:
        given = inspect.signature(load(f"polyattn.dialects.{entry}")).parameters
        one = next(n for n in names.values() if n.marks <= given.keys())
        # FlashAttention 3 has no pages of packed sequences.
        assert set(one.options.values()) - {"block_table"} <= given.keys(), entry


# ---- caches and pages --------------------------------------------------------------------------


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
    head_sink, num_heads, kv_num_heads, scale, softcap, causal, local_window_size, less=0,
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
        q, *memory, key_lengths=ends - less, is_causal=bool(causal), window=window, scale=scale,
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
def test_functions_over_caches_and_pages_are_known(name):
    function, *numbers = SERVING[name]
    agreed = []
    for memory in MEMORIES:
        cases = [CASES[case] for case in CACHES if case.startswith(memory)]
        found = {case.name: check(function, case) for case in cases}
        agreed.append(sum(finding.status == AGREES for finding in found.values()))
        assert {f.status for f in found.values()} <= {AGREES, NO_ARGUMENT}, found
    assert agreed == numbers


def test_what_a_page_holds_beyond_the_length_is_named_where_it_reaches_the_output():
    def leaks(q, k_pages, v_pages, lengths, page_indices, **more):
        used = v_pages[:, page_indices[np.arange(len(lengths)), (lengths - 1) // 4]]
        return of_pallas(q, k_pages, v_pages, lengths, page_indices, **more) + 0 * used.sum()

    def in_order(q, k_pages, v_pages, lengths, page_indices, **more):
        table = np.arange(page_indices.size).reshape(page_indices.shape)
        return of_pallas(q, k_pages, v_pages, lengths, table, **more)

    def found(function, case):
        return check(function, CASES[case])[0::4]

    leak = "a hidden NaN or infinity reaches the row"
    assert found(leaks, "pages, nan in unused slots") == (DIFFERS, leak)
    order = "pages are read in the order of the pool"
    assert found(in_order, "pages, unlike lengths") == (DIFFERS, order)
    short = functools.wraps(of_onnxruntime)(functools.partial(of_onnxruntime, less=1))
    assert found(short, "cache, unlike lengths") == (DIFFERS, "items have one key less")


def test_parts_by_themselves_are_right_and_may_have_other_bits():
    def by_rows(query, key, value, *, key_lengths=None, is_causal=False, block_table=None):
        call = {"key_lengths": key_lengths, "block_table": block_table, "is_causal": is_causal}
        output = attention(query, key, value, **call)
        return output if query.shape[-2] == 1 else np.nextafter(output, np.float32(9))

    (items, rows) = summarise(by_rows, ESSENTIAL.values(), np.array, np.asarray)[-2:]
    assert (items.count(AGREES), rows.count(AGREES)) == (3, 2)
    assert summary(items)[2] == ""
    assert summary(rows)[2] == "other bits than together (2)"


def test_arrays_on_the_device_of_a_backend():
    assert str(target_of("torch:nn", "torch:cpu").to(np.ones(1)).device) == "cpu"
    assert target_of("flash_attn:flash_attn_func", None).library == "torch"
