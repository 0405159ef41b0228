"""Every kernel of every backend, on every library of the matrix, through the suite that we ship.

NumPy's turn comes where the package itself is collected: `polyattn/conformance/test_backend.py`.
"""

import numpy as np
import pytest
from exported import by
from onnx.reference import ReferenceEvaluator
from optional import (
    KIND,
    array_api_strict,
    dask,
    jax,
    onnxruntime,
    reading,
    torch,
)

from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
from polyattn.conformance.cases.expression_cases import VARIANTS
from polyattn.conformance.checks.cases import check_case, is_applicable, takes
from polyattn.conformance.checks.lazy import lazily
from polyattn.conformance.checks.target import Target
from polyattn.conformance.suite import BackendSuite


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of calls with small arrays: threads would only wait for one another."""
    if not torch:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# torch's own compiler imports what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
class TestTorch(BackendSuite):
    """What torch compiles is slow: `flex`."""

    backend = "torch"

    def _marks(self, name):
        return [*super()._marks(name), *([pytest.mark.slow] if "[flex" in name else [])]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
class TestTorchOnADevice(BackendSuite):
    """A call reads nothing from the device and leaves no array on the host."""

    backend = f"torch:{KIND}"
    thorough = False
    # No engine there has a logsumexp.
    test_every_declared_feature_is_exercised = test_pages_in_any_order = None
    test_sizes = test_deterministic = test_batch_invariant = None
    test_first_call_from_eight_threads = test_dtypes_are_kept = None

    def _runs(self, test, target):
        # torch knows for which devices it compiles.
        runs = super()._runs(test, target)
        return ((variant, case) for variant, case in runs if variant.kernel.name != "flex")

    def _marks(self, name):
        # The core's kernels make the same calls of torch for each derivative.
        slow = ("[tiled-", "test_gradients[tiled", "test_jvp[tiled", "test_jvp[dense")
        repeated = any(part in name for part in slow)
        return [*super()._marks(name), *([pytest.mark.slow] if repeated else [])]

    @pytest.fixture(autouse=True)
    def read_results(self, monkeypatch):
        back = Target.back

        def read(target, array):
            with reading():
                return back(target, array)

        monkeypatch.setattr(Target, "back", read)


class TestArrayApi(BackendSuite):
    """The core's kernels on NumPy's arrays, where all cases are tried."""

    backend = "array-api"
    library = "numpy"

    def _marks(self, name):
        # No code of the core's kernels depends on the size of vectors.
        slow = name.startswith("test_sizes[")
        return [*super()._marks(name), *([pytest.mark.slow] if slow else [])]


class TestStrict(BackendSuite):
    """At its strictest: no shape may depend on the values of an array."""

    backend = "array-api"
    library = "array_api_strict"
    thorough = False

    @pytest.fixture(autouse=True)
    def strictest(self):
        with array_api_strict.ArrayAPIStrictFlags(
            api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False
        ):
            yield


#: The cases of masks, scores and similarities as values, without those for other normalizers.
OF_EXPRESSIONS = [CASES[name] for name, x in VARIANTS.items() if "normalizer" not in x]


class TestJax(BackendSuite):
    """With and without jit: `test_lazy` is under it. Whatever JAX can be told to refuse, it is.

    A covering choice is not slow: the plugin's kernel compiles itself, and the core's do under jit,
    without which each of their operations is compiled for each shape.
    """

    backend = "jax"
    thorough = False
    cases = (
        "many",
        "dropout",
        "mask hides some rows",
        "score value",
        "cache, options together",
        "outliers, float16",
        "nan under causal",
    )
    quick = ("test_gradients[xla-plain", *(f"test_case[xla, small tiles-{x}]" for x in cases))

    def pytest_generate_tests(self, metafunc):
        with jax.enable_x64(True):
            super().pytest_generate_tests(metafunc)

    def _marks(self, name):
        tests = ("test_deterministic", "test_pages_in_any_order")
        repeated = name.startswith(tests) and not name.endswith("[xla, small tiles]")
        slow = repeated or ("-" in name and not name.startswith(self.quick))
        return [*super()._marks(name), *([pytest.mark.slow] if slow else [])]

    @pytest.mark.slow
    @pytest.mark.parametrize("case", OF_EXPRESSIONS, ids=str)
    def test_expressions_under_jit(self, lazy_target, case):
        """The plugin's kernel, in many tiles, takes each: what it lists and asks are traced."""
        (xla,) = (v for v in lazy_target.kernels if str(v) == "xla, small tiles")
        # A function of the caller's is refused but inside of jit.
        assert takes(lazy_target, xla, case) or "function" in case.name
        check_case(lazy_target, xla, case)

    @pytest.fixture(autouse=True)
    def in_double_precision_too(self):
        refused = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
        with jax.enable_x64(True), refused[0], refused[1]:
            yield


