"""Let each test of the dialects draw the same numbers in any order."""

import pytest
from optional import torch
from pairs import RNG

START = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _same_numbers():
    RNG.bit_generator.state = START
    if torch:
        torch.manual_seed(0)
