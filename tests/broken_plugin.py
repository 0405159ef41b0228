"""A plugin that is wrong on purpose: a kernel for each way to break a promise."""

from typing import ClassVar

import numpy as np

from polyattn.plugin import CONTRACT_VERSION, Backend, BackendSpec
from polyattn.plugin.dense import Dense


def only(derivative):
    """What a kernel differentiates that has one of the derivatives of the formula."""
    return {derivative: Dense.differentiates[derivative]}


class Sabotaged(Dense):
    """The formula, of which one promise is not kept."""

    differentiates: ClassVar = {}

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

    return Sabotaged(f"drops_{feature}", sabotage, features=Sabotaged.features | {feature})


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


def pages_in_order(p, x):
    """Keys and values of the pages in the order of the pool."""

    def joined(pool):
        pages = pool.reshape(*x.block_table.shape, *pool.shape[1:])
        heads_first = np.moveaxis(pages, -4, -3)
        return heads_first.reshape(*heads_first.shape[:-3], -1, pool.shape[-1])

    return {"key": joined(x.key), "value": joined(x.value), "block_table": None}


class DropsBackward(Dense):
    """Finds no gradient by the keys."""

    name = "drops_backward"
    differentiates: ClassVar = only("backward")

    def backward(self, *given):
        found = super().backward(*given)
        return found._replace(key=np.zeros_like(found.key))


class DropsJvp(Dense):
    """Takes the output for its tangent."""

    name = "drops_jvp"
    differentiates: ClassVar = only("jvp")

    def jvp(self, problem, operands, residuals, tangents, backend):
        return residuals


DROPPING = [
    DropsBackward(),
    DropsJvp(),
    dropping("batch_broadcast", operands=first_items),
    dropping("bias", lambda p: {"bias": None}, lambda p, x: {"bias": None}),
    dropping("block_table", operands=pages_in_order),
    dropping("causal", lambda p: {"is_causal": False}),
    dropping("dropout", lambda p: {"dropout": 0.0}),
    dropping("grouped_heads", lambda p: {"key_heads": p.heads}, heads_tiled),
    dropping("logsumexp", result=lambda p, o: (o, np.zeros(o.shape[:-1], p.accumulator))),
    dropping("mask", lambda p: {"mask": None}, lambda p, x: {"mask": None}),
    dropping("mask_mod", operands=lambda p, x: {"mask": None}),
    dropping("mask_expression", lambda p: {"mask_spec": None}, lambda p, x: {"mask": None}),
    dropping("normalizer", lambda p: {"normalizer": None}),
    dropping("query_offset", lambda p: {"query_offset": p.key_length - p.query_length}),
    dropping(
        "query_offset_array",
        lambda p: {"query_offset": p.key_length - p.query_length},
        lambda p, x: {"query_offset": None},
    ),
    dropping("scale", lambda p: {"scale": p.head_size**-0.5}),
    dropping("score_mod", operands=lambda p, x: {"score_mod": None}),
    dropping("score_norm", lambda p: {"score_norm": None}),
    dropping("score_expression", lambda p: {"score_spec": None}, lambda p, x: {"score_mod": None}),
    dropping("similarity", lambda p: {"similarity_spec": None}, lambda p, x: {"similarity": None}),
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


def wide_pages(dense, p, x, backend):
    """The logsumexp counts the slots of a page that no key is in."""
    output, logsumexp = dense(p, x, backend)
    return output, None if logsumexp is None else logsumexp + 1e-3 * (p.key_length == 4)


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


def aliasing(dense, p, x, backend):
    """Where the output would equal the values, it is them."""
    output, logsumexp = dense(p, x, backend)
    same = logsumexp is None and np.array_equal(output, x.value)
    return (x.value if same else output), logsumexp


def read_only(dense, p, x, backend):
    output, logsumexp = dense(p, x, backend)
    output.flags.writeable = False
    return output, logsumexp


WORKSPACE = {}


def reusing(dense, p, x, backend):
    """Every call of one shape writes to the same array."""
    output, logsumexp = dense(p, x, backend)
    kept = WORKSPACE.setdefault((output.shape, output.dtype), output)
    kept[...] = output
    return kept, logsumexp


def offset_of_the_first_item(dense, p, x, backend):
    if p.query_offset is None and len(p.batch):
        first = x.query_offset[(slice(0, 1),) * (x.query_offset.ndim - 3)]
        x = x._replace(query_offset=np.broadcast_to(first, x.query_offset.shape))
    return dense(p, x, backend)


def deaf_to_score_mod(dense, p, x, backend):
    """A score of -inf is taken for a low one, and reads its value."""
    if x.score_mod is None:
        return dense(p, x, backend)
    mod = x.score_mod
    mod_of_finite = lambda s, *at: np.maximum(mod(s, *at), np.asarray(-1e4, s.dtype))  # noqa: E731
    return dense(p, x._replace(score_mod=mod_of_finite), backend)


def blind_to_infinity(dense, p, x, backend):
    """An infinity that is seen counts for nothing."""
    return dense(p, x._replace(value=np.where(np.isinf(x.value), 0, x.value)), backend)


def blind_to_nan_keys(dense, p, x, backend):
    return dense(p, x._replace(key=np.where(np.isnan(x.key), 0, x.key)), backend)


def coarse(dense, p, x, backend):
    """16 bits all the way, where sums are to have 32."""
    output, logsumexp = dense(p, x, backend)
    if output.dtype != np.float16 or p.key_length == 0 or p.features - {"logsumexp"}:
        return output, logsumexp
    scores = (x.query @ x.key.mT) * np.float16(p.scale)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    total = np.zeros_like(weights[..., :1])
    for j in range(weights.shape[-1]):
        total += weights[..., j : j + 1]
    return (weights / total) @ x.value, logsumexp


OTHERS = [
    Sabotaged("batchy", batchy, promises=Dense.promises | {"batch_invariant"}),
    Sabotaged(
        "uncut",
        lambda dense, *given: dense(*given),
        promises=Dense.promises | {"cut_invariant"},
    ),
    *[
        Sabotaged(sabotage.__name__, sabotage)
        for sabotage in (
            *(noisy, wide_pages, leaky, scribbling, widening, foreign, raising, aliasing),
            *(read_only, reusing, offset_of_the_first_item),
            *(deaf_to_score_mod, blind_to_infinity, blind_to_nan_keys, coarse),
        )
    ],
]


class Idle(Dense):
    """Has a reason against each call, or each with a feature that it declares."""

    def __init__(self, name, feature=None, **declared):
        self.name, self.feature = name, feature
        self.__dict__.update(declared)

    def reasons_against(self, problem):
        return ["it never does"] if self.feature in (None, *problem.features) else []


IDLE = [
    Idle("refusing", features=frozenset()),
    Idle("no_logsumexp", "logsumexp", differentiates={}),
    Idle("no_backward", "backward", differentiates=only("backward")),
]


class BrokenBackend(Backend):
    """NumPy arrays, and nothing that can be relied on."""

    kernels = (*DROPPING, *OTHERS, *IDLE)

    def __init__(self):
        super().__init__(np)


SPEC = BackendSpec(
    name="broken",
    namespaces=("numpy",),
    implementation="broken_plugin:BrokenBackend",
    requires=("decimal",),
    install="pip install broken",
    contract_version=CONTRACT_VERSION,
    dtypes=("float16", "float32", "float64"),
)
