"""The settings of a config.json: each is read here, where its kind and range are checked."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["Settings", "check_number"]

# By the names of transformers. Those of one line compute one function.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu", "swish": "silu",
}  # fmt: skip
# The normal numbers of float32, in which norms and positions are computed at least. A product or
# quotient of a few of them does not overflow a Python float.
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class Settings:
    """The settings of a model, or of one section of them.

    Parameters
    ----------
    config : mapping of str to Any
        The settings; None stands for one that is not given.
    origin : str
        What an error calls them, such as the path of their file.
    """

    def __init__(self, config: Mapping[str, Any], origin: str = "config") -> None:
        self._config = {name: value for name, value in config.items() if value is not None}
        self._origin = origin

    def __len__(self) -> int:
        return len(self._config)

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def check_family(self, family: str) -> None:
        """Refuse the settings of another ``model_type``."""
        found = self._config.get("model_type", family)
        if found != family:
            raise ValueError(
                f"{self._origin}: model_type is {reprlib.repr(found)}; this function reads"
                f" {family!r}"
            )

    def section(self, name: str) -> Settings:
        """Return the settings that stand in one setting, or empty ones if it is not given."""
        value = self._config.get(name, {})
        if not isinstance(value, Mapping):
            raise self.refusal(name, "a mapping of names to settings")
        return Settings(value, f"{name} of {self._origin}")

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
            raise self.refusal(name, "a positive integer below 2**63", value)
        return value

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
        """Return one of the names that are known."""
        value = self._config.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.refusal(name, f"one of {', '.join(known)}")
        return value

    def sizes(self, size: str, heads: str, whole_heads: bool = True) -> tuple[int, int]:
        """Return a model's size and its number of heads, which by `whole_heads` divides it."""
        found = self.whole(size), self.whole(heads)
        if whole_heads and found[0] % found[1]:
            raise ValueError(
                f"{self._origin}: {heads} {found[1]} does not divide {size} {found[0]}"
            )
        return found

    def activation(self, name: str, default: str) -> str:
        """Return the activation by its name here."""
        return ACTIVATIONS[self.choice(name, ACTIVATIONS, default)]

    def only(self, name: str, understood: Any) -> None:
        """Refuse a setting that is anything but what it is by default."""
        value = self._config.get(name, understood)
        if value != understood:
            raise ValueError(
                f"{self._origin}: {name} is {reprlib.repr(value)}, which polyattn.nn does not do;"
                f" it does {understood!r} alone"
            )

    def refusal(self, name: str, wanted: str, value: Any = None) -> ValueError:
        """Return the error of a setting that is not what it must be."""
        got = self._config.get(name, value)
        return ValueError(f"{self._origin}: {name} must be {wanted}; got {reprlib.repr(got)}")

    def _present(self, name: str, default: Any) -> Any:
        value = self._config.get(name, default)
        if value is None:
            raise ValueError(f"{self._origin} has no {name}, which weights alone do not tell")
        return value


def check_number(name: str, value: Any, *, zero: bool = False) -> float:
    """Return a positive number that float32 holds, or 0 if `zero` allows it."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared before it is converted: float() raises for an integer that is too large.
    if real and (SMALLEST <= value <= LARGEST or (zero and value == 0)):
        return float(value)
    wanted = "0 or a positive number" if zero else "a positive number"
    raise ValueError(f"{name} must be {wanted} that float32 holds; got {reprlib.repr(value)}")
