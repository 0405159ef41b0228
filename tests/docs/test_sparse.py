"""The page about sparse attention: its recipes are the formulas of the papers that it names."""

from pathlib import Path

import numpy as np
import pages
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sparse.md"
H, L, D, SIZE = 8, 64, 32, 8


@pytest.fixture(scope="module")
def names():
    """What the page made, with arrays in float64 and without the axis of items."""
    made = dict(pages.run(PAGE)[-1].names)
    return {name: np.asarray(x, np.float64)[0] if name in ARRAYS else x for name, x in made.items()}


ARRAYS = ("query", "key", "value", "index_query", "index_key", "index_weights", "keys", "output",
    "of_blocks", "of_branches")  # fmt: skip


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def row_of(query, key, value, seen):
    """Return a row of attention over the keys in a list."""
    seen = sorted(seen)
    return softmax(key[seen] @ query / D**0.5) @ value[seen]


def assert_rows(found, expected):
    rows = [expected(h, t) for h, t in np.ndindex(H, L)]
    np.testing.assert_allclose(found.reshape(H * L, D), rows, rtol=1e-4, atol=2e-6)


def test_the_keys_of_the_indexer_are_those_of_the_lightning_indexer(names):
    """DeepSeek-V3.2, equations 1 and 2."""
    q, k, w = (names[name] for name in ("index_query", "index_key", "index_weights"))
    seen = []
    for t in range(L):
        index = [sum(w[j, t] * max(q[j, t] @ k[0, s], 0) for j in range(4)) for s in range(t + 1)]
        seen.append(sorted(np.argsort(-np.array(index), kind="stable")[:16]))
        found = names["keys"][0, t].astype(int)
        assert found.tolist() == seen[t] + [-1] * (16 - len(seen[t]))
    query, key, value = (names[name] for name in ("query", "key", "value"))
    assert_rows(names["output"], lambda h, t: row_of(query[h, t], key[h], value[h], seen[t]))


def test_moba_is_that_of_the_paper(names):
    """Equations 2 to 6 of arXiv:2502.13189: the top 3 of scores, +inf for the block at hand."""
    query, key, value = (names[name] for name in ("query", "key", "value"))

    def row(h, t):
        gate = np.array([query[h, t] @ key[h, i : i + SIZE].mean(0) for i in range(0, L, SIZE)])
        gate[t // SIZE] = np.inf
        gate[t // SIZE + 1 :] = -np.inf
        best = np.argsort(-gate, kind="stable")[:3]
        seen = [s for s in range(t + 1) if s // SIZE in best]
        return row_of(query[h, t], key[h], value[h], seen)

    assert_rows(names["of_blocks"], row)


def test_nsa_is_that_of_the_paper(names):
    """Equations 5 to 12 of arXiv:2502.11089, with blocks of one size in both branches."""
    query = names["query"]
    (cmp_k, slc_k, win_k), (cmp_v, slc_v, win_v) = names["branches"][:, :, 0].astype(float)
    gates = names["gates"][:, 0].astype(float)
    starts = range(0, L, SIZE)

    def compressed(g, h, t):
        ended = [i for i in starts if i + SIZE - 1 <= t]
        keys = [cmp_k[g, i : i + SIZE].mean(0) for i in ended]
        weights = softmax(np.array(keys) @ query[h, t] / D**0.5) if ended else np.zeros(0)
        values = [w * cmp_v[g, i : i + SIZE].mean(0) for w, i in zip(weights, ended, strict=True)]
        return np.append(weights, np.zeros(len(starts) - len(ended))), sum(values, np.zeros(D))

    def row(h, t):
        g, own = h // 4, t // SIZE
        shared = sum(compressed(g, other, t)[0] for other in range(4 * g, 4 * g + 4))
        order = sorted(range(own + 1), key=lambda i: (i not in (0, own - 1, own), -shared[i], i))[
            :4
        ]
        seen = [s for s in range(t + 1) if s // SIZE in order]
        parts = (
            compressed(g, h, t)[1],
            row_of(query[h, t], slc_k[g], slc_v[g], seen),
            row_of(query[h, t], win_k[g], win_v[g], range(max(0, t - 15), t + 1)),
        )
        return sum(gate * part for gate, part in zip(gates[:, h, t], parts, strict=True))

    assert_rows(names["of_branches"], row)
