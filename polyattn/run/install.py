"""Let code that imports FlashAttention or xFormers find these modules."""

from __future__ import annotations

import contextlib
import sys

from polyattn.run.stand_ins import PACKAGES, TUPLES, spec_of, start


def install(*packages: str, tuples: bool = False) -> contextlib.ExitStack:
    """Let ``import flash_attn`` find these functions.

    `importlib.util.find_spec`, `importlib.metadata.version` and ``packages_distributions`` answer
    as if FlashAttention were installed. Code that asks for a GPU besides, as transformers does for
    ``attn_implementation="flash_attention_2"``, still refuses: there, set
    ``attn_implementation="polyattn"``.

    Parameters
    ----------
    *packages : str
        "flash_attn" and "flash_attn_interface", which are FlashAttention 2 and 3; "xformers",
        "natten". By default FlashAttention 2. Code that can use both prefers the newer.
    tuples : bool
        Whether the functions of ``flash_attn_interface``, except that for caches, return
        ``(output, logsumexp)``, as they did before August 2025. Code of that time takes the first
        item: without this, ``output, _ = flash_attn_varlen_func(...)`` takes two rows.

    Returns
    -------
    ExitStack
        A context manager that takes the modules away at its end, as ``close()`` does.

    Raises
    ------
    NotImplementedError
        If another package is asked for.
    RuntimeError
        If the real package is installed, or these modules already are.
    ValueError
        If `tuples` is given without ``flash_attn_interface``.

    Examples
    --------
    >>> from polyattn.dialects import flash_attn
    >>> with flash_attn.install():
    ...     from flash_attn import flash_attn_func
    >>> flash_attn_func is flash_attn.flash_attn_func
    True
    """
    packages = packages or ("flash_attn",)
    for name in packages:
        if name not in PACKAGES:
            raise NotImplementedError(f"install() brings {', '.join(PACKAGES)}; got {name!r}")
        if name in sys.modules or spec_of(name) is not None:
            raise RuntimeError(
                f"{name} is installed already: uninstall it, close what install() returned, or"
                " leave install() out under `polyattn run`"
            )
    if tuples and "flash_attn_interface" not in packages:
        raise ValueError("tuples=True is about flash_attn_interface: name it too")
    suffixes = {"flash_attn_interface": TUPLES} if tuples else {}
    installed = contextlib.ExitStack()
    installed.callback(start(name + suffixes.get(name, "") for name in packages).close)
    return installed
