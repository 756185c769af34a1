"""Builds the CPU backend's shared library with whatever C++ compiler there is; everything else is in pyproject.toml.

The library is no extension module: it needs no header of Python, and one build serves every Python version. Where it cannot
be built, installation goes on without it, and the backend says why it is not available. What an earlier editable installation has
built of the same sources in the same way is taken again.
"""

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = Path("backends/cpu/polydraft_cpu")
SOURCES = sorted(path.as_posix() for path in (PACKAGE / "src").glob("*.cpp"))
HEADERS = sorted(path.as_posix() for pattern in ("*.h", "*.inc") for path in (PACKAGE / "src").glob(pattern))
LIBRARY, NOTE, MADE_OF = "_kernels.so", "_build_failure.txt", "_kernels.made_of"
"""The last, beside a library in the source tree, is a digest of what that was made of."""
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]


class BuildKernels(build_ext):
    """Builds the library under a name without a Python version, or leaves a note that says why it could not."""

    def get_ext_filename(self, fullname):
        """The file of the one extension there is."""
        return str(Path(*fullname.split(".")[:-1]) / LIBRARY)

    def get_export_symbols(self, ext):
        """No module initialiser: functions are exported in the source."""
        del ext
        return []

    def run(self):
        """Build; what goes into the source tree is taken from there where it is made already, and else made anew."""
        self.into_source = bool(self.inplace)
        super().run()

    def build_extension(self, ext):
        """Compile; a failure becomes a note beside the place of the library."""
        library = Path(self.get_ext_fullpath(ext.name))
        note = library.with_name(NOTE)
        note.unlink(missing_ok=True)
        if self.into_source and self.is_made():
            library.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PACKAGE / LIBRARY, library)
            return
        self.force = self.force or self.into_source
        one_after_the_other = self.compiler.compile

        def at_once(sources, **options):
            """Compile each source in a process of its own, as many as there are processors at a time."""
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                found = list(pool.map(lambda source: one_after_the_other([source], **options), sources))
            return [made for each in found for made in each]

        self.compiler.compile = at_once
        try:
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001  whatever a compiler's absence looks like
            library.unlink(missing_ok=True)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"the build failed with {' '.join(str(error).split())[:200]!r}", encoding="utf-8")
            self.warn(f"the kernels of the cpu backend were not built: {error}")

    def made_of(self):
        """Digest of the sources, and of how and by what they are compiled."""
        names = "compiler_so", "compiler_so_cxx", "linker_so", "linker_so_cxx"
        commands = [getattr(self.compiler, name, None) for name in names]
        parts = [repr((commands, self.plat_name)).encode(), Path(__file__).read_bytes()]
        parts += [Path(name).read_bytes() for name in SOURCES + HEADERS]
        for command in filter(None, commands):
            try:
                told = subprocess.run([command[0], "--version"], capture_output=True, check=False)  # noqa: S603  it compiles
                parts.append(told.stdout)
            except OSError:
                parts.append(b"")
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def is_made(self):
        """Whether the library in the source tree is what a build would make."""
        made_of = PACKAGE / MADE_OF
        return (PACKAGE / LIBRARY).is_file() and made_of.is_file() and made_of.read_text(encoding="utf-8") == self.made_of()

    def copy_extensions_to_source(self):
        """For an editable installation: the library or the note, whichever there is."""
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            package = Path(build_py.get_package_dir(".".join(ext.name.split(".")[:-1])))
            (package / MADE_OF).unlink(missing_ok=True)
            for name in (LIBRARY, NOTE):
                (package / name).unlink(missing_ok=True)
                built = Path(self.build_lib, *ext.name.split(".")[:-1], name)
                if built.is_file():
                    self.copy_file(str(built), str(package / name))
            if (package / LIBRARY).is_file():
                (package / MADE_OF).write_text(self.made_of(), encoding="utf-8")

    def get_outputs(self):
        """What was really made."""
        folders = [Path(self.get_ext_fullpath(ext.name)).parent for ext in self.extensions]
        return [str(folder / name) for folder in folders for name in (LIBRARY, NOTE) if (folder / name).is_file()]


class PlatformWheel(bdist_wheel):
    """One wheel a platform, for every Python 3."""

    def get_tag(self):
        """No Python ABI is used."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "polydraft_cpu._kernels",
            SOURCES,
            depends=HEADERS,
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
