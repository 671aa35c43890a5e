"""Builds the native core if there is a C compiler; all metadata is in setup.cfg.

The core is optional: without a compiler the installation succeeds, and everything goes
by MPI. ``MPIDIST_NO_CORE=1`` leaves it out; ``MPIDIST_CORE_CFLAGS``: more flags.
"""

import glob
import os
import zlib

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

FLAGS = [
    "-std=c11",
    "-O3",
    # The sums are NumPy's, bit by bit: no fused multiply-add.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]

# `mpidist._native` compares it with that of the sources, to find an older build.
FILES = sorted(glob.glob("mpidist/_native/*.[ch]"))
CHECKSUM = 0
for name in FILES:
    with open(name, "rb") as file:
        CHECKSUM = zlib.crc32(file.read(), CHECKSUM)

extensions = []
if os.name == "posix" and os.environ.get("MPIDIST_NO_CORE", "0") in ("", "0"):
    extensions.append(
        Extension(
            "mpidist._native._core",
            sources=[name for name in FILES if name.endswith(".c")],
            depends=[name for name in FILES if name.endswith(".h")],
            define_macros=[("MD_CHECKSUM", str(CHECKSUM))],
            extra_compile_args=[
                *FLAGS,
                *os.environ.get("MPIDIST_CORE_CFLAGS", "").split(),
            ],
            libraries=["m"],
            optional=True,
        )
    )


class BuildCore(build_ext):
    """Adds NumPy's headers, which are not there before pip has read setup.cfg."""

    def finalize_options(self) -> None:
        import numpy

        super().finalize_options()
        self.include_dirs.append(numpy.get_include())


class BuildWithPages(build_py):
    """Adds the pages of the documentation, which `mpidist docs` prints."""

    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):
            return  # the command finds them in the checkout
        for page in [*glob.glob("docs/**/*.md", recursive=True), "docs/port.sed"]:
            if not page.startswith("docs/_build/"):
                copy = os.path.join(self.build_lib, "mpidist", "_" + page)
                self.mkpath(os.path.dirname(copy))
                self.copy_file(page, copy)


class SourceArchive(sdist):
    """Adds the files that users of the archive need without the repository."""

    def make_distribution(self) -> None:
        for folder in ("docs", "examples", "launch", "tests"):
            self.filelist.graft(folder)
        self.filelist.prune("docs/_build")
        for name in ("*.md", "CITATION.cff", ".ci/run"):
            self.filelist.include(name)
        for name in (".ruff.toml", ".shellcheckrc", ".pre-commit-config.yaml"):
            self.filelist.include(name)
        self.filelist.global_exclude("*.py[co]")
        self.filelist.sort()
        self.filelist.remove_duplicates()
        super().make_distribution()


setup(
    ext_modules=extensions,
    cmdclass={
        "build_ext": BuildCore,
        "build_py": BuildWithPages,
        "sdist": SourceArchive,
    },
)
