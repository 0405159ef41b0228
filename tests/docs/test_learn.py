"""The worked examples: they print what they show, and give the numbers that are published."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pages
import pytest

from polyattn import attention, attention_weights, scores, use_threads

LEARN = Path(__file__).resolve().parents[2] / "docs" / "learn"
PAGES = sorted(file.name for file in LEARN.glob("*.md") if file.name != "index.md")


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("docs_learn_draw", LEARN / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(found, published):
    """Whether numbers round to what is printed with three digits."""
    np.testing.assert_allclose(found, published, rtol=0, atol=0.0005)


# ---- the pages ----


@pytest.mark.parametrize("page", PAGES)
def test_every_result_on_a_page_stands_below_the_code_that_prints_it(page):
    shown = [block.shown for block in pages.blocks(LEARN / page) if block.shown is not None]
    assert len(shown) == (LEARN / page).read_text(encoding="utf-8").count("```text\n") > 0


def test_the_index_names_each_page_once():
    linked = re.findall(r"^\d\. \[.*?\]\((.*?)\)", (LEARN / "index.md").read_text("utf-8"), re.M)
    assert sorted(linked) == PAGES


@pytest.mark.parametrize("page", ["index.md", *PAGES])
def test_every_place_that_a_page_points_to_is_there(page):
    for target in re.findall(r"\]\(([^)]+)\)", (LEARN / page).read_text(encoding="utf-8")):
        file, _, title = target.partition("#")
        assert (LEARN / file).exists(), target
        titles = re.findall(r"^#+ (.*)$", (LEARN / file).read_text("utf-8"), re.M) if title else []
        anchors = {re.sub(r"[^\w -]", "", found.lower()).replace(" ", "-") for found in titles}
        assert not title or title in anchors, target


@pytest.mark.slow
def test_a_script_draws_the_pictures_of_the_pages(draw, drawn_by, tmp_path):
    assert drawn_by(draw, tmp_path, 4000) == set(draw.PICTURES)
    shown = {
        (name, page)
        for page in PAGES
        for name in re.findall(r"\]\(\.\./images/(.*?)\)", (LEARN / page).read_text("utf-8"))
    }
    assert shown == {(name, page) for name, (page, _) in draw.PICTURES.items()}
    assert all((LEARN.parent / "images" / name).exists() for name in draw.PICTURES)


# ---- the published numbers ----


def test_the_first_products_and_the_softmax_are_those_of_the_tutorials(draw):
    names = draw.names_of("query-key-value.md")
    assert names["a"] @ names["b"] == 32
    np.testing.assert_array_equal(names["x"] @ names["W"], [13, 16])
    np.testing.assert_array_equal(names["W"] @ names["x"], [11, 17])
    np.testing.assert_allclose(names["shares"], [0.0900, 0.2447, 0.6652], rtol=0, atol=5e-5)
    by_call = attention_weights(names["query"], names["key"])
    np.testing.assert_allclose(names["weights"], by_call, rtol=1e-12)


def test_the_words_are_told_what_the_formula_tells_them(draw):
    names = draw.names_of("query-key-value.md")
    of_milk, of_cat = names["said_of_milk"][:, 1:3], names["said_of_cat"][:, 1:3]
    close(of_milk[1], [0.555, 3.445])
    close(of_milk[3], [0.178, 3.822])
    close(of_milk[2], [1.25, 2.75])
    close(of_cat[3], [3.922, 0.078])
    close(of_cat[2], [2.25, 1.75])


def test_the_published_table_divides_after_the_softmax(draw):
    late = draw.names_of("scale.md")["late"]
    close(late["sweet"][1, 1:3], [0.089, 1.911])
    close(late["hungry"][3, 1:3], [1.999, 0.001])
    close(late["hungry"][0, 1:3], [1.125, 0.875])


def test_it_turns_to_milk_in_one_sentence_and_to_cat_in_the_other_under_both_formulas(draw):
    names = draw.names_of("scale.md")
    for last, nearer, other in (("sweet", 1, 0), ("hungry", 0, 1)):
        x = names[last]
        for it in (attention(x, x, x)[2], names["late"][last][2]):
            assert names["cosine"](it, x[nearer]) > names["cosine"](it, x[other]) + 0.05


@pytest.mark.parametrize("p", [1, 2])
def test_no_scale_gives_the_printed_weights_of_the_cars(draw, p):
    names, printed = draw.names_of("other-rules.md"), np.array([0.01, 0.89, 0.1])
    magnitudes = np.geomspace(1e-6, 1, 600)
    found = np.array(
        [
            attention_weights(
                names["wanted"], names["cars"], similarity=scores.distance(p), scale=scale
            )[0]
            for scale in (*magnitudes, 0.0, *-magnitudes)
        ]
    )
    assert np.allclose(found.sum(-1), 1)
    for weights in (printed, printed[::-1]):
        rounds_to_it = abs(found - weights) < 0.005
        assert rounds_to_it[:, 1].any()
        assert not rounds_to_it.all(-1).any()


def test_the_cars_near_the_wanted_one_weigh_more_at_each_temperature(draw):
    by_temperature = draw.names_of("other-rules.md")["by_temperature"]
    for t, (far, near, farthest) in by_temperature.items():
        assert near > far > farthest
        np.testing.assert_allclose(near / far, np.exp(752 / t))
        np.testing.assert_allclose(far / farthest, np.exp(500 / t))


def test_columns_exchanged_in_query_and_key_alike_change_nothing_and_in_value_the_output(draw):
    names = draw.names_of("heads.md")
    x, output, exchanged = names["x"], names["layer"](names["x"]), names["exchanged"]
    np.testing.assert_array_equal(names["to_query"][3], [0, 0, 1, 1])
    np.testing.assert_array_equal(names["to_key"][0], [1, 1, 0, 0])
    np.testing.assert_allclose(names["both"](x), output)
    np.testing.assert_allclose(names["value_alone"](x), output[:, exchanged])
    assert abs(names["query_alone"](x) - output)[:, 2:].max() > 0.3
    np.testing.assert_allclose(names["query_alone"](x)[:, :2], output[:, :2])


# ---- what the pages say ----


def test_the_variance_of_products_is_d_and_the_gradient_vanishes_without_the_division(draw):
    names = draw.names_of("scale.md")
    for d, products in names["products"].items():
        assert abs(products.var() / d - 1) < 0.05
    vanishing, kept = names["slope"]["not divided"], names["slope"]["divided by √d"]
    assert vanishing[-1] < 0.03 < 0.15 < min(kept)


def test_each_rule_holds_still_what_the_page_says(draw):
    names = draw.names_of("other-rules.md")
    level = {name for name, keys in names["grown"].items() if np.ptp(keys) < 1e-9}
    assert level == {"by_norm()", "by_norm(√S)", "cosine, scale 10"}
    flattened = {name for name, share in names["longer"].items() if share[-1] > 0.99}
    assert flattened == {"by_norm()", "long_sequence()"}


def test_the_textbook_formula_holds_all_scores_and_attention_does_not(draw):
    names = draw.names_of("cost.md")
    arrays = names["inputs"](2048, 64)
    with use_threads(1):
        textbook, ours = (names["mebibytes"](names[f], arrays) for f in ("textbook", "attention"))
    assert textbook > 2048**2 * 4 / 2**20 > 4 * ours


def test_the_table_of_measurements_has_the_slopes_that_the_page_counts(draw):
    table = draw.measured()
    assert [tuple(row[:2]) for row in table] == draw.SIZES
    for n, _, *_, held, ours, _ in table:
        assert held > n**2 * 4 / 2**20 > 1.5 * ours or n < 2048
    before, after = (table[table[:, 1] == 64][i] for i in (3, 6))
    times = after[2:5] / before[2:5]
    assert after[0] == 8 * before[0]
    assert 40 < times[0] < 90
    assert 40 < times[1] < 90
    assert 5 < times[2] < 12
