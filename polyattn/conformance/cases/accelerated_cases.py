"""Cases that kernels on accelerators take: 16 bits, even lengths, vectors of 16 numbers or more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyattn.conformance.cases.case import Case, make_case
from polyattn.conformance.cases.expression_cases import STEPS
from polyattn.conformance.cases.generators import normal, random_mask

ACCELERATED: dict[str, dict[str, Any]] = {
    "16 x 16, causal window": {"is_causal": True, "window": (3, None)},
    "16 x 16, mask and bias": {"mask": random_mask(), "bias": normal()},
    "16 x 16, broadcast batch, E != D, expressions": {
        **{"batch": (2, 1), "key_batch": (1, 3), "value_batch": (2, 3), "E": 24},
        **STEPS["mask value"],
        **STEPS["score value"],
    },
}


def make_accelerated_cases() -> Iterator[Case]:
    """Yield the cases, in bfloat16."""
    for name, fields in ACCELERATED.items():
        yield make_case(name, dtype="bfloat16", L=16, S=16, D=16, **fields)
