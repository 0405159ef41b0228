"""The page of masks: its pictures are drawn, its arithmetic is attention's, its peers agree."""

import importlib
import math
import re
from pathlib import Path

import matplotlib
import numpy as np
import pages
import pytest
from optional import F, causal_lower_right, causal_upper_left, flex, jax, jnp, splash, torch
from transformers import masking_utils as theirs

from polyattn import attention, masks
from polyattn.conformance.functions.subjects import SUBJECTS

matplotlib.use("Agg")
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "masks.md").read_text(encoding="utf-8")


def visible(batch, heads, rows, keys, **options):
    """Which keys take part: attention over values that are the rows of an identity."""
    query, key = np.zeros((batch, heads, rows, 1)), np.zeros((batch, heads, keys, 1))
    value = np.broadcast_to(np.eye(keys), (batch, heads, keys, keys))
    return attention(query, key, value, **options) > 0


def by_arithmetic(shape, formula, names):
    """The same by a formula in Python, a score at a time; rows stand where they are counted."""
    code = compile(formula, "masks.md", "eval")
    seen = np.empty(shape, bool)
    for b, h, i, j in np.ndindex(*shape):
        seen[b, h, i, j] = eval(code, names | {"b": b, "h": h, "i": i, "p": i, "j": j})
    return seen


# ---- the gallery ----

DRAWN = re.findall(r"^!\[[^]]+\]\(([^)]+)\)\n\n```python\n.*?```\n\n(.*?)\n\n", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def gallery():
    """The names after each block that draws a picture."""
    ran = pages.run(DOCS / "masks.md")
    return {done.block.picture: done.names for done in ran if done.block.picture}


def test_each_code_block_of_the_gallery_draws_its_picture(gallery, drawn_by, tmp_path):
    (tmp_path / "images").mkdir()
    plots = {f"images/{file.name}" for file in (DOCS / "images").glob("plot-*.png")}
    assert drawn_by(importlib.import_module("masks"), tmp_path, 2000) == {*gallery, *plots}
    assert len(plots) == (DOCS / "plot.md").read_text(encoding="utf-8").count("](images/") == 4
    assert len(gallery) == len(DRAWN) >= 17
    assert all((DOCS / picture).exists() for picture in gallery)


def test_the_grid_leads_to_each_picture_of_the_gallery():
    thumbnails = re.findall(r"\[!\[\]\(images/thumb-(.+?)\)<br>.+?\]\(#(.+?)\)", PAGE)
    assert [f"images/mask-{name}" for name, _ in thumbnails] == [picture for picture, _ in DRAWN]
    titles = re.findall(r"^### (.+)\n\n!", PAGE, flags=re.MULTILINE)
    slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    assert [anchor for _, anchor in thumbnails] == slugs
    assert all((DOCS / f"images/thumb-{name}").exists() for name, _ in thumbnails)


def test_the_arithmetic_beside_a_picture_is_what_attention_computes(gallery):
    for picture, text in DRAWN:
        names, text = gallery[picture], " ".join(text.split())
        formula = re.search(r"sees key `j` where `(.*?)`", text) or re.match(r"`(.*?)`", text)
        length = (
            256
            if any(word in repr(names["mask"]) for word in ("256", "rule", "neighborhood"))
            else 64
        )
        shape = (2 if "padding" in picture else 1, 1, length, length)
        seen, told = visible(*shape, mask=names["mask"]), by_arithmetic(shape, formula[1], names)
        np.testing.assert_array_equal(seen, told, picture)


# ---- the tables ----

B, H, L, S, W, C = 2, 2, 6, 9, 4, 4
RNG = np.random.default_rng(0)
SEEN = RNG.random((L, S)) < 0.6
PADDED = np.arange(S) >= np.array([[9], [5]])
LETTERS = {
    "masks": masks,
    "np": np,
    "inf": math.inf,
    **{"B": B, "H": H, "L": L, "S": S, "W": W, "C": C, "P": S - L, "left": 3, "right": 1},
    "offset": 2,
    "seen": SEEN,
    "added": np.where(SEEN, RNG.normal(size=(L, S)), -np.inf),
    "hidden": ~SEEN,
    "hidden3": RNG.random((B * H, L, S)) < 0.4,
    "padded": PADDED,
    "ones": (~PADDED).astype(int),
    "finite": np.where(PADDED[:, None, None], np.finfo("float32").min, np.zeros((B, 1, L, S))),
    "lengths": np.array([9, 7]),
    "rows": np.array([6, 4]),
    "cu": np.array([0, 2, 5, 6]),
    "cu_k": np.array([0, 4, 7, 9]),
    "ids": np.array([0, 0, 1, 1, 1, 2]),
    "key_ids": np.array([0, 0, 0, 0, 1, 1, 1, 2, 2]),
    "position_ids": np.array([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0]]),
}
LETTERS["document"] = lambda cu, i: next(n for n in range(3) if cu[n] <= i < cu[n + 1])
LETTERS["packed"] = lambda b, i: sum(LETTERS["position_ids"][b, : i + 1] == 0)

