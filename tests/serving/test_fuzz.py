"""The whole surface under a fuzzer: whatever schemathesis makes of the server's own description, no answer is a 5xx.

Takes a minute, and needs schemathesis.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import MODEL, Served


def test_the_description_names_every_route(server: Served) -> None:
    document = httpx.get(f"{server.url}/openapi.json", timeout=20).json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health", "/metrics"} <= set(
        document["paths"]
    )
    assert "/admin/update_weights" not in document["paths"], "it is closed"
    for path, methods in document["paths"].items():
        for method in methods:
            data = b"{}" if method == "post" else None
            url = server.url + path.format(model=MODEL)
            assert httpx.request(method.upper(), url, content=data, timeout=20).status_code in (200, 400), path


@pytest.mark.deep
def test_no_request_is_answered_with_5xx(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    served = Served(tmp_path, "--max-new-tokens", "8", "--max-requests", "64")
    try:
        schemathesis = Path(sys.executable).with_name("schemathesis")
        command = [
            str(schemathesis), "run", f"{served.url}/openapi.json", "--checks", "not_a_server_error", "--max-examples", "150",
            "--workers", "2", "--generation-deterministic", "--request-timeout", "30",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, cwd=tmp_path)
        (tmp_path / "fuzz.txt").write_text(result.stdout)
        assert result.returncode == 0, result.stdout[-4000:]
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "w1", "max_tokens": 3}, timeout=20)
        assert answer.status_code == 200
        broken = [event for event in served.events() if event.get("status") == 500]
        assert not broken, json.dumps(broken[:2])
    finally:
        served.stop()
