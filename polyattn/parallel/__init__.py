"""Attention over sequences that are spread over many devices: one function for every engine.

Each strategy is written once, over a small `Communicator`. There are communicators for an axis of a
JAX mesh, a process group of torch, MPI, and threads.
"""

from polyattn.parallel.choice import Candidate, ParallelExplanation
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.layout import permute, positions, shard, unpermute
from polyattn.parallel.over import size_of
from polyattn.parallel.run import attention, attention_vjp, explain
from polyattn.parallel.threads import run_threads

__all__ = [
    "Candidate",
    "Communicator",
    "ParallelExplanation",
    "attention",
    "attention_vjp",
    "explain",
    "permute",
    "positions",
    "run_threads",
    "shard",
    "size_of",
    "unpermute",
]
__dir__ = __all__.copy