ROWS = re.findall(r"^\| (.*?) \| `(.*)` \| `(.*)` \|$", PAGE, flags=re.MULTILINE)


def keys_of(row):
    """S of a row of the tables: L where queries and keys are one sequence."""
    same = "position_ids" in row[0] or ("cu_seqlens" in row[0] and "cu_k" not in row[1])
    return L if same else S


def test_what_to_write_means_what_the_other_library_computes():
    assert len(ROWS) == len(re.findall(r"^\|", PAGE.partition("## From other")[2], re.M)) - 2 * 4
    for row in ROWS:
        name, ours, formula = row
        shape = (B, H, L, keys_of(row))
        seen = visible(*shape, **eval(f"dict({ours})", LETTERS))
        np.testing.assert_array_equal(seen, by_arithmetic(shape, formula, LETTERS), name)


def test_positions_say_what_documents_of_their_own_offsets_see():
    names, ids = LETTERS.copy(), LETTERS["ids"]
    names["positions"] = np.array([2, 3, 0, 1, 2, 1])
    names["key_positions"] = np.array([0, 1, 2, 3, 0, 1, 2, 0, 1])
    ours = eval(re.search(r"`(masks\.segments\(ids, key_ids\) & .*?)`", PAGE, re.S)[1], names)
    formula = "ids[i] == key_ids[j] and j - cu_k[ids[i]] <= i - cu[ids[i]] + own"
    own = np.diff(names["cu_k"]) - np.diff(names["cu"])
    expected = np.array(
        [
            [eval(formula, names | {"i": i, "j": j, "own": own[ids[i]]}) for j in range(S)]
            for i in range(L)
        ]
    )
    np.testing.assert_array_equal(visible(1, 1, L, S, mask=ours)[0, 0], expected)


# ---- the peers themselves ----


def by_torch(**options):
    """What SDPA sees: as `visible`."""
    query, key, value = (torch.zeros(B, H, n, 1) for n in (L, S, S))
    value = torch.eye(S).expand(B, H, S, S)
    options = {n: torch.as_tensor(x) if n == "attn_mask" else x for n, x in options.items()}
    return F.scaled_dot_product_attention(query, key, value, **options).numpy() > 0


def by_multihead(**options):
    """What torch.nn.MultiheadAttention sees: the mean over heads, or each where masks differ."""
    layer = torch.nn.MultiheadAttention(H, H, batch_first=True)
    query, key = torch.zeros(B, L, H), torch.zeros(B, S, H)
    masks_given = {name: torch.as_tensor(x) for name, x in options.items()}
    weights = layer(query, key, key, **masks_given, average_attn_weights=False)[1]
    return weights.detach().numpy() > 0


def by_jax(**options):
    """What jax.nn sees, heads after length there."""
    query, key = np.zeros((B, L, H, S), "f4"), np.zeros((B, S, H, S), "f4")
    value = np.broadcast_to(np.eye(S, dtype="f4")[:, None, :], (B, S, H, S))
    output = jax.nn.dot_product_attention(*map(jnp.asarray, (query, key, value)), **options)
    return np.asarray(output).swapaxes(1, 2) > 1e-9


def by_onnx(**options):
    """What ONNX's reference evaluator sees."""
    arrays = [np.zeros((B, H, n, 1), np.float32) for n in (L, S)]
    arrays.append(np.broadcast_to(np.eye(S, dtype=np.float32), (B, H, S, S)))
    exec(SUBJECTS["onnx.reference"].setup, names := {})
    return names["attend"](*arrays, **options) > 0


def by_transformers(function, batch=B, keys=S):
    """What a mask function of transformers says, of rows that follow what is cached."""
    at = np.indices((batch, H, L, keys)).reshape(4, -1)
    b, h, i, j = map(torch.as_tensor, at)
    return function(b, h, i + keys - L, j).numpy().reshape(batch, H, L, keys)


