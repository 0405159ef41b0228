"""The settings of a config.json, read so that what is missing or not understood is said by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Settings"]

# By the names of transformers. Those of one line compute one function.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu", "swish": "silu",
}  # fmt: skip


class Settings:
    """The settings of one family's model.

    Parameters
    ----------
    family : str
        The ``model_type`` that is understood.
    config : mapping of str to Any
        The settings; None stands for one that is not given.
    """

    def __init__(self, family: str, config: Mapping[str, Any]) -> None:
        self._config = {name: value for name, value in config.items() if value is not None}
        found = self._config.get("model_type", family)
        if found != family:
            raise ValueError(f"config is of a {found!r} model; this function reads {family!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting as it is."""
        return self._config.get(name, default)

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config: {name} must be a positive integer; got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"config: {name} must be a positive number; got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return whether something is so."""
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config: {name} must be true or false; got {value!r}")
        return value

    def sizes(self, size: str, heads: str, whole_heads: bool = True) -> tuple[int, int]:
        """Return a model's size and its number of heads, which by `whole_heads` divides it."""
        found = self.whole(size), self.whole(heads)
        if whole_heads and found[0] % found[1]:
            raise ValueError(f"config: {heads} {found[1]} does not divide {size} {found[0]}")
        return found

    def activation(self, name: str, default: str) -> str:
        """Return the activation by its name here."""
        value = self._config.get(name, default)
        if value not in ACTIVATIONS:
            raise ValueError(
                f"config: {name} must be one of {', '.join(ACTIVATIONS)}; got {value!r}"
            )
        return ACTIVATIONS[value]

    def only(self, name: str, understood: Any) -> None:
        """Refuse a setting that is anything but what it is by default."""
        value = self._config.get(name, understood)
        if value != understood:
            raise ValueError(
                f"config: {name} is {value!r}, which polyattn.nn does not do; it does"
                f" {understood!r} alone"
            )

    def _present(self, name: str, default: Any) -> Any:
        value = self._config.get(name, default)
        if value is None:
            raise ValueError(f"config has no {name}, which weights alone do not tell")
        return value
