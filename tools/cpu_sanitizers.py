"""Run the CPU backend's kernels under a sanitizer of the compiler: addresses and undefined behaviour, or threads.

Compiles the library with the sanitizer into a temporary folder, then runs a child process with it: every contract of the kit's
named and generated cases at every instruction level, ragged products and attention of random shapes, commands that are issued
and waited for by several threads, and engines with graphs, with a queue and without.
Exits with 1 when the sanitizer reported anything. Needs g++ (its sanitizer libraries are found through it) on Linux.

    python tools/cpu_sanitizers.py address,undefined
    python tools/cpu_sanitizers.py thread
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "backends" / "cpu" / "polydraft_cpu" / "src"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fPIC",
    "-Wall",
    "-Wextra",
]
PRELOAD = {"address,undefined": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}


def build(kind: str, folder: Path) -> Path:
    """Compile every source by itself, then link."""
    objects = []
    for source in sorted(SOURCE.glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        extra = ["-fno-sanitize-recover=undefined"] if "undefined" in kind else []
        subprocess.run(["g++", *FLAGS, f"-fsanitize={kind}", *extra, "-c", str(source), "-o", str(objects[-1])], check=True)
    library = folder / "_kernels.so"
    subprocess.run(["g++", "-shared", f"-fsanitize={kind}", "-pthread", "-o", str(library), *map(str, objects)], check=True)
    return library


def preloaded(kind: str) -> str:
    """Paths of the sanitizer's libraries, which must be loaded before Python."""
    found = [subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True, check=True) for n in PRELOAD[kind]]
    return " ".join(str(Path(one.stdout.strip()).resolve()) for one in found)


# -- the child -------------------------------------------------------------------------------------
def contracts() -> int:
    """Every kernel on its cases at every level, alone and with threads; returns how many comparisons there were."""
    from polydraft.conformance.harness import check_kernel
    from polydraft.contracts import COMPOSITES, REGISTRY
    from polydraft.contracts.inputs import contract_of, generated
    from polydraft.contracts.packing import PACKINGS
    from polydraft_cpu import library
    from polydraft_cpu.kernels import versions
    from tests.support.cpu import opened

    count = 0
    for level in library.levels():
        for dtype in ("f32", "bf16"):
            device, table = opened(f"cpu?isa={level}&threads=3", dtype)
            for name in versions():
                kernel = COMPOSITES[name] if name in COMPOSITES else REGISTRY[name]
                packed = contract_of(kernel).packed_cases or (lambda packing: iter(()))
                cases = [*contract_of(kernel).cases(), *(case for packing in PACKINGS for case in packed(packing))]
                for case in (*cases, *(generated(kernel, seed) for seed in range(8))):
                    comparison = check_kernel(kernel, case, device, table, act=dtype)
                    assert comparison.ok, comparison.describe()
                    count += 1
            device.close()
        print(f"{level}: every contract", flush=True)
    return count


def shapes(rounds: int) -> int:
    """Products of random shapes, large enough for threads, in every form of weights."""
    import numpy as np

    from polydraft.contracts.kernels.linear import LinearV1
    from polydraft_cpu import library
    from tests.support.cpu import bound, loaded, opened

    rng = np.random.default_rng(0)
    for number in range(rounds):
        level, weights = rng.choice(library.levels()), rng.choice(["exact", "bf16", "int8", "f32"])
        dtype, (n, o, i) = str(rng.choice(["f32", "bf16"])), (int(v) for v in rng.integers(1, (40, 700, 300)))
        device, table = opened(f"cpu?isa={level}&weights={weights}&threads={number % 4 + 1}&queue={number % 3 and 1}", dtype)
        x, w = rng.standard_normal((n, i)), rng.standard_normal((o, i)).astype(np.float32)
        weight, out = table.prepare_weight("linear", w, dtype), device.empty("out", (n, o), "f32")
        run = bound(device, table, "linear", LinearV1(x=loaded(device, "x", x), weight=weight, bias=None, out=out))
        for _ in range(5):
            run(n)
        assert np.abs(out.host_array - x @ w.T).max() < 3.0
        device.close()
    print(f"{rounds} shapes of products", flush=True)
    return rounds


