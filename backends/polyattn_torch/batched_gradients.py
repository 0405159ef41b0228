"""The batches of gradients of ``torch.autograd.grad(is_grads_batched=True)``.

torch makes them by an older vmap, which does not support many operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_Optionals = Sequence[torch.Tensor | None]


def apply_batched(
    function: Callable[..., Sequence[torch.Tensor | None]], gradients: _Optionals
) -> Sequence[torch.Tensor | None]:
    """Return a function of gradients, mapped by torch.func.vmap if the older vmap batched them."""
    if torch.compiler.is_compiling() or not any(map(_is_batched, gradients)):
        return function(*gradients)
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "attention does not support torch.autograd.grad(is_grads_batched=True,"
            " create_graph=True): take the derivative by torch.func.jacrev, or gradient by gradient"
        )
    # The level of the older vmap that called: torch tells it only to one who enters another.
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    given = [
        torch._remove_batch_dim(one, level, 1, 0)  # type: ignore[arg-type]
        if _is_batched(one)
        else one
        for one in gradients
    ]
    places: list[int] = []  # of the results that are not None, which vmap does not take

    def present(*items: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        results = function(*items)
        places[:] = [n for n, one in enumerate(results) if one is not None]
        places.append(len(results))
        return tuple(one for one in results if one is not None)

    in_dims = tuple(0 if _is_batched(one) else None for one in gradients)
    mapped = torch.func.vmap(present, in_dims)(*given)
    result: list[torch.Tensor | None] = [None] * places.pop()
    for place, one in zip(places, mapped, strict=True):
        result[place] = torch._add_batch_dim(one, 0, level)
    return result


def _is_batched(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)