def added_by_transformers():
    """The mask of an eager model."""
    padding = torch.as_tensor(LETTERS["ones"], dtype=torch.bool)
    config = type("Config", (), {"_attn_implementation": "eager"})
    made = theirs.eager_mask(
        batch_size=B,
        q_length=L,
        kv_length=S,
        mask_function=theirs.bidirectional_mask_function,
        attention_mask=padding,
        config=config,
    )
    assert made.min() == torch.finfo(torch.float32).min
    return np.broadcast_to((made == 0).numpy(), (B, H, L, S))


def the_same(seen, *others):
    """Return what several peers of a row see, which is the same."""
    for other in others:
        np.testing.assert_array_equal(seen, other)
    return seen


def by_splash(mask):
    """What a mask of JAX's splash attention says, for all items and heads."""
    return np.broadcast_to(mask[:, :], (B, H, L, S))


POSITIONS = torch.as_tensor(LETTERS["position_ids"])
PEERS = {
    "transformers: `sliding_window=W`, causal": lambda: by_transformers(
        theirs.sliding_window_causal_mask_function(W)
    ),
    "transformers: `sliding_window=W`, bidirectional": lambda: by_transformers(
        theirs.sliding_window_bidirectional_mask_function(W)
    ),
    "transformers: `attention_chunk_size=C`": lambda: by_transformers(
        theirs.chunked_causal_mask_function(C, torch.zeros(B, dtype=torch.int64))
    ),
    "transformers: `attention_mask=ones`": lambda: by_transformers(
        theirs.padding_mask_function(torch.as_tensor(LETTERS["ones"], dtype=torch.bool))
    ),
    "transformers, eager": added_by_transformers,
    "transformers: packed": lambda: by_transformers(
        theirs.and_masks(
            theirs.packed_sequence_mask_function(theirs.find_packed_sequence_indices(POSITIONS)),
            theirs.causal_mask_function,
        ),
        keys=L,
    ),
    "jax.nn: `local_window_size=(left, right)`; ONNX 25": lambda: the_same(
        by_jax(local_window_size=(3, 1)), by_onnx(window=(3, 1))
    ),
    "jax.nn: `local_window_size=W`": lambda: by_jax(local_window_size=W),
    "jax.nn: `key_value_seq_lengths": lambda: by_jax(
        key_value_seq_lengths=jnp.asarray(LETTERS["lengths"], jnp.int32),
        query_seq_lengths=jnp.asarray(LETTERS["rows"], jnp.int32),
    ),
    "jax.nn, Flax, Keras, MLX, ONNX": lambda: by_jax(mask=jnp.asarray(SEEN)[None, None]),
    "torch: `is_causal=True`": lambda: the_same(
        by_torch(is_causal=True),
        by_torch(attn_mask=causal_upper_left(L, S)._materialize()),
        by_jax(is_causal=True),
        by_onnx(is_causal=True),
    ),
    "torch: `causal_lower_right": lambda: the_same(
        by_torch(attn_mask=causal_lower_right(L, S)._materialize()),
        by_transformers(theirs.causal_mask_function),
    ),
    "torch SDPA: `attn_mask=seen`": lambda: by_torch(attn_mask=SEEN),
    "torch SDPA: `attn_mask=added`": lambda: by_torch(
        attn_mask=LETTERS["added"].astype(np.float32)
    ),
    "torch MultiheadAttention: `attn_mask=hidden` ": lambda: by_multihead(attn_mask=~SEEN),
    "torch MultiheadAttention: `attn_mask=hidden3`": lambda: by_multihead(
        attn_mask=LETTERS["hidden3"]
    ),
    "torch MultiheadAttention: `key_padding_mask": lambda: by_multihead(key_padding_mask=PADDED),
    "splash attention: `LocalMask": lambda: by_splash(splash.LocalMask((L, S), (3, 1), 2)),
    "splash attention: `Chunked": lambda: by_splash(splash.ChunkedCausalMask((L, S), C)),
    "splash attention: `CausalMask": lambda: by_splash(splash.CausalMask((L, S), 2)),
    "FlexAttention": lambda: flex.create_mask(
        lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, B, H, L, S, device="cpu"
    ).numpy(),
}
CHECKED = [row for row in ROWS if row[0].endswith("✓")]


def test_each_row_with_a_tick_has_its_peer_and_no_other():
    assert len(CHECKED) == len(PEERS)
    for name in PEERS:
        assert len([row for row in CHECKED if row[0].startswith(name)]) == 1, name


@pytest.mark.parametrize("name", PEERS)
def test_the_library_itself_sees_what_the_row_says(name):
    row = next(row for row in CHECKED if row[0].startswith(name))
    shape = (B, H, L, keys_of(row))
    np.testing.assert_array_equal(PEERS[name](), by_arithmetic(shape, row[2], LETTERS))
