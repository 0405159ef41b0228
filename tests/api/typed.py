"""What a type checker sees of a call: `make lint` reads this, nothing runs it."""

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import polyattn
from polyattn import attention

X: NDArray[np.float32] = np.ones((2, 3, 4), np.float32)

assert_type(attention(X, X, X, is_causal=True), NDArray[np.float32])
assert_type(attention(X, mask=np.ones((3, 3), bool), key=X, value=X), NDArray[np.float32])
assert_type(polyattn.attention(X, X, X), NDArray[np.float32])
assert_type(polyattn.masks.causal(), polyattn.masks.Mask)
assert_type(polyattn.nn.RMSNorm, type[polyattn.nn.RMSNorm])
