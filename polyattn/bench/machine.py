"""Describe the machine that the times were measured on."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import threadpoolctl

import polyattn
from polyattn._base.text_table import terminal_width
from polyattn._base.threads import granted, thread_count
from polyattn._dispatch import extensions, listing, registry

if TYPE_CHECKING:
    from polyattn.bench.contender import Contender

PACKAGES = ("numpy", "torch", "jax", "cupy", "onnxruntime")
# Prefixes of environment variables that change how fast a library is.
PREFIXES = (
    "POLYATTN_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "XLA_",
    "JAX_",
    "CUDA_",
    "NVIDIA_TF32",
    "TORCH_",
)
BUSY = 0.5  # share of the cores


@dataclass(frozen=True)
class Machine:
    """The machine, its libraries and settings."""

    processor: str
    cores: int  # that this process may use
    memory: int | None  # bytes
    threads: dict[str, int]  # of polyattn's own kernels, and of each thread pool of a library
    system: str
    python: str
    polyattn: str
    libraries: dict[str, str]  # versions of the libraries, their engines and BLAS
    devices: dict[str, str]  # other than the processor
    environment: dict[str, str]  # the variables that change how fast a library is
    load: float | None  # processes that wanted to run in the last minute
    when: str  # UTC

    @property
    def is_busy(self) -> bool:
        """Whether other processes used the processor too."""
        return self.load is not None and self.load >= BUSY * self.cores

    def facts(self) -> dict[str, str]:
        """Return the facts to print, by their titles."""
        memory = [] if self.memory is None else [f"{self.memory / 2**30:.0f} GiB of memory"]
        facts = {
            "processor": ", ".join(
                [self.processor, f"{self.cores} core{'s' * (self.cores > 1)} to use", *memory]
            ),
            "devices": "; ".join(f"{name}: {known}" for name, known in self.devices.items()),
            "threads": ", ".join(f"{name} {number}" for name, number in self.threads.items()),
            "system": f"{self.system}, Python {self.python}, polyattn {self.polyattn}",
            "libraries": ", ".join(f"{name} {which}" for name, which in self.libraries.items()),
            "variables": ", ".join(f"{name}={value}" for name, value in self.environment.items()),
            "load": "" if self.load is None else f"{self.load:.1f} on {self.cores} cores",
            "date": self.when,
        }
        if self.is_busy:
            facts["load"] += ": this machine is busy, so the times are less reliable"
        return {name: text for name, text in facts.items() if text}

    def lines(self) -> list[str]:
        """Return the facts as lines of text."""
        return [line for name, text in self.facts().items() for line in fact(name, text)]


def fact(name: str, text: str) -> list[str]:
    """Return a fact as lines of text."""
    return wrapped(text, f"  {name:<11}")


def wrapped(text: str, start: str) -> list[str]:
    """Return a text behind its start as lines that fit the terminal, of at most 99 columns."""
    return textwrap.wrap(
        text, min(99, terminal_width()), initial_indent=start, subsequent_indent=" " * len(start),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def look(contenders: Iterable[Contender]) -> Machine:
    """Describe this machine, once the backends are loaded."""
    contenders = list(contenders)
    threads = {"polyattn": thread_count()}
    libraries: dict[str, str] = {}
    for contender in contenders:
        is_core = contender.stem == registry.ARRAY_API
        modules = ("numpy",) if is_core else registry.spec_of(contender.stem).requires
        libraries |= listing.versions(modules) | contender.backend.engines()
        libraries |= listing.versions(extensions.origins(contender.stem).values())
    for pool in sorted(threadpoolctl.threadpool_info(), key=lambda pool: pool["prefix"]):
        threads[pool["prefix"].removeprefix("libscipy_")] = pool["num_threads"]
        if pool["user_api"] == "blas":
            libraries[pool["internal_api"]] = pool["version"] or "of unknown version"
    return Machine(
        processor=processor(),
        cores=granted(os.getpid()),
        memory=_memory(),
        threads=threads,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        polyattn=polyattn.__version__,
        libraries=libraries,
        devices=_devices(contenders),
        environment={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)
        },
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def processor() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> str:
    """Return the versions of the installed array libraries."""
    return ", ".join(f"{name} {number}" for name, number in listing.versions(PACKAGES).items())


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows and some other systems
        return None


def _devices(contenders: Iterable[Contender]) -> dict[str, str]:
    """Return a description of each device other than the processor."""
    devices: dict[str, str] = {}
    for contender in contenders:
        if contender.device is not None and contender.hardware != "cpu":
            text = listing.described(contender.backend.hardware(contender.device))
            devices[contender.hardware] = max(devices.get(contender.hardware, ""), text, key=len)
    return devices
