"""Settings for every test: the same examples in every run, and nothing of the caller's environment.

It has the hypothesis profiles, clears the environment, and sets how interrupts arrive, what the garbage collector leaves alone
and how long engines rehearse; it passes the session to `tests.support.progress`, and has tests of whole steps thinned. pytest
loads it; markers and warnings are strict by pyproject.toml. No test is skipped here.
"""

import gc
import importlib.metadata
import os
import signal
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

from polydraft import engine
from polydraft.host import rehearsal
from tests.support import depth, progress

THINNED = ("tests/step/", "tests/parity/", "plugins/examples/", "tests/serving/", "tests/conformance/", "tests/paddle/")
"""Where the tests are that run models."""

# Derandomised, so that a red run is red again; no deadline, because a slow machine is not a failure.
settings.register_profile("default", derandomize=True, deadline=None, database=None)
# A thousand programs take about five minutes of one core, which leaves room for the other tests of `make deep`.
settings.register_profile("deep", settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Let long tests say how far they are, and let the commands that tests run keep the byte code of modules: compiling all of
    them again took a third of the time of every process."""
    progress.session = config
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nearly all that is made while tests are collected lives as long as the session: looking for garbage among it took a fifth
    of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # in front of the selection by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave part of the combinations to `make deep`."""
    depth.thin([item for item in items if item.nodeid.startswith(THINNED)])


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the session: half a million objects that the collector would look at each time it has
    to find the few of the tests before, which took a tenth of the run. What tests leave is found less often than usual."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def what_lives_on_is_looked_at_once() -> Iterator[None]:
    """What a file leaves, above all what its tests' helpers remember, lives as long as the session, too. Looking at it again with
    each full collection, those that tests ask for among them, took a tenth of the run."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def rehearsals_are_short() -> Iterator[None]:
    """An engine that is not told how many drafts to make times its steps for up to a second and a half, which was a twentieth of
    the run; texts do not depend on it. Tests of the times themselves rehearse on their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Rehearsal", partial(rehearsal.Rehearsal, most_s=0.1))
        yield


@pytest.fixture(autouse=True, scope="session")
def entry_points_are_read_once() -> Iterator[None]:
    """Each engine that a test opens asks for plugins, and Python then parses the entry points and names of all installed packages
    anew: a twentieth of the run. A file that comes, goes or changes is read again; a name is that of its folder."""
    installed: Any = importlib.metadata.PathDistribution
    read, named = installed.entry_points, installed._normalized_name
    known: dict[tuple[str, int, int], Any] = {}
    names: dict[str, str] = {}

    def entry_points(self: Any) -> Any:
        file = os.path.join(str(self._path), "entry_points.txt")  # noqa: PTH118  one for each package, each time
        try:
            found = os.stat(file)  # noqa: PTH116
            key = file, found.st_mtime_ns, found.st_size
        except OSError:
            key = file, 0, 0
        if key not in known:
            known[key] = read.fget(self)
        return known[key]

    def name(self: Any) -> str:
        folder = str(self._path)
        if folder not in names:
            names[folder] = named.fget(self)
        return names[folder]

    installed.entry_points, installed._normalized_name = property(entry_points), property(name)
    yield
    installed.entry_points, installed._normalized_name = read, named


@pytest.fixture(autouse=True, scope="session")
def interrupts_as_in_a_terminal() -> None:
    """A process that a shell starts in the background ignores Ctrl-C from its birth; tests of interrupts want to be hit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the variables that polydraft reads, and what the user's cache knows of variants, so that neither a developer's shell
    nor a CI system changes a result."""
    for name in [name for name in os.environ if name.startswith("POLYDRAFT_")] + ["NO_COLOR", "CI"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLYDRAFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
