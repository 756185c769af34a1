"""What the builds of Paddle devices share: where Paddle's headers and libraries lie, and where it looks for custom devices.

The `setup.py` of a device beside this folder imports it. It never imports Paddle.
"""

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Extension
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.partition(".")[0]) < 77:  # without build isolation nobody sees to what pyproject.toml requires
    raise SystemExit(
        f"building the Paddle device needs setuptools 77 or newer, got {setuptools.__version__}; "
        "pip install 'setuptools>=77' wheel"
    )

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
        """Build, and leave beside each library a note of the Paddle that it was built against. What an earlier build against
        another Paddle has left is built again, which its age alone would not bring about."""
        version = paddle_version()
        notes = [Path(output).with_suffix(".paddle-version") for output in self.get_outputs()]
        if any(not note.is_file() or note.read_text(encoding="utf-8").strip() != version for note in notes):
            self.force = True
        super().run()
        for note in notes:
            note.write_text(f"{version}\n", encoding="utf-8")

    def build_extension(self, ext):
        """Each source in a process of its own, as many as there are processors at a time: Paddle's headers take long. (As the
        repository's setup.py does, which a device that is built by itself cannot import.)"""
        one_after_the_other = self.compiler.compile

        def at_once(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                found = list(pool.map(lambda source: one_after_the_other([source], **options), sources))
            return [made for each in found for made in each]

        self.compiler.compile = at_once
        super().build_extension(ext)

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


def has_graphs():
    """Whether the installed Paddle has the calls of graphs in a device's table, which came with 3.3."""
    table = paddle() / "include" / "paddle" / "phi" / "backends" / "device_ext.h"
    return "cuda_stream_begin_capture" in table.read_text(encoding="utf-8")


def device_library(device_type, sources, *, depends=(), link=(), include_dirs=()):
    """The extension of one device type: its C++ sources, the skeleton's headers, Paddle's headers and libraries."""
    home = paddle()
    includes = [INCLUDE, home / "include", home / "include" / "third_party", *include_dirs]
    return Extension(
        f"{FOLDER}.{device_type}",
        sources=list(sources),
        depends=[*depends, *(str(path) for path in sorted(INCLUDE.rglob("*.h")))],
        include_dirs=[str(folder) for folder in includes],
        define_macros=[
            ("PADDLE_WITH_CUSTOM_DEVICE", None),
            ("PADDLE_DEVICE_TYPE", f'"{device_type}"'),
            ("PADDLE_DEVICE_GRAPHS", str(int(has_graphs()))),
        ],
        library_dirs=[str(home / "libs"), str(home / "base")],
        extra_compile_args=COMPILE,
        extra_link_args=[*link, "-l:libphi_core.so", "-l:libcommon.so", "-lpthread"],
        language="c++",
    )
