"""Builds the device's library against the installed Paddle and puts it where Paddle looks for custom devices."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "paddle-device-skeleton"))
from build_device import BuildDevice, device_library  # beside this folder: what devices share

setup(
    ext_modules=[
        device_library(
            "polyemu",
            [f"src/{name}.cc" for name in ("kernels_of_floats", "kernels_of_others", "runtime", "offer", "collectives")],
            depends=[str(header) for header in sorted(Path("src").glob("*.h"))],
        )
    ],
    cmdclass={"build_ext": BuildDevice},
)
