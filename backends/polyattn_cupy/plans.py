"""cuDNN's plans: built once for each graph, run on the caller's stream.

A plan and its handle belong to one thread and one device, since cuDNN writes to both in a run.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from typing import Any

import cupy

from polyattn_cupy import graphs, loading
from polyattn_cupy.graphs import Graph

# The limit for one thread on one device, in case a caller's shapes rarely repeat.
MOST_PLANS = 256


class _CudnnPlan:
    """A graph that cuDNN supports, compiled when it first runs."""

    def __init__(self, graph: Graph, handle: Any) -> None:
        self.graph = graphs.build(graph, handle=handle)
        self.workspace: int | None = None
        self.execute: Any = None

    def run(self, pointers: dict[int, int], handle: Any) -> None:
        """Queue the graph on the handle's stream."""
        if self.workspace is None:
            self.graph.build_plans()
            self.execute = self._direct() or self._public
            self.workspace = int(self.graph.get_workspace_size())
        # CuPy's pool reuses memory only on the same stream, so it can be released at once.
        workspace = cupy.cuda.alloc(self.workspace) if self.workspace else None
        self.execute(pointers, 0 if workspace is None else workspace.ptr, handle)

    def _public(self, pointers: dict[int, int], workspace: int, handle: Any) -> None:
        self.graph.execute(pointers, workspace, handle=handle)

    def _direct(self) -> Any:
        """Return a shortcut past the 40 µs in which `execute` checks every pointer, or None."""
        # There is none if the frontend lacks these internals, or uses one of its own engines.
        graph = self.graph
        queue = getattr(getattr(graph, "_lowered_graph", None), "_execute_plan_at_index", None)
        chosen, choices = getattr(graph, "_plan_index", 0), getattr(graph, "plans", None)
        index = getattr(choices[chosen], "cpp_index", None) if choices else None
        if queue is None or index is None or getattr(graph, "selected_engine", None) is not None:
            return None

        def direct(pointers: dict[int, int], workspace: int, handle: Any) -> None:
            queue(pointers, workspace, index, handle.backend_handle, None, None, None)

        return direct


# ---- one thread on one device ------------------------------------------------------------------


class _DeviceHandle:
    """A handle and the plans built with it; the least recently used are dropped."""

    def __init__(self) -> None:
        self.handle = loading.library().create_handle()
        self.stream: int | None = None
        self.plans: OrderedDict[Graph, _CudnnPlan] = OrderedDict()

    def __del__(self) -> None:
        # When Python exits, the driver may be gone already, and has freed everything.
        handle = getattr(self, "handle", None)
        if handle is not None and not sys.is_finalizing():
            loading.library().destroy_handle(handle)

    def plan(self, graph: Graph) -> _CudnnPlan:
        """Return the plan of a graph, built if it is new."""
        plan = self.plans.get(graph)
        if plan is None:
            plan = self.plans[graph] = _CudnnPlan(graph, self.handle)
            if len(self.plans) > MOST_PLANS:
                self.plans.popitem(last=False)
        else:
            self.plans.move_to_end(graph)
        return plan

    def use_stream(self, stream: int) -> None:
        """Make cuDNN use a stream; it queries the driver, so only a change is passed on."""
        if stream != self.stream:
            loading.library().set_stream(handle=self.handle, stream=stream)
            self.stream = stream


_of_thread = threading.local()


def device_handle() -> _DeviceHandle:
    """Return this thread's handle for the current device."""
    handles: dict[int, _DeviceHandle] = _of_thread.__dict__.setdefault("handles", {})
    device = cupy.cuda.runtime.getDevice()
    if device not in handles:
        handles[device] = _DeviceHandle()
    return handles[device]


def run(graph: Graph, pointers: dict[int, int]) -> None:
    """Compute a graph of arrays at `pointers` on the current device and stream, without waiting."""
    on_device = device_handle()
    plan = on_device.plan(graph)
    on_device.use_stream(cupy.cuda.get_current_stream().ptr)
    plan.run(pointers, on_device.handle)


@functools.lru_cache(maxsize=1024)
def why_unsupported(graph: Graph, device: int) -> str | None:
    """Return why cuDNN cannot compute a graph on a device, or None."""
    with cupy.cuda.Device(device):
        try:
            device_handle().plan(graph)
        except Exception as error:  # the frontend raises several types
            return f"cuDNN says: {loading.first_line(error)}"
    return None


@functools.cache
def compute_capability(device: int) -> tuple[int, int]:
    """Return the compute capability (major, minor) of a device."""
    digits = cupy.cuda.Device(device).compute_capability
    return int(digits[:-1]), int(digits[-1])
