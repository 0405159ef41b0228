"""A plugin that is wrong on purpose: a kernel for each way to break a promise."""

import numpy as np

from polyattn.kernels import Dense
from polyattn.plugin import FEATURES, Backend, BackendSpec


class Sabotaged(Dense):
    """The formula, of which one promise is not kept."""

    def __init__(self, name, sabotage, **declared):
        self.name, self.sabotage = name, sabotage
        self.__dict__.update(declared)

    def __call__(self, problem, operands, backend):
        return self.sabotage(super().__call__, problem, operands, backend)


def dropping(feature, problem=None, operands=None, result=None):
    """A kernel that declares a feature and drops it, in the problem, the operands or the result."""

    def sabotage(dense, p, x, backend):
        if feature not in p.features:
            return dense(p, x, backend)
        if problem is not None:
            p = p._replace(**problem(p))
        if operands is not None:
            x = x._replace(**operands(p, x))
        output, logsumexp = dense(p._replace(features=p.features - {feature}), x, backend)
        return (output, logsumexp) if result is None else result(p, output)

    # dropout has no oracle yet, so that whoever declares it fails.
    features = frozenset(FEATURES) - ({"dropout"} - {feature})
    return Sabotaged(f"drops_{feature}", sabotage, features=features)


def first_items(p, x):
    """Every batch item given the first one's keys."""
    first = (slice(0, 1),) * len(p.batch)
    return {"key": x.key[first[: x.key.ndim - 3]], "value": x.value[first[: x.value.ndim - 3]]}


def heads_tiled(p, x):
    """Query head h reads head h % G."""
    times = p.heads // x.key.shape[-3]
    return {
        "key": np.concatenate([x.key] * times, -3),
        "value": np.concatenate([x.value] * times, -3),
    }


DROPPING = [
    dropping("batch_broadcast", operands=first_items),
    dropping("bias", lambda p: {"bias": None}, lambda p, x: {"bias": None}),
    dropping("causal", lambda p: {"is_causal": False}),
    dropping("dropout"),
    dropping("grouped_heads", lambda p: {"key_heads": p.heads}, heads_tiled),
    dropping("logsumexp", result=lambda p, o: (o, np.zeros(o.shape[:-1], p.accumulator))),
    dropping("mask", lambda p: {"mask": None}, lambda p, x: {"mask": None}),
    dropping("mask_mod", operands=lambda p, x: {"mask": None}),
    dropping("query_offset", lambda p: {"query_offset": p.key_length - p.query_length}),
    dropping(
        "query_offset_array",
        lambda p: {"query_offset": p.key_length - p.query_length},
        lambda p, x: {"query_offset": None},
    ),
    dropping("scale", lambda p: {"scale": p.head_size**-0.5}),
    dropping("score_mod", operands=lambda p, x: {"score_mod": None}),
    dropping("sinks", operands=lambda p, x: {"sinks": None}),
    dropping("softcap", lambda p: {"softcap": None}),
    dropping("value_size", result=lambda p, o: (np.resize(o, (*o.shape[:-1], p.head_size)), None)),
    dropping("window", lambda p: {"window": (None, None)}),
]


def noisy(dense, p, x, backend):
    output, logsumexp = dense(p, x, backend)
    noise = np.random.default_rng().choice([-1, 1], output.shape)
    return np.nextafter(output, (noise * np.inf).astype(output.dtype)), logsumexp


def batchy(dense, p, x, backend):
    """The last bit depends on how many items there are."""
    output, logsumexp = dense(p, x, backend)
    up = np.nextafter(output, np.asarray(np.inf, output.dtype))
    return (up if p.batch[:1] == (1,) else output), logsumexp


def leaky(dense, p, x, backend):
    """A weight of 0 times NaN."""
    output, logsumexp = dense(p, x, backend)
    return output + 0 * np.sum(x.value, axis=(-1, -2))[..., :1, None, None], logsumexp


def scribbling(dense, p, x, backend):
    result = dense(p, x, backend)
    if x.query.flags.writeable:
        x.query[...] = 0
    return result


def widening(dense, p, x, backend):
    output, logsumexp = dense(p, x, backend)
    return output.astype(np.float64), logsumexp


def foreign(dense, p, x, backend):
    import array_api_strict

    output, logsumexp = dense(p, x, backend)
    return array_api_strict.asarray(output), logsumexp


def raising(dense, p, x, backend):
    raise RuntimeError("the engine has no more memory")


OTHERS = [
    Sabotaged("noisy", noisy),
    Sabotaged("batchy", batchy, batch_invariant=True),
    Sabotaged("leaky", leaky),
    Sabotaged("scribbling", scribbling),
    Sabotaged("widening", widening),
    Sabotaged("foreign", foreign),
    Sabotaged("raising", raising),
]


class BrokenBackend(Backend):
    """NumPy arrays, and nothing that can be relied on."""

    kernels = (*DROPPING, *OTHERS)

    def __init__(self):
        super().__init__(np)


SPEC = BackendSpec(
    name="broken",
    namespaces=("numpy",),
    implementation="broken_plugin:BrokenBackend",
    requires=("decimal",),
    install="pip install broken",
    dtypes=("float32", "float64"),
)
