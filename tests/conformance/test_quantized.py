"""Kernels that read integers: the suite finds those that take other steps or other integers."""

import numpy as np
import pytest

from polyattn._kernels.dense_kernel import Dense
from polyattn.conformance import KernelVariant, Target
from polyattn.conformance.checks.quantized import check_quantized, reads_integers
from polyattn.plugin import Quantized

NUMPY = Target("numpy")


class Reader(Dense):
    """The formula over integers times steps, each of which a mistake may change."""

    name = "reader"

    def __init__(self, of_keys=lambda x: x, of_values=lambda x: x):
        self._mistakes = of_keys, of_values

    def reads_quantized(self, problem):
        return not problem.requires_grad

    def __call__(self, problem, operands, backend):
        read = {}
        for name, change in zip(("key", "value"), self._mistakes, strict=True):
            codes, steps = change(getattr(operands, name))
            shared = codes.shape[-2] // steps.shape[-2]
            read[name] = codes * np.repeat(steps, shared, axis=-2)
        return super().__call__(problem, operands._replace(**read), backend)


def written(x):
    x.codes[..., :1, :] = 0
    return x


def leaking(x):
    return Quantized(x.codes, x.steps + 0 * x.steps.sum())


#: A mistake in reading keys, and values, if it is one there too; and what is said.
MISTAKES = {
    "unsigned": (lambda x: Quantized(x.codes.view(np.uint8), x.steps), "rows, float32"),
    "of the next row": (lambda x: Quantized(x.codes, np.roll(x.steps, 1, axis=-2)), "rows, float"),
    "of the first block": (lambda x: Quantized(x.codes, x.steps[..., :1, :]), "rows, float32"),
    "of other items": (lambda x: Quantized(x.codes, np.flip(x.steps, axis=0)), "rows, float32"),
    "written": (written, "rows, float32"),
    "of the next channel": (lambda x: Quantized(x.codes, np.roll(x.steps, 1, axis=-1)), "output"),
    "hidden": (leaking, "NaN in unused blocks"),
}


def test_a_kernel_that_reads_integers_passes():
    assert reads_integers(NUMPY, KernelVariant(Reader()))
    check_quantized(NUMPY, KernelVariant(Reader()))
    assert not reads_integers(NUMPY, KernelVariant(Dense()))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name):
    mistake, said = MISTAKES[name]
    readers = [Reader(of_keys=mistake), Reader(of_values=mistake)]
    for reader in readers[: 1 if name == "of the next channel" else 2]:
        with pytest.raises(AssertionError, match=f"integers, .*{said}"):
            check_quantized(NUMPY, KernelVariant(reader))
