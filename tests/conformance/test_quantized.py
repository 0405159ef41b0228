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


MISTAKES = {
    "unsigned": lambda x: Quantized(x.codes.view(np.uint8), x.steps),
    "of the next row": lambda x: Quantized(x.codes, np.roll(x.steps, 1, axis=-2)),
    "of the first block": lambda x: Quantized(x.codes, x.steps[..., :1, :]),
    "of other items": lambda x: Quantized(x.codes, np.flip(x.steps, axis=0)),
    "written": written,
}


def test_a_kernel_that_reads_integers_passes():
    assert reads_integers(NUMPY, KernelVariant(Reader()))
    check_quantized(NUMPY, KernelVariant(Reader()))
    assert not reads_integers(NUMPY, KernelVariant(Dense()))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name):
    for place in (0, 1):
        mistakes = [lambda x: x, lambda x: x]
        mistakes[place] = MISTAKES[name]
        with pytest.raises(AssertionError, match="integers, rows, float32"):
            check_quantized(NUMPY, KernelVariant(Reader(*mistakes)))


def test_steps_of_another_channel_are_found():
    of_the_next = Reader(lambda x: Quantized(x.codes, np.roll(x.steps, 1, axis=-1)))
    with pytest.raises(AssertionError, match=r"integers, .*: output"):
        check_quantized(NUMPY, KernelVariant(of_the_next))


def test_a_value_that_is_hidden_and_read_is_found():
    class Leaking(Reader):
        def __call__(self, problem, operands, backend):
            output, logsumexp = super().__call__(problem, operands, backend)
            return output + 0 * operands.value.steps.sum(), logsumexp

    with pytest.raises(AssertionError, match="NaN in unused blocks"):
        check_quantized(NUMPY, KernelVariant(Leaking()))
