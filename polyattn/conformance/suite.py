"""The suite for pytest: subclass it, name a backend, and every promise of its kernels is a test.

In a plugin's own tests::

    from polyattn.conformance.suite import BackendSuite

    class TestAcme(BackendSuite):
        backend = "acme"

and without any code, where ``-p`` brings the option::

    pytest -p polyattn.conformance.options --pyargs polyattn.conformance --polyattn-backend acme
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

import pytest

from polyattn._dispatch.registry import ARRAY_API
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.checks import promises
from polyattn.conformance.checks.gradients import ALL_DERIVATIVES
from polyattn.conformance.checks.lazy import is_lazy, lazily
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.conformance.selection import chosen, why_few

__all__ = ["BackendSuite"]
__dir__ = __all__.copy


class BackendSuite:
    """The promises of a backend, as tests: subclass it in a test module, by a name with ``Test``.

    A backend that cannot be loaded is an error at collection.

    Attributes
    ----------
    backend : str
        The argument ``backend=``: ``name`` or ``name:device``.
    library : str or None
        The module that makes the arrays, such as ``"jax.numpy"``; None for the backend's own.
    thorough : bool
        Whether to try all cases. False is for libraries where every call is dear: one case of each
        feature and corner, for some tests fewer.
    xfails : mapping of str to str
        Tests that are known to fail, by their names as pytest prints them, such as
        ``"test_case[fused-window]"``, and the reason of each. One that passes fails the suite
        until its line is removed.
    """

    backend: ClassVar[str]
    library: ClassVar[str | None] = None
    thorough: ClassVar[bool] = True
    xfails: ClassVar[Mapping[str, str]] = {}

    @pytest.fixture
    def target(self) -> Target:
        """The backend on arrays of the library."""
        return _subject(self.backend, self.library)

    @pytest.fixture
    def lazy_target(self) -> Target:
        """The same, where nothing may be computed during a call if the library can be lazy."""
        return _subject(self.backend, self.library, lazy=True)

    # ---- the tests: these, and one of each promise and each derivative ----

    def test_case(self, target: Target, variant: KernelVariant, case: Case) -> None:
        """The kernel agrees with the oracle, or refuses the call when it is insisted on."""
        checks.check_case(target, variant, case)

    def test_lazy(self, lazy_target: Target, variant: KernelVariant, case: Case) -> None:
        """The same, while nothing is computed as the call is traced or its graph is built."""
        checks.check_case(lazy_target, variant, case)

    def test_sizes(self, target: Target, variant: KernelVariant, dtype: str) -> None:
        """Results and gradients are right for every size of vectors and many lengths."""
        promises.check_sizes(target, variant, dtype)

    def test_deterministic(self, target: Target, variant: KernelVariant) -> None:
        """The same call twice gives the same bits."""
        promises.check_determinism(target, variant, thorough=self.thorough)

    def test_import_hygiene(self) -> None:
        """Finding the plugin imports no array library."""
        if self.backend != ARRAY_API:
            promises.check_import_hygiene(self.backend.partition(":")[0])

    def test_dtypes_are_kept(self) -> None:
        """Arrays keep the dtypes that the plugin declares, or it says why not."""
        if self.backend != ARRAY_API:
            promises.check_dtypes_are_kept(self.backend.partition(":")[0])

    def test_xfails_are_names_of_tests(self) -> None:
        """Every line of `xfails` is about a test that there is."""
        unknown = sorted(set(self.xfails) - _names.get(type(self), set()))
        assert not unknown, f"xfails: no such test: {', '.join(unknown)}"

    # ---- which of them there are ----

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each kernel, or of each kernel and case."""
        if not isinstance(getattr(self, "backend", None), str):
            name = type(self).__name__
            raise pytest.UsageError(f'{name} must name a backend, such as backend = "numpy"')
        if not isinstance(self.xfails, Mapping):
            raise pytest.UsageError(
                "xfails must map the names of tests to the reasons why they fail, such as "
                f'{{"test_case[fused-window]": "it is slow"}}; got {self.xfails!r}'
            )
        test = metafunc.function.__name__
        if "variant" not in metafunc.fixturenames:
            for mark in self._marks(test):
                metafunc.definition.add_marker(mark)
            return
        target, names = _subject(self.backend, self.library), ["variant"]
        runs: list[tuple[Any, ...]]
        if "case" in metafunc.fixturenames:
            names, runs = ["variant", "case"], list(self._runs(test, target))
        elif "dtype" in metafunc.fixturenames:
            names = ["variant", "dtype"]
            swept = target.kernels if self.thorough else ()
            runs = [(x, dtype) for x in swept for dtype in promises.swept(target, x)]
        else:
            runs = [(c,) for c in target.kernels if self._declares(test, target, c)]
        metafunc.parametrize(names, self._params(test, [None] * len(names), runs))

    def _runs(self, test: str, target: Target) -> Iterator[tuple[KernelVariant, Case]]:
        name, cases = test.removeprefix("test_"), CASES if self.thorough else ESSENTIAL
        for variant in target.kernels:
            few = bool(why_few(target, variant, name, thorough=self.thorough))
            for case in chosen(target, variant, name, cases, few=few):
                yield variant, case

    def _declares(self, test: str, target: Target, variant: KernelVariant) -> bool:
        promise = promises.PROMISES.get(test.removeprefix("test_"))
        return promise is None or promise.applies(target, variant)

    def _params(self, test: str, fill: list[None], runs: list[tuple[Any, ...]]) -> list[Any]:
        if not runs:
            return [pytest.param(*fill, marks=pytest.mark.skip(reason=_NOTHING))]
        ids = ["-".join(map(str, run)) for run in runs]
        return [
            pytest.param(*run, id=name, marks=self._marks(f"{test}[{name}]"))
            for run, name in zip(runs, ids, strict=True)
        ]

    def _marks(self, name: str) -> list[pytest.MarkDecorator]:
        _names.setdefault(type(self), set()).add(name)
        reason = self.xfails.get(name)
        return [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]


_names: dict[type, set[str]] = {}
_NOTHING = "no kernel declares it, or the library does not allow it"


@cache
def _subject(backend: str, library: str | None, lazy: bool = False) -> Target:
    target = Target(backend, library)
    return Target(backend, library, lazily) if lazy and is_lazy(target) else target


def _add(name: str, test: Callable[..., None]) -> None:
    """Add a test to the suite, unless it has a method for it."""
    test.__name__ = f"test_{name}"
    if not hasattr(BackendSuite, test.__name__):
        setattr(BackendSuite, test.__name__, test)


def _of_derivative(check: Callable[..., Any]) -> Callable[..., None]:
    def test(self: BackendSuite, lazy_target: Target, variant: KernelVariant, case: Case) -> None:
        check(lazy_target, variant, case)

    return test


def _of_promise(check: Callable[..., Any]) -> Callable[..., None]:
    def test(self: BackendSuite, target: Target, variant: KernelVariant) -> None:
        check(target, variant)

    return test


for _name, _of in ALL_DERIVATIVES.items():
    _add(_name, _of_derivative(_of.check))
for _name, _promise in promises.PROMISES.items():
    _add(_name, _of_promise(_promise.check))
