"""PyTorch's devices and primitives.

Autocast must not reach a kernel: it would silently turn float32 products into 16-bit ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch

from polyattn.plugin import Array, Backend, Kernel, Operands, Problem
from polyattn_torch.autograd import autocast_disabled, in_forward_mode, is_autocast_enabled
from polyattn_torch.flash_paged import Paged
from polyattn_torch.flex import Flex
from polyattn_torch.kernel_node import node_of, run_node
from polyattn_torch.lengths import calls_by_lengths
from polyattn_torch.sdpa import Sdpa
from polyattn_torch.workarounds import product


class TorchBackend(Backend):
    """PyTorch tensors on any of torch's devices."""

    kernels = (Paged(), Sdpa(), Flex())

    def __init__(self) -> None:
        super().__init__(xp)

    def devices(self) -> list[str]:
        """Return the available devices, the CPU first."""
        devices = ["cpu"]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            count = torch.accelerator.device_count()
            devices += [f"{accelerator.type}:{number}" for number in range(count)]
        return devices

    def hardware(self, device: str) -> dict[str, str | int]:
        """Return the facts that torch knows about an accelerator; none for the CPU."""
        known: dict[str, str | int] = {}
        with contextlib.suppress(Exception):  # absent, or cannot be asked
            if device.startswith(("cuda", "xpu")):
                properties = getattr(torch, device.partition(":")[0]).get_device_properties(device)
                known = {"name": properties.name, "memory": properties.total_memory}
            if device.startswith("cuda") and torch.version.hip is None:
                known["compute_capability"] = f"{properties.major}.{properties.minor}"
            if device.startswith("mps"):
                known = {"memory": torch.mps.recommended_max_memory()}
        return known

    def engines(self) -> dict[str, str]:
        """Return the versions of CUDA or ROCm and of cuDNN, if torch is built with them."""
        known = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "cudnn": None}
        with contextlib.suppress(Exception):  # built with cuDNN, but it cannot be loaded
            number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            if number is not None and torch.version.hip is None:
                known["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        return {name: version for name, version in known.items() if version is not None}

    def place(self, array: Array, device: str | None) -> torch.Tensor:
        """Return `array` as a tensor on `device`, without a copy if it is there already."""
        tensor = array if isinstance(array, torch.Tensor) else _import(array)
        return tensor if device is None else tensor.to(device)

    def fetch(self, array: Array) -> Any:
        """Return a tensor as a NumPy array, without a copy if it is on the CPU."""
        host = array.detach().resolve_conj().resolve_neg().cpu()
        if host.dtype == torch.bfloat16:
            try:
                import ml_dtypes
            except ImportError:
                raise ImportError(
                    "NumPy has bfloat16 only through ml_dtypes: pip install ml_dtypes"
                ) from None
            return host.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return host.numpy()

    def synchronize(self, device: str | None = None) -> None:
        """Wait until all work on the device is done."""
        if device is not None and not device.startswith(("cpu", "meta")):
            torch.accelerator.synchronize(device)

    @property
    def block(self) -> int:
        """The number of scores that stay in the caches of the threads, which share the scores."""
        return super().block * torch.get_num_threads()

    def matmul(self, a: Array, b: Array) -> torch.Tensor:
        """Return the matrix product of two stacks of matrices."""
        return product(a, b)

    def constant(self, array: Array) -> torch.Tensor:
        """Return a tensor without its graph."""
        return array.detach()  # type: ignore[no-any-return]

    def softmax(self, scores: Array) -> tuple[Array, Array, Array]:
        """Return the softmax before its division, with one tensor as large as the scores."""
        maximum = scores.amax(dim=-1, keepdim=True)
        weights = (scores - maximum.masked_fill(maximum == -torch.inf, 0)).exp_()
        return weights, maximum, weights.sum(dim=-1, keepdim=True)

    def sigmoid(self, scores: Array) -> torch.Tensor:
        """Return the sigmoid of each score."""
        return torch.sigmoid(scores)

    def largest(self, numbers: Array, count: int) -> torch.Tensor:
        """Return the places of the largest numbers of each row, without sorting them."""
        least = numbers.topk(count).values[..., -1:]
        chosen, equal = numbers > least, numbers == least
        left = count - chosen.sum(-1, keepdim=True, dtype=torch.int32)
        chosen |= equal & (equal.cumsum(-1, dtype=torch.int32) <= left)
        # The first places are the largest of those that count down.
        down = torch.arange(numbers.shape[-1], 0, -1, dtype=torch.int32, device=numbers.device)
        counted = torch.where(chosen, down, 0).topk(count).values
        places: torch.Tensor = numbers.shape[-1] - counted.long()
        return places

    def empty_result(self, problem: Problem, like: Array) -> tuple[Array, Array | None] | None:
        """Allocate the result of a call, unless autograd records it."""
        if problem.requires_grad or problem.transforms or torch.compiler.is_compiling():
            return None
        output = like.new_empty((*problem.scores[:-1], problem.value_size))
        if "logsumexp" not in problem.features:
            return output, None
        accumulator = getattr(torch, problem.accumulator)
        return output, like.new_empty(problem.scores[:-1], dtype=accumulator)

    def is_eager(self, array: Array) -> bool:
        """Return whether this is an ordinary tensor on the CPU, and nobody records operations."""
        return _is_ordinary(array) and not _is_recorded()

    def is_plain(self, *arrays: Array) -> bool:
        """Return whether tensors are ordinary ones, and no derivative is recorded."""
        return all(map(_is_ordinary, arrays)) and not (
            _is_recorded()
            or torch._C._are_functorch_transforms_active()
            or in_forward_mode()
            or (torch.is_grad_enabled() and any(array.requires_grad for array in arrays))
        )

    def pullback(
        self, function: Callable[[Array], Array], array: Array, gradient: Array
    ) -> torch.Tensor:
        """Return the gradient of an array from that of a function of it, by torch.func.vjp."""
        _, pullback = torch.func.vjp(function, array)[:2]
        (result,) = pullback(gradient)
        # An absent key has a gradient of 0, whatever the function's slope is there.
        return torch.where((gradient == 0) & ~torch.isfinite(result), 0.0, result)

    def run(
        self, kernel: Kernel, problem: Problem, operands: Operands
    ) -> tuple[Array, Array | None]:
        """Run a kernel with autocast off, as one node of autograd where it has derivatives."""
        kind = problem.device_kind
        if is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self.run(kernel, problem, operands)
        if problem.mask_spec is not None:
            calls = calls_by_lengths(kernel, problem, operands, self)
            if len(calls) > 1:
                outputs, sums = zip(*[self.run(kernel, *call) for call in calls], strict=True)
                return torch.cat(outputs), None if sums[0] is None else torch.cat(sums)
            problem, operands = calls[0]
        if problem.requires_grad or problem.transforms:
            recorded = node_of(kernel, problem, operands, self)
            if recorded is not None:
                return run_node(*recorded, problem)
        if problem.mask_spec is not None and "poison_safe" not in kernel.promises:
            return super().run(kernel, problem, operands)
        return kernel(problem, operands, self)

    def shield(
        self, problem: Problem, operands: Operands
    ) -> contextlib.AbstractContextManager[Any]:
        """Turn autocast off for derivatives and weights; `run` does so itself."""
        return autocast_disabled(problem.device_kind)


def _is_ordinary(array: torch.Tensor) -> bool:
    return array.is_cpu and type(array) in (torch.Tensor, torch.nn.Parameter)


def _is_recorded() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # jit.trace, and export by it
        or torch._C._len_torch_dispatch_stack() > 0  # make_fx
    )


def _import(array: Array) -> torch.Tensor:
    if isinstance(array, np.generic):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray):
        return torch.utils.dlpack.from_dlpack(array)
    # torch aborts the process on a negative stride (pytorch#188023), refuses foreign byte orders
    # and fields of records, and warns about read-only memory.
    size = array.dtype.itemsize
    if any(stride < 0 or stride % size for stride in array.strides) or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    if array.dtype.name == "bfloat16":
        return _import(array.view(np.uint16)).view(torch.bfloat16)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)
