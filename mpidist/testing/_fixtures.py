"""Fixtures that each replica of a test makes for itself; pytest is not imported."""

from __future__ import annotations

from typing import Any, Final, TypeVar

_F = TypeVar("_F")
_MARK: Final = "_mpidist_each_replica"  # the plugin, `pytest_mpidist`, looks for it


def each_replica(fixture: _F) -> _F:
    """Have each replica of a test make this fixture for itself.

    For tests that are marked ``replicas``, whose other fixtures are made once, and
    shared by the replicas. What depends on such a fixture is made by each replica too.
    Written above ``@pytest.fixture`` or below it::

        @mpidist.testing.each_replica
        @pytest.fixture
        def strategy():
            return mpidist.MPIStrategy()
    """
    function: Any = getattr(fixture, "_fixture_function", None)  # pytest 8.4
    if function is None:
        wrapped: Any = getattr(fixture, "__pytest_wrapped__", fixture)
        function = getattr(wrapped, "obj", wrapped)
    setattr(function, _MARK, True)
    return fixture
