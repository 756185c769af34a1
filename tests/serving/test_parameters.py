"""Parameters that plugins bring, over HTTP: fields of the bodies where a plugin brings them, refused by name where none does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polydraft.errors import ConfigError, RequestError
from polydraft.serving import protocol
from polydraft.serving.wire import Parameter
from tests.serving.conftest import Served
from tests.support import tiny

FILE = str(Path(tiny.__file__).with_name("scale_stage.py"))
SCALED = Parameter("logit-scale", "Multiplies logits.", "a number above 0")
SAMPLED: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 7}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose engine has the plugin."""
    served = Served(tmp_path_factory.mktemp("scaled"), "--plugin", FILE)
    yield served
    assert served.stop() == 0


def ask(server: Served, *, chat: bool = False, **body: Any) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "w3 w1"}]} if chat else {"prompt": "w3 w1"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return httpx.post(server.url + path, json={**prompt, **SAMPLED, **body}, timeout=60)


def text(server: Served, *, chat: bool = False, **body: Any) -> str:
    answer = ask(server, chat=chat, **body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return str(choice["message"]["content"] if chat else choice["text"])


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_a_parameter_of_a_plugin_is_a_field_of_the_body(scaled: Served, chat: bool) -> None:
    halved = text(scaled, chat=chat, temperature=0.5)
    assert text(scaled, chat=chat, temperature=1, logit_scale=2.0) == halved
    assert text(scaled, chat=chat, temperature=1, logit_scale=None) == text(scaled, chat=chat, temperature=1) != halved


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"logit_scales": 2.0}, "unknown parameter 'logit_scales'; did you mean 'logit_scale'? known: model, "),
        ({"plugin_0": 2.0}, "unknown parameter 'plugin_0'; "),
        ({"logit_scale": -1}, "logit_scale is -1, wanted a number above 0; correct the request"),
        ({"logit_scale": {"of": ["x"]}}, "logit_scale is {'of': ['x']}, wanted a number above 0; correct the request"),
        ({"logit_scale": 10**30}, "logit_scale has a number of more than 64 bits, or more than 16 lists and objects within"),
        ({"logit_scale": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}, "logit_scale has a number of more than 64 bits, or more than 16"),
    ],
    ids=["unknown", "attribute", "value", "nested", "huge", "deep"],
)
def test_what_nobody_brings_or_accepts_is_refused(scaled: Served, body: dict[str, Any], said: str) -> None:
    answer = ask(scaled, **body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(body))
    assert scaled.get("/health")["restarts"] == 0


def test_without_the_plugin_the_field_is_unknown(server: Served) -> None:
    answer = ask(server, logit_scale=2.0)
    assert answer.status_code == 400
    assert "unknown parameter 'logit_scale'; " in answer.json()["error"]["message"]
    assert "logit_scale" not in str(server.get("/openapi.json"))


def test_the_description_has_it(scaled: Served) -> None:
    schemas = scaled.get("/openapi.json")["components"]["schemas"]
    for kind in ("CompletionRequest", "ChatRequest"):
        assert schemas[kind]["properties"]["logit_scale"]["description"] == "Multiplies logits. Wanted: a number above 0."


def test_a_parameter_may_be_called_anything_but_a_field() -> None:
    kind = protocol.with_parameters(protocol.CompletionRequest, [SCALED])
    body = protocol.decode(b'{"prompt": "x", "logit-scale": [1, {"a": null}]}', kind)
    assert protocol.sampling_params(body, default_max=4, most=0)["extra"] == {"logit-scale": [1, {"a": None}]}
    with pytest.raises(RequestError, match="unknown parameter 'logit-scal'; did you mean 'logit-scale'"):
        protocol.decode(b'{"prompt": "x", "logit-scal": 1}', kind)
    protocol.refuse_taken(["logit-scale"])
    with pytest.raises(ConfigError, match=r"plugins bring request parameters called echo, tools, as fields of HTTP bodies are"):
        protocol.refuse_taken(["tools", "mine", "echo"])


@pytest.mark.deep
def test_a_server_whose_plugin_takes_the_name_of_a_field_does_not_start(tmp_path: Path) -> None:
    (plugin := tmp_path / "taking.py").write_text(
        "from polydraft import hookimpl\nfrom polydraft.program.declare import Parameter\n"
        "class Stage:\n    name = 'mine'\n    columns = contracts = ()\n"
        "    parameters = (Parameter('top_logprobs', 0, 'Mine.', 'a number', lambda value: True),)\n"
        "    def wants(self, params): return False\n    def prepare(self, params, encode, vocab_size): pass\n"
        "    def emit(self, rows): pass\n"
        "@hookimpl\ndef polydraft_parameters():\n    return [Stage()]\n"
    )
    command = [sys.executable, "-c", "from polydraft.cli import main; main()", "serve", "--port", "0", "--plugin", str(plugin)]
    options = ["--model", str(tiny.checkpoint("narrow")), "--backend", "reference"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "plugins bring request parameters called top_logprobs, as fields of HTTP bodies are" in result.stderr.splitlines()[-1]
