"""What tests of devices share: a cache folder of their own, and GPU tests that skip where there is none, saying why."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels compiled by this run of the suite, and by no other."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(plain_environment: None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from, or left in, the user's cache folder."""
    monkeypatch.setenv("POLYDRAFT_CACHE_DIR", str(cache))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `device("cuda")` where the backend says that it cannot be used."""
    marked = [item for item in items if any(mark.args == ("cuda",) for mark in item.iter_markers("device"))]
    if not marked:
        return
    from polydraft_cuda.probe import look

    reason = look().reason
    for item in marked if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))
