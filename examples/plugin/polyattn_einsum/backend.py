"""One kernel; a call that needs other features goes to the array-API kernels."""

import numpy as np

from polyattn.plugin import Backend, Kernel

__all__ = ["EinsumBackend"]


class Einsum(Kernel):
    """The formula as two products over named axes."""

    name = "einsum"
    features = frozenset({"causal", "logsumexp", "scale", "value_size"})
    # A weight of 0 times NaN is NaN, so a NaN in a masked value would reach the row.
    promises = Kernel.promises - {"poison_safe"}

    def only_on_request(self, problem):
        """Return why another kernel is better for a problem that this one can compute, or None."""
        if problem.key_length > 4096:
            return f"it holds all scores at once, and {problem.key_length:,} keys are too many"
        return None

    def __call__(self, problem, operands, backend):
        """Return output and logsumexp."""
        query, key, value = operands[:3]
        scores = problem.scale * np.einsum("...id,...jd->...ij", query, key)
        if problem.is_causal:
            position = np.arange(problem.query_length)[:, None] + problem.query_offset
            scores = np.where(np.arange(problem.key_length) <= position, scores, -np.inf)
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        # A row that sees no key: −inf − 0 is −inf, where −inf − −inf would be NaN.
        weights = np.exp(scores - np.where(highest == -np.inf, 0, highest))
        total = weights.sum(axis=-1, keepdims=True)
        output = np.einsum("...ij,...je->...ie", weights, value) / np.where(total == 0, 1, total)
        logsumexp = (highest + np.log(total))[..., 0] if "logsumexp" in problem.features else None
        return output, logsumexp


class EinsumBackend(Backend):
    """NumPy arrays on the CPU."""

    kernels = (Einsum(),)

    def __init__(self):
        super().__init__(np)

    def devices(self):
        """Return the only device."""
        return ["cpu"]
