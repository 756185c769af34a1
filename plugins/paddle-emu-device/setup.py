"""Builds the device's library against the installed Paddle and puts it where Paddle looks for custom devices."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER, LIBRARY = "paddle_custom_device", "libpaddle-polyemu.so"
"""Beside the packages: Paddle loads every library in this folder when it is imported."""


class BuildDevice(build_ext):
    """Builds the library under the name that Paddle wants, not under that of a Python extension."""

    def get_ext_filename(self, fullname):
        """The file of the one extension there is."""
        del fullname
        return LIBRARY

    def get_export_symbols(self, ext):
        """No module initialiser: functions are exported in the source."""
        del ext
        return []


def paddle() -> Path:
    """Folder of the installed Paddle, found without importing it."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "building the Paddle device needs Paddle's headers, got no installed Paddle; install one, then run "
            "pip install --no-build-isolation on this folder"
        )
    return Path(spec.origin).parent


home = paddle()
setup(
    ext_modules=[
        Extension(
            f"{FOLDER}.polyemu",
            sources=["src/runtime.cc", "src/kernels.cc"],
            depends=["src/queue.h", "src/operations.h"],
            include_dirs=[str(home / "include"), str(home / "include" / "third_party")],
            define_macros=[("PADDLE_WITH_CUSTOM_DEVICE", None)],
            library_dirs=[str(home / "libs"), str(home / "base")],
            extra_compile_args=["-std=c++17", "-O1", "-g0", "-Wno-attributes", "-Wno-unknown-pragmas"],
            extra_link_args=["-l:libphi_core.so", "-l:libcommon.so", "-lpthread"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildDevice},
)
