"""Every feature of the kernels that need CUDA has a case that they take there, by what they say."""

from dataclasses import replace

import pytest
from torch_devices import HOPPER

from polyattn import explain
from polyattn.conformance.cases.cache_cases import OF_256
from polyattn.conformance.cases.case import make_case
from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
from polyattn.conformance.checks.gradients import DERIVATIVES
from polyattn_jax import cudnn as jax_cudnn
from polyattn_torch import flash_paged, flex

#: The kernel, the reasons that it gives without a device, and the cases that its suite runs.
KERNELS = {
    "flex": (flex.Flex, flex.Flex().reasons_against, CASES),
    "paged": (flash_paged.Paged, flash_paged.Paged().reasons_against, CASES),
    "jax cudnn": (jax_cudnn.JaxCudnn, jax_cudnn.mismatches, ESSENTIAL),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(flex, "HAS_TRITON", True)
    monkeypatch.setattr(flash_paged, "_flash", "an operator")
    monkeypatch.setattr(flash_paged, "describe_device", lambda _: HOPPER)


def problem_of(case, **options):
    arrays, given = case.arguments()
    return explain(*arrays, **given, **options, backend="numpy").problem._replace(device="cuda:0")


@pytest.mark.parametrize("name", KERNELS)
def test_every_feature_of_a_kernel_on_cuda_has_a_case(name):
    kernel, reasons, cases = KERNELS[name]
    idle = kernel.features - {"logsumexp", *DERIVATIVES}
    for case in cases.values():
        shows_more = idle & case.features and case.features <= kernel.features
        # The suite gives a case in float32 in 16 bits to a kernel that takes no other.
        dtypes = {case.dtype, "float16"} if case.dtype == "float32" else {case.dtype}
        if shows_more and any(not reasons(problem_of(replace(case, dtype=n))) for n in dtypes):
            idle -= case.features
    assert not idle


@pytest.mark.parametrize("name", ["flex", "paged"])
def test_partial_results_of_pages_have_a_case_on_cuda(name):
    kernel, reasons, _ = KERNELS[name]
    problem = problem_of(make_case("pages", **OF_256), logsumexp=True)
    # FlexAttention gets the keys in one piece.
    features = problem.features - ({"block_table"} - kernel.features)
    assert features <= kernel.features
    assert not reasons(problem._replace(features=features))