def attention(rounds: int) -> int:
    """Rotation, cache and attention of random shapes, more of them than the kit generates."""
    from polydraft.conformance.harness import check_kernel
    from polydraft.contracts import REGISTRY
    from polydraft.contracts.inputs import generated
    from polydraft_cpu import library
    from tests.support.cpu import opened

    for number in range(rounds):
        level, dtype = library.levels()[number % len(library.levels())], ("f32", "bf16")[number % 2]
        device, table = opened(f"cpu?isa={level}&threads={number % 3 + 2}", dtype)
        for name in ("rope_kv_write", "paged_attention"):
            comparison = check_kernel(REGISTRY[name], generated(REGISTRY[name], 100 + number), device, table, act=dtype)
            assert comparison.ok, comparison.describe()
        device.close()
    print(f"{rounds} shapes of attention", flush=True)
    return 2 * rounds


def queue(rounds: int) -> int:
    """Launches, of kernels in Python too, and copies behind one another, waited for by several threads while more are issued."""
    import threading

    import numpy as np

    from polydraft.contracts.kernels.linear import LinearV1
    from polydraft.contracts.kernels.residual_add import ResidualAddV1
    from polydraft.reference.provider import plain
    from tests.support.cpu import LIMITS, bound, loaded, opened

    def halved(a: Any, n: int) -> None:
        a.x[:n] *= 0.5

    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((24, 128)), rng.standard_normal((512, 128)).astype(np.float32)
    issued = 0
    for number in range(rounds):
        device, table = opened(f"cpu?threads={number % 4 + 1}")
        weight, out = table.prepare_weight("linear", w, "f32"), device.empty("out", (24, 512), "f32")
        run = bound(device, table, "linear", LinearV1(x=loaded(device, "x", x), weight=weight, bias=None, out=out))
        halve = device.bind_kernel(plain(halved)).bind(ResidualAddV1(x=out, y=out), LIMITS, None)
        down, waiters = device.staging("down", (24, 512), "f32"), []
        for turn in range(8):
            run(24)
            halve(device.stream, 24)
            device.download(device.stream, down, out, 24)
            waiters.append(threading.Thread(target=device.library.pd_wait, args=(device.context, device.last)))
            waiters[-1].start()
            if turn % 4 == 3:
                device.synchronize()
        for waiter in waiters:
            waiter.join()
        assert np.abs(2 * down.array - x @ w.T).max() < 1e-3
        issued += device.last
        device.close()
    print(f"{issued} commands", flush=True)
    return issued


def engines() -> int:
    """The demo model: greedy and sampled requests that come and go, with graphs and without, on more threads than processors."""
    from polydraft import LLM, SamplingParams

    tokens = 0
    for options in (
        {}, {"graph": "off", "overlap": 2}, {"device": "cpu?queue=0"}, {"device": "cpu?threads=4&pin=0", "dtype": "bf16"},
        {"verify": "rejection"},
    ):  # fmt: skip
        llm = LLM(backend="cpu", max_num_seqs=4, **options)
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_new_tokens=24, temperature=temperature, top_p=0.9, seed=3)
            tokens += sum(len(out.token_ids) for out in llm.generate(["def f(x):\n", "class A:\n", "import os\n"] * 2, params))
        llm.close()
        print(f"engine {options}: served", flush=True)
    return tokens


def child(library_path: str, rounds: int) -> None:
    """Everything, on the library at this path."""
    sys.path[:0] = [str(ROOT)]
    import numpy as np

    from polydraft_cpu import device, kernels, library

    library.PATH = Path(library_path)
    for module in (device, kernels):  # no slack behind an array: the byte behind its last one is forbidden
        module.aligned = np.zeros  # type: ignore[attr-defined]
    counts = contracts(), shapes(rounds), attention(rounds), queue(rounds // 4), engines()
    print("{} cases, {} products, {} attentions, {} commands, {} tokens".format(*counts), flush=True)


def main() -> int:
    """Build, run, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(PRELOAD))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = build(args.kind, Path(folder))
        log = Path(folder) / "report"
        options = f"log_path={log}:halt_on_error=0:exitcode=66"
        env = {
            **os.environ,
            "LD_PRELOAD": preloaded(args.kind),
            "ASAN_OPTIONS": f"detect_leaks=0:{options}",
            "UBSAN_OPTIONS": f"print_stacktrace=1:{options}",
            "TSAN_OPTIONS": f"report_signal_unsafe=0:{options}",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, args.kind, "--child", str(library), "--rounds", str(args.rounds)]
        done = subprocess.run(command, env=env, check=False)
        reports = sorted(Path(folder).glob("report*"))
        for report in reports:
            print(report.read_text(errors="replace")[:8000])
        verdict = (
            "clean" if done.returncode == 0 and not reports else f"NOT clean: exit {done.returncode}, {len(reports)} reports"
        )
        print(f"{args.kind}: {verdict}")
        return 0 if verdict == "clean" else 1


if __name__ == "__main__":
    sys.exit(main())
