"""`python -m mpidist`, which is the command `mpidist`."""

from __future__ import annotations

from mpidist import _cli

_cli.run()
