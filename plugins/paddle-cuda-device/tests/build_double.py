"""Builds the CUDA device with its kernels as C++, and a CUDA driver without a GPU for it: everything but silicon, for tests.

    python build_double.py FOLDER

`FOLDER/site` is then what an installation would be, and `FOLDER/driver` has a libcuda.so.1. Needs a C++ compiler, Paddle, and the
headers of CUDA, which `nvidia-cuda-runtime` has, too.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLUGINS = HERE.parent.parent
sys.path.insert(0, str(PLUGINS / "paddle-device-skeleton"))
from build_device import COMPILE, INCLUDE, has_graphs, paddle  # noqa: E402  beside the plugin: what devices share

SOURCES = ("runtime.cc", "driver.cc", "graph_memory.cc", "kernels.cc", "elementwise.cu", "along.cu", "moves.cu", "fused.cu")


def cuda_headers():
    """Folder of cuda.h."""
    site = sysconfig.get_paths()["purelib"]
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"), Path(site, "nvidia", "cu13", "include")]
    for folder in folders:
        if (folder / "cuda.h").exists():
            return folder
    looked = " or ".join(map(str, folders))
    raise SystemExit(f"building the double needs cuda.h, got none in {looked}; install nvidia-cuda-runtime")


def main(folder):
    """Compile and link; everything goes under `folder`."""
    compiler, home = os.environ.get("CXX", "g++"), paddle()
    objects, library, driver = folder / "objects", folder / "site" / "paddle_custom_device", folder / "driver"
    for made in (objects, library, driver):
        made.mkdir(parents=True, exist_ok=True)
    includes = (INCLUDE, HERE.parent / "src", PLUGINS / "paddle-emu-device" / "src", home / "include",
                home / "include" / "third_party", cuda_headers())  # fmt: skip
    defines = ("-DPADDLE_WITH_CUSTOM_DEVICE", '-DPADDLE_DEVICE_TYPE="polycuda"', f"-DPADDLE_DEVICE_GRAPHS={int(has_graphs())}")
    flags = [*COMPILE, "-fPIC", *defines, *(f"-I{i}" for i in includes)]
    compiled = []
    for source in [*(HERE.parent / "src" / name for name in SOURCES), HERE / "host.cc"]:
        compiled.append(str(objects / f"{source.stem}.o"))
        subprocess.run([compiler, *flags, "-x", "c++", "-c", str(source), "-o", compiled[-1]], check=True)
    linked = ["-L" + str(home / "libs"), "-l:libphi_core.so", "-l:libcommon.so", "-lpthread", "-ldl"]
    subprocess.run([compiler, "-shared", "-o", str(library / "libpaddle-polycuda.so"), *compiled, *linked], check=True)
    made = ["-shared", "-Wl,-soname,libcuda.so.1", str(HERE / "fake_driver.cc"), "-o", str(driver / "libcuda.so.1"), "-lpthread"]
    subprocess.run([compiler, *flags, *made], check=True)
    shutil.copytree(HERE.parent / "polydraft_paddle_cuda", folder / "site" / "polydraft_paddle_cuda", dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
