"""The programs, by section of the report: importing the modules adds them."""

from conformance.programs import contexts as contexts  # isort: split
from conformance.programs import running as running  # isort: split
from conformance.programs import merging as merging  # isort: split
from conformance.programs import reducing as reducing  # isort: split
from conformance.programs import extended as extended  # isort: split
from conformance.programs import variables as variables  # isort: split
from conformance.programs import datasets as datasets  # isort: split
from conformance.registry import PROGRAMS as PROGRAMS
