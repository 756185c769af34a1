"""Builds the device's library against the installed Paddle, with a CUDA compiler, and puts it where Paddle looks for devices."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "paddle-device-skeleton"))
from build_device import BuildDevice, device_library  # beside this folder: what devices share

KERNELS = ["src/elementwise.cu", "src/along.cu", "src/moves.cu", "src/fused.cu"]
SOURCES = ["src/runtime.cc", "src/driver.cc", "src/graph_memory.cc", "src/products.cc", "src/kernels.cc"]
CODE = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",  # for what came later: the driver compiles it
]


def cuda_home():
    """Folder of the CUDA toolkit, by the compiler in it."""
    compiler = shutil.which("nvcc", path=os.pathsep.join([f"{os.environ.get('CUDA_HOME', '')}/bin", os.environ.get("PATH", "")]))
    if compiler is None and Path("/usr/local/cuda/bin/nvcc").exists():
        compiler = "/usr/local/cuda/bin/nvcc"
    if compiler is None:
        raise SystemExit(
            "building the CUDA device needs nvcc, got none on PATH, in CUDA_HOME or in /usr/local/cuda; install the CUDA toolkit "
            "(12.4 or newer) and try again"
        )
    found = subprocess.run([compiler, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    for line in found.stderr.splitlines():  # a compiler may be a script that calls the real one
        if line.startswith("#$ TOP="):
            return Path(line[7:].strip().strip('"')), compiler
    return Path(compiler).resolve().parent.parent, compiler


class BuildCudaDevice(BuildDevice):
    """Compiles device code by nvcc, and links its runtime in: loading the library needs nothing of CUDA."""

    def build_extension(self, ext):
        """Kernels first, then the C++ around them."""
        home, compiler = cuda_home()
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        options = ["-std=c++17", "-O2", "-Xcompiler", "-fPIC", "-diag-suppress", "186", *CODE]
        for source in KERNELS:
            made = folder / f"{Path(source).stem}.o"
            subprocess.run([compiler, *options, "-c", source, "-o", str(made)], check=True)
            ext.extra_objects.append(str(made))
        ext.include_dirs.append(str(home / "include"))
        libraries = [str(folder) for folder in (home / "lib64", home / "lib") if (folder / "libcudart_static.a").exists()]
        ext.library_dirs += libraries
        super().build_extension(ext)


setup(
    ext_modules=[
        device_library(
            "polycuda",
            SOURCES,
            depends=[*KERNELS, *(str(path) for path in sorted(Path("src").glob("*.h")))],
            link=["-l:libcudart_static.a", "-ldl", "-lrt"],
        )
    ],
    cmdclass={"build_ext": BuildCudaDevice},
)
