"""The command line: `mpidist info`, `mpidist check` and `mpidist bench`."""

from __future__ import annotations

from mpidist._cli.main import main as main
from mpidist._cli.main import run as run