class Cut(Target):
    """Dask arrays in small chunks: two or three of each axis."""

    def to(self, array):
        whole = super().to(array)
        return whole.rechunk([-(-n // 3) if n > 3 else -(-n // 2) for n in whole.shape])


class TestDask(BackendSuite):
    """Every array in several chunks.

    Slow is what `test_case` of the plugin's kernel shows already, but for one case of each. The
    core's kernels on dask arrays make thousands of tasks.
    """

    backend = "dask"
    thorough = False
    quick = ("test_case[chunked", "test_lazy[chunked-many", "test_backward[chunked-many")

    def _marks(self, name):
        slow = "[" in name and not name.startswith((*self.quick, "test_deterministic[chunked"))
        return [*super()._marks(name), *([pytest.mark.slow] if slow else [])]

    @pytest.fixture
    def target(self):
        return Cut("dask")

    @pytest.fixture
    def lazy_target(self):
        return Cut("dask", transform=lazily)

    @pytest.fixture(autouse=True)
    def in_this_thread(self):
        with dask.config.set({"scheduler": "synchronous", "polyattn.group-size": 2000}):
            yield


def by_onnxruntime(model, inputs):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, inputs)


def by_reference(model, inputs):
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, inputs)


EXPORTED = [case for case in CASES.values() if case.dtype != "bfloat16"]  # which ndonnx lacks


class TestOnnx(BackendSuite):
    """Each call exported, checked, and run by ONNX Runtime: half a second, so all are slow."""

    backend = "onnx"
    thorough = False
    # A model has no threads of ours and no gradients.
    test_first_call_from_eight_threads = test_backward = test_jvp = None

    def _runs(self, test, target):
        # Tiles are for lengths that are known, and make models of thousands of nodes.
        return [run for run in super()._runs(test, target) if run[0].kernel.name != "tiled"]

    def _marks(self, name):
        return [*super()._marks(name), *([pytest.mark.slow] if "[" in name else [])]

    @pytest.fixture
    def target(self):
        return Target(self.backend, transform=by(by_onnxruntime))

    @pytest.mark.slow
    @pytest.mark.parametrize("case", EXPORTED, ids=str)
    def test_all_cases(self, target, case):
        """All of them as one node if that computes them, written out if not."""
        variants = {v.kernel.name: v for v in target.kernels if not v.small_tiles}
        native = variants["native"]
        fits = is_applicable(target, native, case) and takes(target, native, case)
        check_case(target, native if fits else variants["dense"], case)


class TestOnnxReference(TestOnnx):
    """The same, run by onnx's own evaluator, which knows windows in the operator."""

    backend = "onnx:25"

    def _runs(self, test, target):
        return [run for run in super()._runs(test, target) if run[0].kernel.name != "group_query"]

    def _declares(self, test, target, variant):
        return variant.kernel.name != "group_query" and super()._declares(test, target, variant)

    @pytest.fixture
    def target(self):
        return Target(self.backend, transform=by(by_reference))


class TestOnnxruntime(BackendSuite):
    """Arrays of NumPy, computed by ONNX Runtime; behind its kernel stand the core's."""

    backend = "onnxruntime"
    quick = ("test_case[node", "test_every_declared_feature_is_exercised[node")

    def _marks(self, name):
        case = name.partition("[node-")[2].removesuffix("]")
        quick = name.startswith(self.quick) and (not case or case in ESSENTIAL)
        return [*super()._marks(name), *([] if quick or "[" not in name else [pytest.mark.slow])]


def test_every_plugin_of_ours_is_in_the_matrix():
    from importlib.metadata import entry_points

    ours = {e.name for e in entry_points(group="polyattn.backends") if e.dist.name == "polyattn"}
    # NumPy's is the default of the suite that needs no code; CuPy's, in tests/gpu, needs a GPU;
    # MLX, in tests/backends, is not made for every system.
    assert ours - {"numpy", "cupy", "mlx"} <= {s.backend for s in BackendSuite.__subclasses__()}
