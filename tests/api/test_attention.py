"""Wrong calls: each error comes before any work, quotes the arguments and says how to fix them."""

import inspect

import numpy as np
import pytest
from optional import array_api_strict, causal_lower_right, causal_upper_left, flex, jax, jnp, torch

import polyattn
from polyattn import attention, attention_partial, masks
from polyattn._api.names import FOREIGN
from polyattn._dispatch import registry

Q = np.zeros((2, 4, 5, 8), np.float32)
K = np.zeros((2, 2, 7, 8), np.float32)
V = np.zeros((2, 2, 7, 3), np.float32)


def refused(error, *pieces, q=Q, k=K, v=V, **options):
    """Check that a call raises an error whose message contains all the pieces."""
    with pytest.raises(error) as caught:
        attention(q, k, v, **options)
    for piece in pieces:
        assert piece in str(caught.value)
    with pytest.raises(error):
        attention_partial(q, k, v, **options)


def tensors(**changed):
    return {name: torch.from_numpy(x) for name, x in (("q", Q), ("k", K), ("v", V))} | changed


FAR = array_api_strict.zeros((3, 2), device=array_api_strict.Device("device1"))
#: What is wrong: the error, the arguments, and what the message says.
WRONG = {
    **{
        f"{dtype} of {name}": (TypeError, {name: array.astype(dtype)}, f"dtype {dtype}", "float32")
        for dtype, name, array in (("int64", "q", Q), ("bool", "k", K), ("complex64", "v", V))
    },
    "dtypes that differ": (
        TypeError, {"k": K.astype("f8")}, "query float32, key float64, value float32", "cast them",
    ),
    "a mask of integers": (TypeError, {"mask": np.ones((5, 7), np.int64)}, "int64", "mask != 0"),
    "a mask of floats": (
        TypeError, {"mask": np.ones((5, 7), np.float32)}, "float32", "mask.astype(bool)", "bias=",
    ),
    "a bias of bools": (TypeError, {"bias": np.ones((5, 7), bool)}, "bias", "bool", "mask="),
    "offsets of floats": (
        TypeError, {"query_offset": np.zeros(2, np.float32)}, "query_offset", "(2,) float32",
    ),
    "an offset of a float": (TypeError, {"query_offset": 1.5}, "query_offset", "1.5"),
    "two devices": (
        ValueError, {"q": FAR.to_device(array_api_strict.Device("CPU_DEVICE")), "k": FAR, "v": FAR},
        "query is on", "key on", "device1",
    ),
    "rank below two": (ValueError, {"q": np.zeros(5, np.float32)}, "query (5,)", "(..., H, L, D)"),
    "sizes that differ": (ValueError, {"k": K[..., :6]}, "8 and 6", "key (2, 2, 7, 6)"),
    "lengths that differ": (ValueError, {"v": V[:, :, :6]}, "7 and 6", "value (2, 2, 6, 3)"),
    "key heads that differ": (ValueError, {"v": V[:, :1]}, "2 and 1", "value (2, 1, 7, 3)"),
    "heads that are no multiple": (ValueError, {"q": Q[:, :3]}, "3 and 2", 'layout="...LHD"'),
    "batch axes that do not broadcast": (
        ValueError, {"k": np.zeros((3, 2, 7, 8), np.float32)}, "(2,), (3,), (2,)", "broadcast",
    ),
    "shapes in the caller's layout": (
        ValueError,
        {
            "q": Q.swapaxes(1, 2), "k": K.swapaxes(1, 2)[..., :6], "v": V.swapaxes(1, 2),
            "layout": "...LHD",
        },
        "query (2, 5, 4, 8)", "(..., L, H, D)",
    ),
    **{
        f"a bias of shape {shape}": (ValueError, {"bias": np.ones(shape)}, f"bias {shape}", *hints)
        for shape, *hints in (
            ((4, 5, 7), "could be batch or heads", "bias[:, None]", "bias[None]"),
            ((2, 5, 7), "could be batch or heads", "bias[:, None]", "bias[None]"),
            ((2, 7), "bias[:, None, None, :]"),
        )
    },
    "a number for sinks": (TypeError, {"sinks": 0.0}, "sinks must be an array along H", "got 0.0"),
    "a mask of rank 4 for rank 5": (
        ValueError,
        {"q": Q[None], "k": K[None], "v": V[None], "mask": np.ones((2, 4, 5, 7), bool)},
        "mask[:, None]",
    ),
    "a mask that would widen the batch": (
        ValueError, {"q": Q[:1], "k": K[:1], "v": V[:1], "mask": np.ones((6, 1, 1, 7), bool)},
        "mask (6, 1, 1, 7)",
    ),
    "sinks of other heads": (ValueError, {"sinks": np.zeros(2, np.float32)}, "(4,)", "got (2,)"),
    "offsets of other items": (
        ValueError, {"query_offset": np.zeros(3, int)}, "query_offset", "(2,)", "got (3,)",
    ),
    # options
    **{
        f"{name} of {value}": (ValueError, {name: value}, *pieces, repr(value))
        for name, values, *pieces in (
            ("scale", (float("nan"), 10**400), "scale must be finite"),
            ("scale", (1e39, 1e-46), "scale must be within the range"),
            ("softcap", (1e39, 1e-46), "softcap must be within the range"),
            ("softcap", (0, -1.0), "softcap must be above 0"),
            ("dropout", ((1.0, 0), (-0.1, 0)), "[0, 1)"),
            ("window", ((-1, 0),), "at least 0"),
            ("layout", ("bshd",), "...HLD"),
        )
        for value in values
    },
    **{
        f"{name} of {value!r}": (TypeError, {name: value}, *pieces)
        for name, values, *pieces in (
            ("scale", ("1", np.ones(3), True), "scale must be a number"),
            ("window", (256, (1,), (1, 2, 3), (1.5, 0), "ab"), "(left, right)", "(255, 0)"),
            ("is_causal", (1, "yes", None), "is_causal must be True or False"),
            ("dropout", (0.1,), "(rate, seed)", "0.1"),
            ("dropout", ((0.1, None),), "seed must be one integer"),
            ("score_mod", (1,), "score_mod must be a function", "got 1"),
            ("kernel", (3, ["dense", 3]), "named by a string"),
            ("backend", (3,), "named by a string"),
        )
        for value in values
    },
    # functions
    "parameters of a mask": (
        TypeError, {"mask": lambda i, j: i > j}, "the mask function must take (b, h, i, j)",
        "(i, j)",
    ),
    **{
        f"scores that are {name}": (error, {"score_mod": lambda *_, x=returned: x}, message)
        for name, returned, error, message in (
            ("a number", 1.0, TypeError, "score_mod must return an array; got 1.0"),
            ("too few", np.zeros((5, 6)), ValueError, "must broadcast to (2, 4, 5, 7)"),
            ("complex", np.zeros((5, 7), complex), TypeError, "complex128"),
        )
    },
    # backends
    "a misspelt backend": (
        polyattn.UnknownBackendError, {"backend": "nunpy"}, "'nunpy'", "did you mean 'numpy'?",
    ),
    "a missing name": (
        ValueError, {"backend": "numpy,,torch"}, "missing in backend='numpy,,torch'",
    ),
    "a device of auto": (ValueError, {"backend": "auto:cuda"}, "auto:cuda", "takes no device"),
    "an unknown kernel": (
        polyattn.UnsupportedError, {"kernel": "flash"}, "no kernel of that name", "tiled, dense",
    ),
    "a device that is not here": (
        NotImplementedError, {"backend": "torch:cuda:7"}, "no device 'cuda:7'", "cpu",
    ),
    "a kernel that does not declare dropout": (
        polyattn.UnsupportedError, {"dropout": (0.1, 0), "kernel": "sdpa", "backend": "torch"},
        "cannot take this call", "not compute dropout",
    ),
}  # fmt: skip


