"""Kernels that read integers: the suite finds those that take other steps or other integers."""

import numpy as np
import pytest

from polyattn import nn
from polyattn._kernels.dense_kernel import Dense
from polyattn.conformance import KernelVariant, Target
from polyattn.conformance.checks.quantized import check_quantized, reads_integers
from polyattn.plugin import Kernel, Quantized

NUMPY = Target("numpy")


class Reader(Dense):
    """The formula over integers times steps, each of which a mistake may change."""

    name = "reader"
    quantized_bits = frozenset({4, 8})

    def __init__(self, of_keys=lambda x: x, of_values=lambda x: x):
        self._mistakes = of_keys, of_values

    def reads_quantized(self, problem):
        return not problem.requires_grad

    def __call__(self, problem, operands, backend):
        read = {}
        for name, change in zip(("key", "value"), self._mistakes, strict=True):
            codes, steps = x = change(getattr(operands, name))
            if x.bits == 4:
                both = np.stack([codes % 16, codes // 16], axis=-1)
                numbers = both.reshape(*steps.shape[:-2], steps.shape[-1], -1)
                numbers = numbers * steps[..., 0, :, None] + steps[..., 1, :, None]
                read[name] = numbers.reshape(x.shape)
                continue
            shared = codes.shape[-2] // steps.shape[-2]
            read[name] = codes * np.repeat(steps, shared, axis=-2)
        return super().__call__(problem, operands._replace(**read), backend)


def unsigned(x):
    return Quantized(x.codes.view(np.uint8), x.steps)


def of_the_next_row(x):
    return Quantized(x.codes, np.roll(x.steps, 1, axis=-2))


def of_the_next_channel(x):
    return Quantized(x.codes, np.roll(x.steps, 1, axis=-1))


def of_the_first_block(x):
    return Quantized(x.codes, x.steps[..., :1, :])


def of_other_items(x):
    return Quantized(x.codes, np.flip(x.steps, axis=0))


def written(x):
    x.codes[..., :1, :] = 0
    return x


def swapped(x):
    return x._replace(codes=x.codes >> 4 | x.codes << 4) if x.bits == 4 else x


def without_offsets(x):
    return x._replace(steps=x.steps * [[1], [0]]) if x.bits == 4 else x


def of_the_first_group(x):
    return x._replace(steps=0 * x.steps + x.steps[..., :1]) if x.bits == 4 else x


def test_a_kernel_that_reads_integers_passes():
    assert reads_integers(NUMPY, KernelVariant(Reader()))
    check_quantized(NUMPY, KernelVariant(Reader()))
    assert not reads_integers(NUMPY, KernelVariant(Dense()))


#: Mistakes with keys and values, and those with integers of 4 bits, of which values have one group.
OF_8 = [unsigned, of_the_next_row, of_the_first_block, of_other_items, written]
OF_4 = [(0, swapped), (1, swapped), (0, without_offsets), (1, without_offsets)]


@pytest.mark.parametrize(
    ("integers", "place", "mistake"),
    [
        *[("integers", place, mistake) for mistake in OF_8 for place in (0, 1)],
        *[("integers of 4 bits", *one) for one in (*OF_4, (0, of_the_first_group))],
    ],
)
def test_a_mistake_is_found(integers, place, mistake):
    mistakes = [lambda x: x, lambda x: x]
    mistakes[place] = mistake
    with pytest.raises(AssertionError, match=f"{integers}, rows, float32"):
        check_quantized(NUMPY, KernelVariant(Reader(*mistakes)))


def test_a_kernel_gets_integers_of_the_bits_that_it_declares():
    read = []

    class Eight(Reader):
        quantized_bits = Kernel.quantized_bits

        def __call__(self, problem, operands, backend):
            if not isinstance(operands.key, Quantized):
                return Dense.__call__(self, problem, operands, backend)
            read.append(operands.key.bits)
            return super().__call__(problem, operands, backend)

    tokens = np.random.default_rng(0).standard_normal((2, 64, 32))
    for bits in (4, 8):
        cache = nn.QuantizedCache.init(
            2, 32, 64, like=tokens, bits=bits, group=32, window=8, block=8
        )
        cache = cache.append(tokens, tokens)
        np.testing.assert_allclose(
            cache.attention(tokens, kernel=Eight()), cache.attention(tokens), atol=1e-12
        )
    assert read == [8]
    check_quantized(NUMPY, KernelVariant(Eight()))
    assert set(read) == {8}


def test_steps_of_another_channel_are_found():
    with pytest.raises(AssertionError, match=r"integers, .*: output"):
        check_quantized(NUMPY, KernelVariant(Reader(of_the_next_channel)))


def test_a_value_that_is_hidden_and_read_is_found():
    class Leaking(Reader):
        def __call__(self, problem, operands, backend):
            output, logsumexp = super().__call__(problem, operands, backend)
            return output + 0 * operands.value.steps.sum(), logsumexp

    with pytest.raises(AssertionError, match="NaN in unused blocks"):
        check_quantized(NUMPY, KernelVariant(Leaking()))
