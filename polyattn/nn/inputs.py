"""Turn images and sound into tokens: the first layers of ViT and of Whisper's encoder."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn._base.arrays import Array, facts_of, library_of
from polyattn.nn.layers import ACTIVATIONS, Linear, check_activation
from polyattn.nn.module import Module


@dataclass(frozen=True, eq=False, repr=False)
class PatchEmbedding(Module):
    """Map each patch of an image to a token, with a learned token before them.

    Attributes
    ----------
    linear : Linear
        Map from the numbers of a patch, (C, P, P) in a row, to a token.
    first : Array or None
        The learned token, shape (size,).
    image : tuple of int
        Shape (C, height, width) of an image.
    patch : int
        P, the height and width of a patch.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> pixels = np.ones((2, 3, 8, 8))
    >>> linear = nn.Linear.init(3 * 4 * 4, 16, like=pixels)
    >>> nn.PatchEmbedding(linear, np.ones(16), (3, 8, 8), 4)(pixels).shape
    (2, 5, 16)
    """

    linear: Linear
    first: Array | None
    image: tuple[int, int, int]
    patch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", tuple(self.image))
        if self.patch < 1 or any(side % self.patch for side in self.image[1:]):
            raise ValueError(
                f"patches of {self.patch} pixels do not divide an image of {self.image[1:]}"
            )

    def __call__(self, pixels: Array) -> Array:
        """Return the tokens of images, shape (..., C, height, width), as (..., L, size)."""
        xp = library_of(pixels, "pixels").xp
        if tuple(pixels.shape[-3:]) != self.image:
            raise ValueError(
                f"pixels must have the shape {('...', *self.image)}; got {tuple(pixels.shape)}"
            )
        batch, n = tuple(pixels.shape[:-3]), len(pixels.shape) - 3
        channels, high, wide = self.image[0], *(side // self.patch for side in self.image[1:])
        x = xp.reshape(pixels, (*batch, channels, high, self.patch, wide, self.patch))
        x = xp.permute_dims(x, (*range(n), n + 1, n + 3, n, n + 2, n + 4))
        x = self.linear(xp.reshape(x, (*batch, high * wide, channels * self.patch**2)))
        if self.first is None:
            return x
        first = xp.broadcast_to(self.first, (*batch, 1, x.shape[-1]))
        return xp.concat((first, x), axis=-2)


@dataclass(frozen=True, eq=False, repr=False)
class FrameEmbedding(Module):
    """Map the frames of a spectrogram to half as many tokens, by two convolutions over time.

    Attributes
    ----------
    first, second : Linear
        Maps from three neighbouring frames in a row to one; the second goes in steps of two.
    activation : str
        One of ``gelu``, ``gelu_tanh``, ``relu`` and ``silu``, after each.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> frames = np.ones((2, 80, 100))
    >>> maps = [nn.Linear.init(3 * n, 16, like=frames) for n in (80, 16)]
    >>> nn.FrameEmbedding(*maps)(frames).shape
    (2, 50, 16)
    """

    first: Linear
    second: Linear
    activation: str = "gelu"

    def __post_init__(self) -> None:
        check_activation(self.activation)

    def __call__(self, frames: Array) -> Array:
        """Return the tokens of sound, shape (..., bands, T), as (..., T / 2, size)."""
        xp = library_of(frames, "frames").xp
        if len(frames.shape) < 2 or frames.shape[-1] < 1:
            raise ValueError(f"frames must have the shape (..., bands, T); got {facts_of(frames)}")
        activate = ACTIVATIONS[self.activation]
        x = activate(self.first(_neighbours(xp.matrix_transpose(frames), 1)))
        return activate(self.second(_neighbours(x, 2)))


def _neighbours(x: Array, step: int) -> Array:
    """Return each row, at steps, between the one before and the one after, 0 beyond the ends."""
    xp = library_of(x).xp
    zero = xp.zeros_like(x[..., :1, :])
    padded, length = xp.concat((zero, x, zero), axis=-2), x.shape[-2]
    return xp.concat([padded[..., n : n + length : step, :] for n in range(3)], axis=-1)
