"""The self-test of a device, on a CPU that passes and on kernels that are wrong."""

import pytest
import torch
import torch.nn.functional as F

from polyattn import attention, explain
from polyattn_torch import sdpa, selftest
from polyattn_torch.sdpa import Sdpa

X = torch.ones(1, 2, 6, 8)


class Broken(Sdpa):
    """Sdpa on a device that does `spoil` to what it returns."""

    def __init__(self, spoil):
        self.spoil = spoil

    def __call__(self, problem, operands, backend):
        output, logsumexp = super().__call__(problem, operands, backend)
        return self.spoil(problem, output), logsumexp


def crash(problem, output):
    raise RuntimeError("no kernel image")


def test_the_cpu_passes_whatever_autocast_says():
    assert selftest.try_out("cpu", Sdpa()) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert selftest.try_out("cpu", Sdpa()) is None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p, x: x + 0.02 * p.is_causal, "off by 0.02 in causal float16"),
        (lambda p, x: x * torch.nan if p.mask else x, "off by nan in a mask"),
        (crash, "failed in causal float16: no kernel image"),
        (lambda p, x: x.flip(1) if p.key_heads == 2 else x, "in grouped heads"),
        (lambda p, x: x.flip(0) if p.dtype == "float32" else x, "in a mask in float32"),
    ],
)
def test_a_device_that_is_wrong_fails(spoil, said):
    assert said in selftest.try_out("cpu", Broken(spoil))


def test_one_key_too_many_is_seen(monkeypatch):
    genuine = F.scaled_dot_product_attention

    def leaking(query, key, value, *, is_causal, **options):
        if not is_causal:
            return genuine(query, key, value, is_causal=False, **options)
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(diagonal=1)
        return genuine(query, key, value, **options | {"attn_mask": seen})

    monkeypatch.setattr(F, "scaled_dot_product_attention", leaking)
    assert "in causal float16" in selftest.try_out("cpu", Sdpa())


def test_a_device_that_fails_is_refused_and_tested_once(monkeypatch):
    tried, problem = [], explain(X, X, X).problem
    monkeypatch.setattr(selftest, "try_out", lambda device, _: tried.append(device) or "it is off")
    monkeypatch.setattr(sdpa, "TESTED", frozenset({"cpu"}))
    kernel = Sdpa()
    for _ in range(2):
        assert kernel.reasons_against(problem) == ["it is off"]
    assert tried == ["cpu"]
    assert "mps" in selftest.TESTED
    assert selftest.self_test("no such device", kernel) is None


@pytest.mark.slow
def test_a_device_is_tested_while_a_call_is_compiled(monkeypatch):
    monkeypatch.setattr(sdpa, "TESTED", frozenset({"cpu"}))
    selftest._self_test.cache_clear()
    q = torch.ones(2, 4, 13, 8)
    run = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(q, q, q, kernel="sdpa"), attention(q, q, q, kernel="dense"))
    assert selftest._self_test.cache_info().misses == 1
