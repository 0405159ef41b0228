"""Every kernel of every backend, on every library of the matrix, through the suite that we ship.

NumPy's turn comes where the package itself is collected: `polyattn/conformance/test_backend.py`.
"""

import re

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


#: A pattern of the tests of kernels.
EACH = r".*\["


class Suite(BackendSuite):
    """The suite, some tests of which are slow.

    `slow` and `quick` are patterns of their names, as pytest prints them; `quick` comes first.
    """

    slow, quick = "(?!)", "(?!)"

    def pytest_generate_tests(self, metafunc):
        """Choose no cases if each is slow and slow tests are left out: that takes seconds."""
        is_slow = self.slow == EACH and self.quick == Suite.quick
        left_out = metafunc.config.option.markexpr == "not slow"
        if is_slow and left_out and {"variant", "case"} <= set(metafunc.fixturenames):
            metafunc.parametrize("variant,case", [pytest.param(None, None, marks=pytest.mark.slow)])
        else:
            super().pytest_generate_tests(metafunc)

    def _marks(self, name):
        is_slow = re.match(self.slow, name) and not re.match(self.quick, name)
        return [*super()._marks(name), *([pytest.mark.slow] if is_slow else [])]


# torch's own compiler imports what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
class TestTorch(Suite):
    """The kernel that torch compiles is slow: `flex`."""

    backend, slow = "torch", r".*\[flex|test_sizes|test_every.*gathered"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
class TestTorchOnADevice(Suite):
    """A call reads nothing from the device and leaves no array on the host."""

    backend = f"torch:{KIND}"
    thorough = False
    # The core's kernels make the same calls of torch for each derivative, and for each tile.
    slow = r".*\[tiled-|test_(gradients|backward|jvp)\[(tiled|gathered)|test_jvp\[dense|test_poison"
    # No engine there has a logsumexp.
    test_every_declared_feature_is_exercised = test_pages_in_any_order = None
    test_sizes = test_deterministic = test_batch_invariant = test_import_hygiene = None
    test_first_call_from_eight_threads = test_dtypes_are_kept = None

    def _runs(self, test, target):
        # torch knows for which devices it compiles.
        runs = super()._runs(test, target)
        return ((variant, case) for variant, case in runs if variant.kernel.name != "flex")

    @pytest.fixture(autouse=True)
    def read_results(self, monkeypatch):
        back = Target.back

        def read(target, array):
            with reading():
                return back(target, array)

        monkeypatch.setattr(Target, "back", read)


class TestArrayApi(Suite):
    """The core's kernels on NumPy's arrays, where all cases are tried."""

    backend, library = "array-api", "numpy"
    # No code of the core's kernels depends on the size of vectors. Long cases are for large tiles.
    slow = (
        r"test_sizes|test_jvp\[(gathered|tiled), small|test_every.*gathered"
        r"|test_case\[(dense|tiled, small tiles)-(4096 x 4096|17 x 20000|5000 x 1100)"
    )


class TestStrict(Suite):
    """At its strictest: no shape may depend on the values of an array."""

    backend, library = "array-api", "array_api_strict"
    thorough = False
    slow = r"test_(backward|jvp)\[(gathered|.*small tiles)|test_every"

    @pytest.fixture(autouse=True)
    def strictest(self):
        with array_api_strict.ArrayAPIStrictFlags(
            api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False
        ):
            yield


class TestJax(Suite):
    """With and without jit: `test_lazy` is under it. JAX raises wherever it can be told to.

    All cases are slow but some of the plugin's kernel: without jit, each operation of the core's is
    compiled for each shape.
    """

    backend = "jax"
    thorough = False
    slow = EACH
    quick = (
        r"test_gradients\[xla-plain|test_poison\[dense|test_batch_invariant|test_every.*\[xla"
        r"|test_case\[xla, small tiles-(many|score value)\]"
    )

    def pytest_generate_tests(self, metafunc):
        with jax.enable_x64(True):
            super().pytest_generate_tests(metafunc)

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


class TestDask(Suite):
    """Every array in several chunks.

    Slow is what some cases of the plugin's kernel show already. The core's kernels on dask arrays
    make thousands of tasks.
    """

    backend = "dask"
    thorough = False
    xfails = {  # noqa: RUF012
        f"test_{test}[gathered{tiles}]": "gathered refuses dask, whose chunks are parts"
        for test in ("every_declared_feature_is_exercised", "deterministic")
        for tiles in ("", ", small tiles")
    }
    slow = EACH
    quick = r"test_case\[chunked-(many|dropout|score value)\]|test_backward\[chunked-many"

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


class TestOnnx(Suite):
    """Each call exported, checked, and run by ONNX Runtime: half a second, so all are slow."""

    backend, slow = "onnx", EACH
    thorough = False
    # A model has no threads of ours and no gradients.
    test_first_call_from_eight_threads = test_backward = test_jvp = None

    def _runs(self, test, target):
        # Tiles are for lengths that are known, and make models of thousands of nodes.
        return [run for run in super()._runs(test, target) if run[0].kernel.name != "tiled"]

    @pytest.fixture
    def target(self):
        return Target(self.backend, transform=by(by_onnxruntime))


class TestOnnxReference(TestOnnx):
    """The same, run by onnx's own evaluator, which knows windows in the operator."""

    backend = "onnx:25"

    @pytest.fixture
    def target(self):
        return Target(self.backend, transform=by(by_reference))


class TestOnnxruntime(Suite):
    """Arrays of NumPy, computed by ONNX Runtime; behind its kernel stand the core's."""

    backend, slow = "onnxruntime", EACH
    quick = r"test_case\[node|test_every_declared_feature_is_exercised\[node"


def test_every_plugin_of_ours_is_in_the_matrix():
    from importlib.metadata import entry_points

    ours = {e.name for e in entry_points(group="polyattn.backends") if e.dist.name == "polyattn"}
    # NumPy's is the default of the suite that needs no code; CuPy's, in tests/gpu, needs a GPU;
    # MLX, in tests/backends, is not made for every system.
    assert ours - {"numpy", "cupy", "mlx"} <= {s.backend for s in Suite.__subclasses__()}
