"""What the builds of Paddle devices share: where Paddle's headers and libraries lie, and where it looks for custom devices.

The `setup.py` of a device beside this folder imports it. It never imports Paddle.
"""

import importlib.util
import re
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

FOLDER = "paddle_custom_device"
"""Beside the packages: Paddle loads every library in this folder when it is imported."""
INCLUDE = Path(__file__).resolve().parent / "include"
COMPILE = ["-std=c++17", "-O1", "-g0", "-Wno-attributes", "-Wno-unknown-pragmas"]
"""How C++ that includes Paddle's headers is compiled."""


class BuildDevice(build_ext):
    """Builds the library under the name that Paddle wants, not under that of a Python extension."""

    def get_ext_filename(self, fullname):
        """The file of the one extension there is."""
        return f"libpaddle-{fullname.rpartition('.')[2]}.so"

    def run(self):
        """Build, and leave beside each library a note of the Paddle that it was built against."""
        super().run()
        for output in self.get_outputs():
            Path(output).with_suffix(".paddle-version").write_text(f"{paddle_version()}\n", encoding="utf-8")

    def get_export_symbols(self, ext):
        """No module initialiser: functions are exported in the source."""
        del ext
        return []


def paddle():
    """Folder of the installed Paddle, found without importing it."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "building the Paddle device needs Paddle's headers, got no installed Paddle; install one, then run "
            "pip install --no-build-isolation on this folder"
        )
    return Path(spec.origin).parent


def paddle_version():
    """Version of the installed Paddle, whichever distribution it came with."""
    text = (paddle() / "version" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r"^full_version\s*=\s*'([^']+)'", text, flags=re.MULTILINE)[1]


def device_library(device_type, sources, *, depends=(), link=(), include_dirs=()):
    """The extension of one device type: its C++ sources, the skeleton's headers, Paddle's headers and libraries."""
    home = paddle()
    includes = [INCLUDE, home / "include", home / "include" / "third_party", *include_dirs]
    return Extension(
        f"{FOLDER}.{device_type}",
        sources=list(sources),
        depends=[*depends, *(str(path) for path in sorted(INCLUDE.rglob("*.h")))],
        include_dirs=[str(folder) for folder in includes],
        define_macros=[("PADDLE_WITH_CUSTOM_DEVICE", None), ("PADDLE_DEVICE_TYPE", f'"{device_type}"')],
        library_dirs=[str(home / "libs"), str(home / "base")],
        extra_compile_args=COMPILE,
        extra_link_args=[*link, "-l:libphi_core.so", "-l:libcommon.so", "-lpthread"],
        language="c++",
    )
