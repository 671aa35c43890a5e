"""The programs, by section of the report."""

from conformance.programs import (
    contexts as contexts,
)
from conformance.programs import (
    merging as merging,
)
from conformance.programs import (
    running as running,
)
from conformance.programs import (
    extended as extended,
)
from conformance.programs import (
    reducing as reducing,
)
from conformance.programs import (
    variables as variables,
)
from conformance.registry import PROGRAMS as PROGRAMS
