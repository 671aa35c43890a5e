"""Fixtures that each replica of a test creates; pytest is not imported."""

from __future__ import annotations

from typing import Any, Final, TypeVar

_F = TypeVar("_F")
_MARK: Final = "_mpidist_each_replica"  # the plugin, `pytest_mpidist`, looks for it


def each_replica(fixture: _F) -> _F:
    """Make each replica of a test create this fixture separately.

    For tests marked ``replicas``, whose other fixtures are created once and shared by
    the replicas. Each replica also creates the fixtures that depend on this one. Put it
    above or below ``@pytest.fixture``::

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
