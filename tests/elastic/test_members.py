"""Who the next replicas are, and what is said of a loss."""

from __future__ import annotations

import pytest

from mpidist.elastic import _members
from mpidist.elastic._members import Claim, Role, make_placement

NONE = Claim(-1, 0)


@pytest.mark.parametrize(
    ("claims", "wanted", "before", "lost", "said"),
    [
        # Three replicas of which one has died, after a commit.
        (
            [Claim(0, 3), Claim(2, 3)],
            3,
            3,
            [1],
            "lost replica 1; 2 replicas go on, with no spare left, from commit 7",
        ),
        # A spare takes its place.
        (
            [Claim(0, 3), Claim(2, 3), NONE],
            3,
            3,
            [1],
            "lost replica 1; 3 replicas go on, 1 of them from the spares, of which 0 "
            "are left, from commit 7",
        ),
        # Before the first commit, without spares and with them.
        (
            [NONE, NONE],
            3,
            3,
            [1],
            "lost replica 1; 2 replicas go on, with no spare left, from the beginning",
        ),
        (
            [NONE, NONE, NONE],
            2,
            2,
            [0],
            "lost replica 0; 2 replicas go on, 1 of them from the spares, of which 1 "
            "are left, from the beginning",
        ),
        # `train` has raised, and nobody has died.
        (
            [Claim(0, 1)],
            1,
            1,
            [],
            "lost no replica; 1 replica goes on, from commit 7",
        ),
    ],
)
def test_what_is_said_of_a_loss(claims, wanted, before, lost, said):
    started = claims[0] == NONE
    roles = [Role.STARTING if started else Role.RUNNING for claim in claims]
    placement = make_placement(roles, claims, 0 if started else 7, wanted)
    assert _members.describe(placement, before, lost) == said


def test_nobody_goes_on_without_the_state():
    with pytest.raises(_members.NobodyLeftError):
        make_placement([Role.RUNNING, Role.RUNNING], [NONE, NONE], 0, 2)
    with pytest.raises(_members.FinishedError):
        make_placement([Role.RUNNING, Role.FINISHED], [NONE, Claim(0, 1)], 4, 1)
