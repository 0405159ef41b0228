"""Check the gradients of a function, by the differentiation of its own library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn._base.arrays import facts_of
from polyattn.conformance.cases.case import ARRAYS, Case
from polyattn.conformance.checks.autodiff import VJP, gradients_of
from polyattn.conformance.functions.check import AGREES, DIFFERS, RAISES, Finding, given, text_of
from polyattn.conformance.functions.serving import Function, NoArgumentError
from polyattn.conformance.functions.signatures import in_our_words
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks
from polyattn.conformance.reference.tolerance import deviation


def has_gradients(to: Callable[[Any], Any], like: Any) -> bool:
    """Return whether the library that `to` converts an array to can differentiate."""
    return facts_of(to(like)).library in VJP


def check_gradients(
    function: Function, case: Case, to: Callable[[Any], Any], back: Callable[[Any], Any]
) -> Finding:
    """Check the gradients of a function by query, key, value, bias and sinks."""
    function = in_our_words(function)
    try:
        arrays, keywords = given(function, case, case.arguments(), to)
        inputs = dict(zip(ARRAYS, arrays, strict=True))
        options = {"bias": "bias" if "bias" in keywords else "attn_mask", "sinks": "sinks"}
        yards = gradient_yardsticks(case)
        inputs |= {name: keywords.pop(options[name]) for name in options if name in yards}

        def call(query: Any, key: Any, value: Any, **named: Any) -> Any:
            others = {options[name]: x for name, x in named.items()}
            output = function(query, key, value, **keywords, **others)
            return output[0] if isinstance(output, (tuple, list)) else output

        gradients = gradients_of(call, inputs, to(cotangent(case)))
        results = {name: back(x) for name, x in gradients.items()}
    except NoArgumentError as error:
        return Finding("no argument", missing=str(error))
    except (Exception, SystemExit) as error:
        return Finding(RAISES, error=text_of(error))
    off = {name: deviation(x, yards[name], f"{case}: {name}") for name, x in results.items()}
    wrong = [name for name, one in off.items() if one.fault is not None]
    worst = max(off.values(), key=lambda one: one.share)
    meaning = f"by {', '.join(wrong)}" if wrong else ""
    return Finding(DIFFERS if wrong else AGREES, worst, interpretation=meaning)
