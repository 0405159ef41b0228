"""Names of other libraries, and the types of the results."""

import inspect

import numpy as np
import pytest

import polyattn
from polyattn import attention
from polyattn._api.names import FOREIGN

X = np.ones((2, 4, 6, 8), np.float32)
SISTERS = ["attention", "attention_partial", "attention_weights", "attention_backward"]
SISTERS += ["attention_vjp", "attention_jvp", "explain"]


@pytest.mark.parametrize("name", SISTERS)
def test_each_function_knows_the_names_of_others(name):
    function = getattr(polyattn, name)
    own = inspect.signature(function).parameters  # attention_weights selects heads=
    for foreign in FOREIGN.keys() - own:
        with pytest.raises(TypeError, match=rf"^{name}\(\) has no argument '{foreign}'; ") as error:
            function(X, X, X, **{foreign: 1})
        assert FOREIGN[foreign] in str(error.value)
    with pytest.raises(TypeError, match="'q'; pass query="):
        function(q=X, k=X, v=X)
    near = {
        "is_casual": "did you mean 'is_causal'?",
        "attn_maks": "did you mean 'attn_mask'? Pass mask= for bools",
        "dropuot_p": "did you mean 'dropout_p'? Pass dropout=(rate, seed)",
    }
    for wrong, meant in near.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'") as error:
            function(X, X, X, **{wrong: True})
        assert meant in str(error.value)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyz'$"):
        function(X, X, X, xyz=True)
    attention(X, X, X)
    with pytest.raises(TypeError, match=r"attention\(\) got multiple values for argument 'query'"):
        attention(X, X, X, query=X)