if torch:
    WRONG |= {
        "a mask of floats of torch": (TypeError, tensors(mask=torch.ones(5, 7)), "is mask.bool()"),
        "two libraries": (
            TypeError, {"k": torch.zeros(K.shape)}, "array of numpy", "key one of torch",
            "torch.asarray(query",
        ),
        "a score function that returns a tensor": (
            TypeError, {"score_mod": lambda *_: torch.zeros(5, 7)},
            "arrays of numpy and must return one",
        ),
        "a causal bias of torch": (
            TypeError, tensors(bias=causal_upper_left(5, 7)), "is torch's CausalBias",
        ),
        "a causal bias of torch in a mask": (
            TypeError, tensors(mask=masks.causal() | causal_lower_right(5, 7)),
            "is torch's CausalBias", "is_causal=True",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    error, options, *pieces = WRONG[name]
    refused(error, *pieces, **options)


def test_a_block_mask_of_torch_is_refused():
    blocks = flex.create_block_mask(lambda b, h, i, j: j <= i, None, None, 5, 7, device="cpu")
    for name in ("mask", "bias"):
        refused(TypeError, f"{name} is torch's BlockMask", ".mask_mod, in mask=", **{name: blocks})


def test_a_mask_by_position_is_told_its_name():
    with pytest.raises(TypeError, match="takes 3 arguments by position, got 4: pass mask="):
        attention(Q, K, V, np.ones((5, 7), bool))
    with pytest.raises(TypeError, match=r"attention\(\) got multiple values for argument 'query'"):
        attention(Q, K, V, query=Q)


def test_what_fits_barely_is_taken():
    attention(Q, K, V, mask=np.ones((1, 5, 7), bool))
    assert attention(Q[:, :0], K[:, :0], V[:, :0]).shape == (2, 0, 5, 3)
    attention(Q, K, V, mask=lambda *indices: True, score_mod=lambda s, *indices: s)
    assert not attention(Q, K, V, mask=lambda *indices: False).any()
    for name in ("scale", "softcap"):
        for value in (1e39, 1e-46):
            attention(*(x.astype("f8") for x in (Q, K, V)), **{name: value})


def test_an_array_as_softcap_is_told_what_to_pass():

    refused(TypeError, "Pass float(softcap)", softcap=torch.tensor(5.0))
    refused(TypeError, "pass score_mod=", "tanh(s / softcap[h])", softcap=np.ones(4))


def test_a_traced_option_is_refused_with_the_function_to_pass():
    x = jnp.ones((4, 5, 8))
    window = r"mask=lambda b, h, i, j: \(i \+ offset - left <= j\)"
    for given, function in (
        (lambda n: {"softcap": n}, "score_mod=lambda s, b, h, i, j"),
        (lambda n: {"window": (n, 0)}, window),
        (lambda n: {"window": (None, n)}, window),
    ):
        with pytest.raises(TypeError, match=f"static argument, or pass {function}"):
            jax.jit(lambda n, given=given: attention(x, x, x, **given(n)))(2)


@pytest.mark.needs("torch")
def test_refusals_come_before_any_conversion(monkeypatch):
    assert registry.load("torch") is None
    backend = type(registry.loaded("torch"))
    monkeypatch.setattr(backend, "place", lambda *_: pytest.fail("converted before the checks"))
    refused(ValueError, "8 and 6", k=K[..., :6], backend="torch")
    refused(TypeError, "int64", mask=np.ones((5, 7), int), backend="torch")


def test_an_option_is_checked_after_an_equal_valid_one():
    attention(Q, K, V, window=(1, 0))
    refused(TypeError, "(1.0, 0)", window=(1.0, 0))


# ---- names of other libraries ----

SISTERS = ["attention", "attention_partial", "attention_weights", "attention_backward"]
SISTERS += ["attention_vjp", "attention_jvp", "explain"]
#: Names that are not ours, and what is said of them.
NEAR = {
    "is_casual": "did you mean 'is_causal'?",
    "attn_maks": "did you mean 'attn_mask'? Pass mask= for bools",
    "dropuot_p": "did you mean 'dropout_p'? Pass dropout=(rate, seed)",
}


@pytest.mark.parametrize("name", SISTERS)
def test_each_function_knows_the_names_of_others(name):
    function = getattr(polyattn, name)
    own = inspect.signature(function).parameters  # attention_weights selects heads=
    for foreign in FOREIGN.keys() - own:
        with pytest.raises(TypeError, match=rf"^{name}\(\) has no argument '{foreign}'; ") as error:
            function(Q, Q, Q, **{foreign: 1})
        assert FOREIGN[foreign] in str(error.value)
    with pytest.raises(TypeError, match="'q'; pass query="):
        function(q=Q, k=Q, v=Q)
    for wrong, meant in NEAR.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'") as error:
            function(Q, Q, Q, **{wrong: True})
        assert meant in str(error.value)
