"""What holds for every test: the same examples in every run, and nothing of the caller's environment.

Owns the hypothesis profiles, the cleared environment, the way interrupts arrive and what the garbage collector leaves alone;
tells `tests.support.progress` the session.
Loaded by pytest; markers and warnings are strict by pyproject.toml.
Never selects or skips a test.
"""

import gc
import os
import signal

import pytest
from hypothesis import settings

from tests.support import progress

# Derandomised, so that a red run is red again; no deadline, because a slow machine is not a failure.
settings.register_profile("default", derandomize=True, deadline=None, database=None)
# A thousand programs take about five minutes of one core, which leaves room for the other tests of `make deep`.
settings.register_profile("deep", settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Let long tests say how far they are."""
    progress.session = config


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the session: half a million objects that the collector would look at each time it has
    to find the few of the tests before, which took a tenth of the run."""
    gc.collect()
    gc.freeze()


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
