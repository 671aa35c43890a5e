"""The command line."""

from __future__ import annotations

from mpidist._cli.main import main as main, run as run
