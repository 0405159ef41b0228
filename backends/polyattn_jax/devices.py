"""JAX's devices by the names that polyattn gives them: ``cpu:0``, ``cuda:1``."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["all_devices", "default_kind", "device_of"]


def all_devices() -> dict[str, Any]:
    """Return the devices of this process by name, the default first."""
    found = [*jax.local_devices(), *jax.local_devices(backend="cpu")]
    return {_name(device): device for device in found}


def _name(device: Any) -> str:
    # What JAX calls a "gpu" may be CUDA's or ROCm's, which its text tells: "cuda:0".
    return str(device) if device.platform == "gpu" else f"{device.platform}:{device.id}"


def device_of(name: str) -> Any:
    """Return the device of a name that `all_devices` gives."""
    return all_devices()[name]


def default_kind() -> str:
    """Return the kind of device that JAX uses where nothing else is said."""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is None:
        return next(iter(all_devices())).partition(":")[0]
    return chosen if isinstance(chosen, str) else _name(chosen).partition(":")[0]
