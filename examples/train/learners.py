"""Train one model in two libraries, each with its own gradients and optimizer.

Requirements: all start with the same weights and take the same steps for the same batches, so that
losses and texts agree to within rounding.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyattn import nn

from .text import Ids

SIZE, HEADS, LAYERS, CONTEXT = 96, 3, 4, 64
BETAS, DECAY, LARGEST = (0.9, 0.99), 0.1, 1.0  # of AdamW; the norm to clip gradients to

# In a text longer than the training windows, a letter sees as many letters as in training.
WINDOW = (CONTEXT - 1, 0)


def gpt(letters: int, like: Any) -> nn.Transformer:
    """Return the model with its initial weights, which are the same in every library."""
    return nn.Transformer.init(
        letters,
        SIZE,
        HEADS,
        LAYERS,
        like=like,
        is_causal=True,
        rotary=nn.Rotary(SIZE // HEADS),
        activation="relu",
        tied=True,
    )


class Decoder(Protocol):
    """A function that continues a text."""

    def __call__(self, ids: Ids) -> NDArray[np.float32]:
        """Append letters, and return the logits of the next one."""


class Learner(Protocol):
    """A model that learns."""

    def step(self, windows: Ids, rate: float) -> float:
        """Learn from windows of shape (number, length + 1), and return the previous loss."""

    def loss(self, windows: Ids) -> float:
        """Return the mean over the letters of −log of the probability that each was given."""

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        """Return the logits after each letter, shape (length, letters), by one full pass."""

    def decoder(self, capacity: int) -> Decoder:
        """Return a decoder with a cache for this many letters."""


class Torch:
    """The model in PyTorch: an optimizer updates tensors that require gradients."""

    def __init__(self, letters: int) -> None:
        import torch

        self._torch = torch
        first = gpt(letters, torch.zeros(1))
        parameters = {name: p.requires_grad_() for name, p in first.parameters().items()}
        self._parameters = list(parameters.values())
        self._model = first.with_parameters(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, betas=BETAS, weight_decay=DECAY)

    def step(self, windows: Ids, rate: float) -> float:
        loss = self._loss(windows)
        self._optimizer.zero_grad()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._parameters, LARGEST)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        return float(loss.detach())

    def loss(self, windows: Ids) -> float:
        with self._torch.no_grad():
            return float(self._loss(windows))

    def _loss(self, windows: Ids) -> Any:
        ids = self._torch.from_numpy(windows)
        logits = self._model(ids[:, :-1])
        cross_entropy = self._torch.nn.functional.cross_entropy
        return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        with self._torch.no_grad():
            return self._model(self._torch.from_numpy(ids), window=WINDOW).numpy()

    def decoder(self, capacity: int) -> Decoder:
        caches = self._model.caches(capacity)

        def decode(ids: Ids) -> NDArray[np.float32]:
            nonlocal caches
            with self._torch.no_grad():
                new = self._torch.from_numpy(ids)
                logits, caches = self._model(new, caches=caches, window=WINDOW)
            return logits[-1].numpy()

        return decode


class Jax:
    """The model in JAX: differentiated and compiled functions of a dictionary of arrays."""

    def __init__(self, letters: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        from polyattn.integrations.jax import register

        register()  # jit then accepts caches
        model = gpt(letters, jnp.zeros(1))
        self._model, self._parameters = model, model.parameters()
        # Without the learning rate, which changes with each step.
        optimizer = optax.chain(
            optax.clip_by_global_norm(LARGEST),
            optax.scale_by_adam(*BETAS),
            optax.add_decayed_weights(DECAY),
        )
        self._state = optimizer.init(self._parameters)

        def loss(parameters: Any, windows: Any) -> Any:
            logits = model.with_parameters(parameters)(windows[:, :-1])
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels
            return cross_entropy(logits, windows[:, 1:]).mean()

        def step(parameters: Any, state: Any, windows: Any, rate: Any) -> tuple[Any, Any, Any]:
            before, gradients = jax.value_and_grad(loss)(parameters, windows)
            updates, state = optimizer.update(gradients, state, parameters)
            updates = jax.tree.map(lambda update: -rate * update, updates)
            return optax.apply_updates(parameters, updates), state, before

        def decode(parameters: Any, caches: Any, ids: Any) -> tuple[Any, Any]:
            logits, caches = model.with_parameters(parameters)(ids, caches=caches, window=WINDOW)
            return logits[-1], caches

        self._loss, self._step = jax.jit(loss), jax.jit(step)
        self._decode = jax.jit(decode)

    def step(self, windows: Ids, rate: float) -> float:
        self._parameters, self._state, before = self._step(
            self._parameters, self._state, windows.astype(np.int32), rate
        )
        return float(before)

    def loss(self, windows: Ids) -> float:
        return float(self._loss(self._parameters, windows.astype(np.int32)))

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        import jax.numpy as jnp

        model = self._model.with_parameters(self._parameters)
        return np.asarray(model(jnp.asarray(ids, jnp.int32), window=WINDOW))

    def decoder(self, capacity: int) -> Decoder:
        caches = self._model.caches(capacity)

        def decode(ids: Ids) -> NDArray[np.float32]:
            nonlocal caches
            logits, caches = self._decode(self._parameters, caches, ids.astype(np.int32))
            return np.asarray(logits)

        return decode


LEARNERS: dict[str, type[Torch] | type[Jax]] = {"torch": Torch, "jax": Jax}
