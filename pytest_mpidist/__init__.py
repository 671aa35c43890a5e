"""The pytest plugin of mpidist: replicas as threads, without MPI.

- The fixture ``replicas`` is `mpidist.testing.run`: ``replicas(3, program)``.
- ``@pytest.mark.replicas(1, 2, 3)`` runs the test itself as a program on so many
  replicas, once for each number. Fixtures are shared by the replicas, except those
  marked ``@mpidist.testing.each_replica`` and those that depend on them: each replica
  makes its own. ``@pytest.mark.processes`` excludes a test of a marked module.
- A test that is also marked ``mpi`` (pytest-mpi) runs on the processes of ``mpirun``
  if ``--with-mpi`` is given, and on threads otherwise.

pytest loads it wherever mpidist is installed, so it is not part of the package, whose
import takes longer than that of pytest: mpidist is imported by the tests that use it.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_NUMBER = "number_of_replicas"
_EACH = "_mpidist_each_replica"  # set by mpidist.testing.each_replica


@pytest.fixture
def replicas() -> Callable[..., list[Any]]:
    """Run a program on replicas that are threads: `mpidist.testing.run`."""
    from mpidist import testing

    return testing.run


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark ``replicas``."""
    config.addinivalue_line(
        "markers",
        "replicas(*numbers): run the test as a program on so many replicas, which are "
        "threads (mpidist.testing)",
    )
    config.addinivalue_line(
        "markers",
        "processes: do not run the test on threads, whatever the module's mark says",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test with its numbers of replicas."""
    mark = metafunc.definition.get_closest_marker("replicas")
    mpi = metafunc.definition.get_closest_marker("mpi")
    if mark is None or metafunc.definition.get_closest_marker("processes") is not None:
        return
    if mpi is not None and _with_mpi(metafunc.config):
        return
    numbers = mark.args
    if not numbers or any(type(n) is not int or n < 1 for n in numbers) or mark.kwargs:
        pytest.fail(
            f"{metafunc.definition.nodeid}: expected `@pytest.mark.replicas(1, 2, 3)`, "
            f"with numbers of replicas, got {mark.args!r:.80} {mark.kwargs or ''}",
            pytrace=False,
        )
    if mpi is not None:
        numbers = tuple(n for n in numbers if n >= mpi.kwargs.get("min_size", 1))
    metafunc.fixturenames.append(_NUMBER)
    metafunc.parametrize(
        _NUMBER, numbers, indirect=True, ids=[f"{n}replicas" for n in numbers]
    )


@pytest.fixture
def number_of_replicas(request: pytest.FixtureRequest) -> int:
    """The number of replicas that run a test marked ``replicas``."""
    return int(request.param)


def _with_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", False))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove the skip of pytest-mpi from tests that run on threads."""
    for item in items:
        if isinstance(item, pytest.Function) and _is_program(item):
            item.own_markers[:] = [
                mark for mark in item.own_markers if not _is_skip_of_mpi(mark)
            ]


def _is_skip_of_mpi(mark: pytest.Mark) -> bool:
    """Whether pytest-mpi has set this mark, because ``--with-mpi`` is missing."""
    return mark.name == "skip" and "--with-mpi" in str(mark.kwargs.get("reason"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Omit the fixtures that each replica makes."""
    if isinstance(item, pytest.Function) and _is_program(item):
        for name in _own_fixtures(item):
            item.funcargs[name] = None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test as a program on replicas."""
    if not _is_program(pyfuncitem):
        return None
    from mpidist import testing
    from mpidist.testing._run import stop_run

    own = _own_fixtures(pyfuncitem)
    shared = {
        name: value for name, value in pyfuncitem.funcargs.items() if name not in own
    }
    folders = shared.get("tmp_path_factory")
    if isinstance(folders, pytest.TempPathFactory):
        folders.getbasetemp()  # its first use is not made for several threads
    wanted = pyfuncitem._fixtureinfo.argnames
    function = pyfuncitem.obj

    def program() -> None:
        stack, made = contextlib.ExitStack(), dict(shared)
        try:
            for name in own:
                made[name] = _make(pyfuncitem, name, made, stack)
            function(**{name: made[name] for name in wanted})
        except BaseException as error:
            # The others are told first: fixtures must not wait for them.
            stop_run(error)
            _take_down(stack, error)
            raise
        stack.close()

    number: Any = pyfuncitem.callspec.params[_NUMBER]
    try:
        testing.run(number, program)
    except pytest.skip.Exception as skipped:
        del skipped.__notes__  # which are for failures
        raise
    return True


def _is_program(item: pytest.Function) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and _NUMBER in callspec.params


def _own_fixtures(item: pytest.Function) -> list[str]:
    """Return the fixtures that each replica makes, in the order of making them."""
    definitions = item._fixtureinfo.name2fixturedefs
    own: dict[str, None] = {}

    def is_own(name: str, seen: tuple[str, ...] = ()) -> bool:
        if name in own:
            return True
        if name in seen or not definitions.get(name):
            return False
        definition = definitions[name][-1]
        needed = [is_own(x, (*seen, name)) for x in definition.argnames]
        if any(needed) or getattr(definition.func, _EACH, False):
            own[name] = None
            return True
        return False

    for name in item.fixturenames:
        is_own(name)
    return list(own)


def _make(
    item: pytest.Function, name: str, made: dict[str, Any], stack: contextlib.ExitStack
) -> Any:
    """Make a fixture for this replica, which the stack takes down."""
    definition = item._fixtureinfo.name2fixturedefs[name][-1]
    arguments = {
        x: _request(item, name) if x == "request" else made[x]
        for x in definition.argnames
    }
    function = definition.func
    if item.instance is not None and not inspect.ismethod(function):
        with contextlib.suppress(AttributeError):
            if function.__name__ in dir(type(item.instance)):
                function = function.__get__(item.instance)
    result = function(**arguments)
    if not inspect.isgeneratorfunction(definition.func):
        return result
    value = next(result)
    stack.callback(_finish, result, name)
    return value


def _finish(fixture: Iterator[Any], name: str) -> None:
    """Run what a fixture has after its ``yield``."""
    for _ in fixture:
        raise RuntimeError(f"fixture {name!r} yields more than once")


def _take_down(stack: contextlib.ExitStack, error: BaseException) -> None:
    """Take down the fixtures of a test that has failed; note which exception that has.

    None is noted of calls with the other replicas, which the run no longer serves.
    """
    from mpidist.testing._run import is_because_of_others

    try:
        stack.close()
    except BaseException as another:
        if not is_because_of_others(another):
            error.add_note(f"a fixture then raised {type(another).__name__}: {another}")


def _request(item: pytest.Function, name: str) -> Any:
    """Return the ``request`` of a replica's fixture."""
    request = types.SimpleNamespace(node=item, config=item.config)
    if name in item.callspec.params:
        request.param = item.callspec.params[name]
    return request
