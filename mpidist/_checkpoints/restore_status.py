"""`RestoreStatus`: the names of what has been restored, with TensorFlow's methods."""

from __future__ import annotations

from collections.abc import Iterable

from mpidist._base.remedies import explain_attributes


@explain_attributes
class RestoreStatus(list[str]):
    """The names of the restored items, as `Checkpoint.restore` returns them.

    A list, with the methods of TensorFlow's status object. Without ``partial`` all
    objects and the whole checkpoint are restored when `Checkpoint.restore` returns, so
    there is nothing left to check or to wait for. Not collective.

    Args:
        names: the names.
        partial: whether the checkpoint was restored with ``partial=True``.
        nothing: whether the path was None, so that nothing was restored.
    """

    def __init__(
        self, names: Iterable[str], partial: bool, nothing: bool = False
    ) -> None:
        super().__init__(names)
        self._partial, self._nothing = partial, nothing

    def expect_partial(self) -> RestoreStatus:
        """Return this status. Write ``restore(path, partial=True)`` for its effect."""
        return self

    def assert_consumed(self) -> RestoreStatus:
        """Return this status if everything in the checkpoint was restored.

        Raises:
            AssertionError: after ``partial=True``, which does not ask for that; and if
                the path was None.
        """
        self.assert_nontrivial_match()
        if self._partial:
            raise AssertionError(
                "Checkpoint.restore: with `partial=True` items may be left out; write "
                "`checkpoint.restore(path)`, which raises if something does not match"
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Return this status if all objects were restored, as `assert_consumed`."""
        return self.assert_consumed()

    def assert_nontrivial_match(self) -> RestoreStatus:
        """Return this status if something was restored.

        `Checkpoint.restore` raises if the objects and the checkpoint have nothing in
        common.

        Raises:
            AssertionError: if the path was None.
        """
        if self._nothing:
            raise AssertionError(
                "Checkpoint.restore: the path was None, so nothing was restored; write "
                "`if path:` around this call"
            )
        return self
