"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import threadpoolctl

import polyattn
from polyattn.dispatch import registry
from polyattn.threads import granted, thread_count

if TYPE_CHECKING:
    from polyattn.bench.contender import Contender

__all__ = ["Machine", "look", "processor", "versions"]

PACKAGES = ("numpy", "torch", "jax", "cupy", "onnxruntime")
# Those that change how fast a library is, by the beginnings of their names.
TELLING = (
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
BUSY = 0.5  # of the cores


@dataclass(frozen=True)
class Machine:
    """What a figure was measured on.

    Attributes
    ----------
    processor : str
        Its name.
    cores : int
        How many of its cores this process may use.
    memory : int or None
        The bytes of memory.
    threads : dict of str to int
        How many threads polyattn's own kernels use, and each pool that a library has loaded.
    system, python, polyattn : str
        The operating system and the versions.
    libraries : dict of str to str
        The versions of the libraries and of the engines that they call, and of BLAS.
    devices : dict of str to str
        What is known of each device that is not the processor.
    environment : dict of str to str
        The variables that are set and change how fast a library is.
    load : float or None
        How many processes wanted to run in the minute before, where that is known.
    when : str
        The time in UTC.
    """

    processor: str
    cores: int
    memory: int | None
    threads: dict[str, int]
    system: str
    python: str
    polyattn: str
    libraries: dict[str, str]
    devices: dict[str, str]
    environment: dict[str, str]
    load: float | None
    when: str

    @property
    def is_busy(self) -> bool:
        """Whether others wanted the processor too."""
        return self.load is not None and self.load >= BUSY * self.cores

    def facts(self) -> dict[str, str]:
        """Return what is to be shown, by what it is about."""
        memory = [] if self.memory is None else [f"{self.memory / 2**30:.0f} GiB of memory"]
        facts = {
            "processor": _listed(
                [self.processor, f"{self.cores} core{'s' * (self.cores > 1)} to use", *memory]
            ),
            "devices": "; ".join(f"{name}: {known}" for name, known in self.devices.items()),
            "threads": _listed(f"{name} {number}" for name, number in self.threads.items()),
            "system": _listed([self.system, f"Python {self.python}", f"polyattn {self.polyattn}"]),
            "libraries": _listed(f"{name} {which}" for name, which in self.libraries.items()),
            "variables": _listed(f"{name}={value}" for name, value in self.environment.items()),
            "load": "" if self.load is None else f"{self.load:.1f} on {self.cores} cores",
            "date": self.when,
        }
        if self.is_busy:
            facts["load"] += ": this machine is busy, and the figures are worth less"
        return {name: text for name, text in facts.items() if text}

    def lines(self) -> list[str]:
        """Return the lines that it prints as."""
        return [line for name, text in self.facts().items() for line in fact(name, text)]


def fact(name: str, text: str) -> list[str]:
    """Return something that is known as lines of at most 100 columns."""
    indent = " " * 13
    # What a file says, or an error, has no say over the terminal.
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(
        plain, 99, initial_indent=f"  {name:<11}", subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def look(contenders: Iterable[Contender]) -> Machine:
    """Return what this machine is, once the backends are loaded."""
    contenders = list(contenders)
    threads = {"polyattn": thread_count()}
    libraries: dict[str, str] = {}
    for contender in contenders:
        own = contender.stem == registry.ARRAY_API
        modules = ("numpy",) if own else registry.spec_of(contender.stem).requires
        libraries |= {module: _version(module) for module in modules}
        libraries |= contender.backend.engines()
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
            name: value for name, value in sorted(os.environ.items()) if name.startswith(TELLING)
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
    """Return the versions of the array libraries that are here."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _version(module: str) -> str:
    """Return the version of a module that is loaded, which CuPy's package does not tell by name."""
    return str(getattr(sys.modules.get(module), "__version__", "of unknown version"))


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has none, and others not these
        return None


def _devices(contenders: Iterable[Contender]) -> dict[str, str]:
    """Return what the backends know of each device that is not the processor, by its name."""
    found: dict[str, str] = {}
    for contender in contenders:
        if contender.device is not None and contender.hardware != "cpu":
            known = dict(contender.backend.hardware(contender.device))
            memory = known.pop("memory", None)
            said = [str(known.pop("name", ""))]
            said += [] if memory is None else [f"{int(memory) / 2**30:.0f} GiB"]
            said += [f"{name.replace('_', ' ')} {value}" for name, value in known.items()]
            text = ", ".join(filter(None, said))
            found[contender.hardware] = max(found.get(contender.hardware, ""), text, key=len)
    return found
