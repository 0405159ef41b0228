"""Lookup of JAX's devices by name, such as ``cpu:0`` and ``cuda:1``."""

from __future__ import annotations

from typing import Any

import jax


def all_devices() -> dict[str, Any]:
    """Return the devices of this process by name, the default first."""
    devices = [*jax.local_devices(), *jax.local_devices(backend="cpu")]
    return {_name(device): device for device in devices}


def _name(device: Any) -> str:
    # A "gpu" of JAX may be CUDA's or ROCm's; str(device) tells which: "cuda:0".
    return str(device) if device.platform == "gpu" else f"{device.platform}:{device.id}"


def device_of(name: str) -> Any:
    """Return the device with a name from `all_devices`."""
    return all_devices()[name]


def default_kind() -> str:
    """Return the kind of JAX's default device."""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is None:
        return next(iter(all_devices())).partition(":")[0]
    return chosen if isinstance(chosen, str) else _name(chosen).partition(":")[0]
