"""List the cases of caches and pages: variable-length keys, and slots that no item uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polyattn.conformance.cases.case import Generated
from polyattn.conformance.cases.expression_cases import a_block, few_selected
from polyattn.conformance.cases.generators import normal, shuffled_pages

TOPIC = "caches and pages"
Arguments = tuple[tuple[Any, Any, Any], dict[str, Any]]
PAGE, CAPACITY = 4, 12
#: The options that are numbers of batch items.
BY_ITEM = ("block_table", "key_lengths")
#: The numbers of keys at every edge of a page.
EDGES = {"no key": 0, "one key": 1, "a page - 1": PAGE - 1, "a page": PAGE, "a page + 1": PAGE + 1}
#: The keys of these end inside a page.
UNLIKE = (7, 5, 2)


def ends(*lengths: int) -> Generated:
    """Return the numbers of keys of the items."""
    return Generated(lambda case, rng: np.resize(lengths, case.batch))


def table(change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a table of shuffled pages, changed, for items of different lengths."""
    made = Generated(lambda case, rng: change(shuffled_pages(case, rng)))
    return {"block_table": made, "key_lengths": ends(*UNLIKE), "page": PAGE}


def fork(pages: Any) -> Any:
    """Let all items have the first page of the first."""
    return np.where(np.arange(pages.shape[1]) == 0, pages[0, 0], pages)


def without_unused(pages: Any) -> Any:
    """Return a table of -1 where no key of an item is."""
    used = np.arange(pages.shape[1]) * PAGE < np.asarray(UNLIKE)[:, None]
    return np.where(used, pages, -1)


MEMORIES: dict[str, dict[str, Any]] = {
    "cache": {},
    "pages": {"block_table": Generated(shuffled_pages), "page": PAGE},
}
_ANY: dict[str, dict[str, Any]] = {
    **{name: {"key_lengths": ends(length)} for name, length in EDGES.items()},
    "full": {"key_lengths": ends(CAPACITY)},
    "unlike lengths": {"key_lengths": ends(*UNLIKE)},
    "grouped heads": {"key_lengths": ends(*UNLIKE), "H": 4, "G": 2},
    "new rows": {"key_lengths": ends(11, 7, 4), "L": 3, "is_causal": True},
    "window inside a page": {"key_lengths": ends(11, 7, 12), "window": (4, 0)},
    "sinks": {"key_lengths": ends(*UNLIKE), "sinks": normal("H")},
    "one number of keys": {"key_lengths": 9, "L": 3, "is_causal": True, "batch": (1,)},
    "options together": {
        **{"key_lengths": ends(11, 7, 12), "window": (4, 0), "H": 4, "G": 2},
        **{"sinks": normal("H"), "softcap": 1.5, "scale": 0.7},
    },
    **{
        f"{poison} in unused slots": {"key_lengths": ends(*UNLIKE), "poison": poison}
        for poison in (math.nan, math.inf)
    },
}
#: So many keys that no kernel makes a mask of the few that are selected.
FEW = {"S": 96, "L": 3, "H": 4, "G": 2, "key_lengths": ends(90, 50, 96)}
_OF_PAGES = {
    "a page that items share": table(fork),
    "a page twice": table(lambda pages: pages[:, [0, 0, 1]]),
    "entries of -1": table(without_unused),
    "nan in pages without a name": table(without_unused) | {"poison": math.nan},
    "few selected keys": FEW | {"mask": Generated(few_selected)},
    "a selected block": FEW | {"mask": Generated(a_block)},
}
_ONE_ROW: dict[str, Any] = {"batch": (3,), "L": 1, "S": CAPACITY}
#: Pages as FlashAttention reads them: of a multiple of 256 keys, in 16 bits.
OF_256: dict[str, Any] = _ONE_ROW | {
    **{"block_table": Generated(shuffled_pages), "page": 256, "S": 512, "D": 16},
    **{"key_lengths": ends(300, 256, 5), "dtype": "float16"},
}
#: The cases by name: a step of decoding, each with one thing more.
CACHES: dict[str, dict[str, Any]] = {
    f"{memory}, {name}": _ONE_ROW | where | fields
    for memory, where in MEMORIES.items()
    for name, fields in (_ANY | (_OF_PAGES if where else {})).items()
} | {
    "pages of 256, options together": {
        **OF_256,
        **{"block_table": Generated(lambda case, rng: shuffled_pages(case, rng)[:1])},
        **{"L": 3, "H": 4, "G": 2, "is_causal": True, "window": (40, None), "scale": 0.7},
    },
    "pages of 256, one number of keys": {
        **OF_256,
        **{"key_lengths": 300, "L": 3, "is_causal": True, "batch": (1,)},
    },
}
#: Those that kernels get wrong in practice.
CORNERS = (
    *(
        f"{memory}, {name}"
        for memory in MEMORIES
        for name in ("no key", "new rows", "options together")
    ),
    "cache, one number of keys",
    *(f"pages, {name}" for name in ("window inside a page", "sinks", *_OF_PAGES)),
    *("cache, nan in unused slots", "pages, nan in unused slots"),
)


def of_item(arguments: Arguments, n: int) -> Arguments:
    """Return the arguments of a case for one batch item only."""
    (query, key, value), options = arguments
    one = [np.ascontiguousarray(x[n : n + 1]) for x in (query, key, value)]
    own = {name: x[n : n + 1] for name, x in options.items() if name in BY_ITEM}
    keys = (key, value) if "block_table" in options else one[1:]
    return (one[0], *keys), options | own


def of_row(arguments: Arguments, i: int) -> Arguments:
    """Return the arguments of a case of new rows for one of them, the newest of fewer keys."""
    (query, key, value), options = arguments
    rows = query.shape[-2]
    lengths = options["key_lengths"] + (i + 1 - rows)
    one = np.ascontiguousarray(query[..., i : i + 1, :])
    return (one, key, value), options | {"key_lengths": lengths}
