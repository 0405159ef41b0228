"""FlashAttention over pages: its arguments, on a CPU, by what they mean; and what it refuses."""

import pytest
import torch
from arrays import close
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_devices import HOPPER

from polyattn import attention_partial, explain
from polyattn.dialects import torch as dialect
from polyattn.plugin import Operands
from polyattn_torch import flash_paged
from polyattn_torch.backend import TorchBackend

H, G, D, PAGE, PAGES = 4, 2, 16, 256, 5
BACKEND = TorchBackend()
needs_operator = pytest.mark.skipif(
    flash_paged._flash is None,
    reason="torch's operator takes no block table",
)
LSE = type("AuxRequest", (), {"lse": True})


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(flash_paged, "describe_device", lambda _: HOPPER)


def flash(
    query, key, value, starts, key_starts, rows, keys, dropout, is_causal, debug,
    *, scale, window_size_left, window_size_right, seqused_k, block_table,
):  # fmt: skip
    """Compute what the operator does on CUDA, by the documentation of `varlen_attn`."""
    window = (window_size_left, window_size_right)
    assert is_causal == (window == (-1, 0))
    assert (dropout, debug) == (0, False)
    for one in (starts, key_starts, seqused_k, block_table):
        assert one.dtype == torch.int32
        assert one.is_contiguous()
    assert int(seqused_k.max()) <= keys  # it would read beyond the table
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    output, logsumexp = dialect.varlen_attn(
        *[x.double() for x in (query, key, value)], starts, key_starts, rows, keys,
        return_aux=LSE, scale=scale, window_size=window, enable_gqa=True,
        seqused_k=seqused_k, block_table=block_table,
    )  # fmt: skip
    logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf).float()
    return output.to(query.dtype), logsumexp, None, None, None


def arrays(layout, batch, rows, device="cpu", dtype=torch.float16, page=PAGE):
    shape = (PAGES, G, page, D) if layout == "...HLD" else (PAGES, page, G, D)
    lead = (H, rows) if layout == "...HLD" else (rows, H)
    return [torch.randn(s, dtype=dtype, device=device) for s in ((*batch, *lead, D), shape, shape)]


@pytest.mark.parametrize("layout", ["...HLD", "...LHD"])
@pytest.mark.parametrize(
    ("rows", "options"),
    [(1, {}), (7, {"is_causal": True, "scale": 0.5}), (7, {"window": (300, 2)})],
    ids=str,
)  # fmt: skip
def test_the_operator_gets_what_a_call_means(monkeypatch, layout, rows, options):
    monkeypatch.setattr(flash_paged, "_flash", flash)
    monkeypatch.setattr(flash_paged.Paged, "devices", None)
    x = arrays(layout, (3, 1), rows)
    x[1] = x[1].mT.contiguous().mT  # the numbers of a vector lie apart
    given = options | {
        "block_table": torch.tensor([[[3, -1, 2]], [[1, -1, -1]]], dtype=torch.int32).permute(
            2, 1, 0
        ),
        "key_lengths": torch.tensor([[300], [0], [5]]),
        "layout": layout,
    }
    found = attention_partial(*x, **given, kernel="paged")
    exact = attention_partial(*[one.double() for one in x], **given, kernel="dense")
    close(found.output, exact.output.half(), 2)
    close(found.logsumexp, exact.logsumexp.float())


def test_lengths_that_nobody_read_end_with_the_table(monkeypatch):
    monkeypatch.setattr(flash_paged, "_flash", flash)
    query, key, value = arrays("...HLD", (2,), 1)
    table, lengths = torch.tensor([[3, 1], [2, 4]]), torch.tensor([2 * PAGE], dtype=torch.int32)
    given = {"block_table": table, "key_lengths": lengths}
    problem = explain(query, key, value, **given).problem
    whole, more = (
        flash_paged.Paged()(
            problem, Operands(query, key, value, block_table=table, key_lengths=n), BACKEND
        )
        for n in (lengths, lengths + 99)
    )
    assert (whole[0] == more[0]).all()


@needs_operator
@pytest.mark.parametrize(
    ("change", "reason"),
    [({}, None), ({"dtype": torch.float32}, "float16 and bfloat16 only"),
     ({"page": 128}, "multiple of 256 keys; these hold 128"),
     ({"query_offset": 3}, "the newest query last"), ({"softcap": 3.0}, "does not compute softcap"),
     ({"grad": True}, "without gradients")],
    ids=str,
)  # fmt: skip
def test_a_call_on_cuda_reads_its_pages_or_says_why_not(change, reason):
    options = {"is_causal": True} | change
    changed = {name: options.pop(name) for name in ("page", "dtype") if name in options}
    grad = options.pop("grad", False)
    with FakeTensorMode():
        query, key, value = arrays("...HLD", (2,), 1, "cuda", **{"dtype": torch.half} | changed)
        options["key_lengths"] = torch.empty(2, dtype=torch.int64, device="cuda")
        options["block_table"] = torch.empty(2, 3, dtype=torch.int64, device="cuda")
        explained = explain(query, key, value.requires_grad_(grad), **options)
    candidate = next(one for one in explained.candidates if one.kernel == "paged")
    assert reason is not None or candidate.status == "chosen", explained
    assert reason is None or reason in "; ".join(candidate.reasons)


@needs_operator
def test_the_operator_takes_these_arguments(monkeypatch):
    monkeypatch.setattr(flash_paged.Paged, "devices", None)
    query, key, value = arrays("...LHD", (2,), 3, "meta")
    table, lengths = (torch.empty(s, dtype=torch.int64, device="meta") for s in ((2, 3), 2))
    output, logsumexp = attention_partial(
        query, key, value, block_table=table, key_lengths=lengths, is_causal=True,
        layout="...LHD", kernel="paged",
    )  # fmt: skip
    assert (output.shape, output.dtype) == (query.shape, torch.half)
    assert (logsumexp.shape, logsumexp.dtype) == (query.shape[:-1], torch.float32)
