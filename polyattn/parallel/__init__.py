"""Attention over sequences that are spread over many devices: one function for every engine.

Each strategy is written once, over a small `Communicator`. There are communicators for an axis of a
JAX mesh, a process group of torch, MPI, and threads.
"""

from polyattn.parallel.choice import ParallelExplanation, StrategyCandidate
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.distributed import attention, attention_vjp, explain
from polyattn.parallel.thread_ranks import run_threads
from polyattn.parallel.token_layout import permute, positions, shard, unpermute

__all__ = [
    "Communicator",
    "ParallelExplanation",
    "StrategyCandidate",
    "attention",
    "attention_vjp",
    "explain",
    "permute",
    "positions",
    "run_threads",
    "shard",
    "unpermute",
]
__dir__ = __all__.copy
