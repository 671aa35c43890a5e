"""The programs, by section of the report: importing the modules adds them."""

import importlib

from conformance.registry import PROGRAMS as PROGRAMS

for _name in (
    "contexts",
    "running",
    "merging",
    "reducing",
    "extended",
    "variables",
    "datasets",
    "training",
):
    importlib.import_module(f"conformance.programs.{_name}")
