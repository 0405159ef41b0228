"""The pool of wrong attentions: its data, its page, and what the checks find."""

import json

import pytest
import wrong_attentions
from pool.functions import CONTROLS, WRONG
from pool.rules import RULES, finds

FOUND = json.loads(wrong_attentions.FOUND.read_text(encoding="utf-8"))


def test_each_function_has_a_sentence_and_a_row_of_data():
    assert wrong_attentions.about().keys() == WRONG.keys()
    assert FOUND.keys() == CONTROLS.keys() | WRONG.keys()
    sentences = [function.__doc__.strip().partition("\n")[0] for function in WRONG.values()]
    assert len(set(sentences)) == len(WRONG) >= 60
    assert all(sentence.endswith(".") for sentence in sentences)


def test_the_whole_form_finds_all_and_the_quick_one_95_in_100():
    assert [name for name in WRONG if not FOUND[name]["check"]] == []
    assert sum(FOUND[name]["check --quick"] for name in WRONG) >= 0.95 * len(WRONG)
    assert [name for name in CONTROLS if any(FOUND[name].values())] == []


def test_the_page_is_what_was_found():
    """Mend by: python docs/wrong_attentions.py --page."""
    assert wrong_attentions.PAGE.read_text(encoding="utf-8") == wrong_attentions.page(FOUND)


FUNCTIONS = (
    *("attend", "differentiated", "index_of_16_bits", "mean_of_values", "window_of_0_is_none"),
    *("pages_sorted", "float64_in_float32", "one_head_of_each_group", "keys_up_to_512"),
)


# The checks of others on a right function, and on one that all but a check of 16 bits find.
OTHERS = [rule for rule in RULES if rule not in ("FlashInfer-Bench", "check", "check --quick")]
RUNS = [(name, "check --quick") for name in FUNCTIONS]
RUNS += [(name, rule) for name in ("attend", "mean_of_values") for rule in OTHERS]


@pytest.mark.parametrize(("name", "rule"), RUNS)
def test_a_check_finds_what_the_table_says(name, rule):
    assert finds(rule, (CONTROLS | WRONG)[name]) == FOUND[name][rule]
