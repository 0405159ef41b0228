"""Choose a strategy for a call, from static facts that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyattn._base.text_table import table
from polyattn.parallel.call import ParallelCall, described
from polyattn.parallel.decode import Decode
from polyattn.parallel.gather import Gather
from polyattn.parallel.heads import Heads
from polyattn.parallel.ring import Ring
from polyattn.parallel.strategy import Strategy

#: The strategies, in the order in which "auto" tries them. It never takes "decode", which differs
#: in what each rank holds.
STRATEGIES: dict[str, Strategy] = {x.name: x for x in (Heads(), Gather(), Ring(), Decode())}
#: The bytes of all keys and values up to which "auto" gathers them on every rank.
KEYS_THAT_FIT = 2**30


@dataclass(frozen=True)
class StrategyCandidate:
    """A strategy and its status for a call.

    Attributes
    ----------
    strategy : str
        Its name.
    status : str
        ``chosen``, ``next`` if it could run, or ``refused``.
    reasons : tuple of str
        Why it was refused, or passed over.
    pairs : tuple of float
        The number of pairs of chunks that each rank computes: those of which a row may see a key by
        causality and window. Of some heads only, a pair counts as that share.
    bytes_sent : int
        The bytes that a rank sends to others for the output.
    """

    strategy: str
    status: str
    reasons: tuple[str, ...] = ()
    pairs: tuple[float, ...] = ()
    bytes_sent: int = 0


@dataclass(frozen=True)
class ParallelExplanation:
    """The strategy that shares a call among ranks, and the reasons against the others.

    It prints as a table.

    Attributes
    ----------
    size : int
        The number of ranks.
    layout : str
        Which tokens each rank holds.
    source : str
        What chose: the argument ``strategy``.
    candidates : tuple of StrategyCandidate
        All strategies, in the order in which they were tried.
    call : ParallelCall
        The whole call.
    """

    size: int
    layout: str
    source: str
    candidates: tuple[StrategyCandidate, ...]
    call: ParallelCall

    @property
    def visible_pairs(self) -> int:
        """The number of pairs of chunks of the whole call of which a row may see a key."""
        return self.call.visible_pairs

    @property
    def chosen(self) -> StrategyCandidate | None:
        """The strategy that would run, or None if none can."""
        return next((c for c in self.candidates if c.status == "chosen"), None)

    def __str__(self) -> str:
        problem = self.call.problem
        lengths = f"L = {problem.query_length}, S = {problem.key_length}"
        cells = [
            (
                c.strategy,
                "CHOSEN" if c.status == "chosen" else c.status,
                _shown(c.pairs),
                f"{c.bytes_sent / 1e6:.1f} MB" if c.pairs else "",
                "; ".join(c.reasons),
            )
            for c in self.candidates
        ]
        return "\n".join(
            [
                f"attention over {self.size} ranks: {lengths}, {self.layout},"
                f" {self.call.chunks} chunks, {self.visible_pairs} visible pairs",
                f"needs: {', '.join(sorted(problem.features)) or 'nothing beyond the formula'}",
                f"selected by {self.source}: pairs and bytes sent of a rank",
                *table(cells),
            ]
        )


def _shown(pairs: tuple[float, ...]) -> str:
    if not pairs:
        return ""
    low, high = min(pairs), max(pairs)
    return f"{low:g} pairs" if low == high else f"{low:g} to {high:g} pairs"


def examined(
    function: str,
    arrays: dict[str, Any],
    options: dict[str, Any],
    size: int,
    strategy: Any,
    layout: str,
) -> ParallelExplanation:
    """Return the decision about a call, with all reasons."""
    names = ["auto", *STRATEGIES]
    if strategy not in names:
        raise ValueError(f"strategy must be one of {', '.join(names)}; got {strategy!r}")
    shares_rows = strategy == "auto" or STRATEGIES[strategy].shares_rows
    call = described(function, arrays, options, size=size, layout=layout, shares_rows=shares_rows)
    source, candidates = f"strategy={strategy!r}", tuple(_candidates(call, strategy))
    return ParallelExplanation(size, layout, source, candidates, call)


def chosen(decision: ParallelExplanation) -> Strategy:
    """Return the strategy that was chosen; raise if there is none."""
    if decision.chosen is not None:
        return STRATEGIES[decision.chosen.strategy]
    (named,) = decision.candidates
    raise NotImplementedError(
        f"strategy {named.strategy!r} cannot compute this call over {decision.size} ranks:"
        f" {'; '.join(named.reasons)}"
    )


def _candidates(call: ParallelCall, strategy: str) -> list[StrategyCandidate]:
    """Return the strategies that a call may take, in order, each with its status."""
    names = [strategy] if strategy != "auto" else [x for x in STRATEGIES if x != "decode"]
    candidates, free = [], True
    refused = {name: STRATEGIES[name].reasons_against(call) for name in names}
    for name in names:
        if refused[name]:
            candidates.append(StrategyCandidate(name, "refused", tuple(refused[name])))
            continue
        passed_over: tuple[str, ...] = ()
        if name == "gather" and "ring" in refused and not refused["ring"]:
            passed_over = _reasons_to_prefer_a_ring(call)
        status = "chosen" if free and not passed_over else "next"
        free = free and status != "chosen"
        pairs, sent = STRATEGIES[name].pairs(call), STRATEGIES[name].bytes_sent(call)
        candidates.append(StrategyCandidate(name, status, passed_over, pairs, sent))
    return candidates


def _reasons_to_prefer_a_ring(call: ParallelCall) -> tuple[str, ...]:
    total = STRATEGIES["gather"].bytes_of_keys(call) * call.size
    text = f"all keys and values take {total / 2**30:.1f} GiB on every rank"
    return (text,) if total > KEYS_THAT_FIT else ()
