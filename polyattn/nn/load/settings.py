"""Read the settings of a config.json and check the type and range of each."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

# The kinds of a block that ``layer_types`` lists.
FULL, SLIDING = "full_attention", "sliding_attention"

# By their names in transformers. Names on one line compute one function.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu", "swish": "silu",
}  # fmt: skip
# The normal numbers of float32, the narrowest dtype that norms and positions are computed in. A
# product or quotient of a few of them does not overflow a Python float.
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class Settings:
    """The settings of a model or one section, None where not given; errors name the `origin`."""

    def __init__(self, config: Mapping[str, Any], origin: str = "config") -> None:
        self._config = {name: value for name, value in config.items() if value is not None}
        self.nulls = config.keys() - self._config.keys()  # given as null, which may have a meaning
        self._origin = origin

    def __len__(self) -> int:
        return len(self._config)

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def section(self, name: str) -> Settings:
        """Return a nested mapping of settings, empty if it is not given."""
        value = self._config.get(name, {})
        if not isinstance(value, Mapping):
            raise self.refusal(name, "a mapping of names to settings")
        return Settings(value, f"{name} of {self._origin}")

    def whole(self, name: str, default: int | None = None, *, zero: bool = False) -> int:
        """Return a positive integer, or 0 if `zero` allows it."""
        value = self._present(name, default)
        integer = isinstance(value, int) and not isinstance(value, bool)
        if not integer or not (value >= 0 if zero else value > 0) or value >= 2**63:
            wanted = "0 or a positive integer" if zero else "a positive integer"
            raise self.refusal(name, f"{wanted} below 2**63", value)
        return int(value)

    def number(self, name: str, default: float | None = None, *, zero: bool = False) -> float:
        """Return a positive number, or 0 if `zero` allows it."""
        value = self._present(name, default)
        return check_number(f"{self._origin}: {name}", value, zero=zero)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def choice(self, name: str, known: Collection[str], default: str) -> str:
        """Return one of the known names."""
        value = self._config.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.refusal(name, f"one of {', '.join(known)}")
        return value

    def listed(
        self, name: str, known: Collection[Any], default: Callable[[int], Any]
    ) -> Callable[[int], Any]:
        """Return a function from a block's number to its known value in a list, or its default."""
        values = self._config.get(name)
        if values is None:
            return default
        if not isinstance(values, (list, tuple)) or not all(_among(x, known) for x in values):
            raise self.refusal(name, f"a list of {' and '.join(map(str, known))}")

        def value(block: int) -> Any:
            if block < len(values):
                return values[block]
            raise self.refusal(name, "a list with a value for each block")

        return value

    def kinds(self, default: Callable[[int], str]) -> Callable[[int], str]:
        """Return a function from a block's number to its kind in ``layer_types``."""
        return self.listed("layer_types", (FULL, SLIDING), default)

    def sizes(self, size: str, heads: str, whole_heads: bool = True) -> tuple[int, int]:
        """Return a model's size and its number of heads, which must divide it by default."""
        width, number = self.whole(size), self.whole(heads)
        if whole_heads and width % number:
            raise ValueError(f"{self._origin}: {heads} {number} does not divide {size} {width}")
        return width, number

    def activation(self, name: str, default: str) -> str:
        """Return the name of an activation in polyattn.nn."""
        return ACTIVATIONS[self.choice(name, ACTIVATIONS, default)]

    def only(self, name: str, supported: Any) -> None:
        """Refuse a setting that differs from its default, the one supported value."""
        null = supported is True and name in self.nulls  # which transformers takes for False
        value = self._config.get(name, None if null else supported)
        if value != supported:
            raise ValueError(
                f"{self._origin}: {name} is {reprlib.repr(value)}; polyattn.nn supports"
                f" {supported!r} only"
            )

    def refusal(self, name: str, wanted: str, value: Any = None) -> ValueError:
        """Return the error for a setting with a wrong value."""
        got = self._config.get(name, value)
        return ValueError(f"{self._origin}: {name} must be {wanted}; got {reprlib.repr(got)}")

    def _present(self, name: str, default: Any) -> Any:
        value = self._config.get(name, default)
        if value is None:
            raise ValueError(f"{self._origin} has no {name}, which the weights do not contain")
        return value


def _among(value: Any, known: Collection[Any]) -> bool:
    return any(type(value) is type(other) and value == other for other in known)


def check_number(name: str, value: Any, *, zero: bool = False) -> float:
    """Return a positive number in the range of float32, or 0 if `zero` allows it."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compare before converting: float() raises for a large integer.
    if real and (SMALLEST <= value <= LARGEST or (zero and value == 0)):
        return float(value)
    wanted = "0 or a positive number" if zero else "a positive number"
    raise ValueError(f"{name} must be {wanted} in the range of float32; got {reprlib.repr(value)}")
