"""Options that commands share: each reaches the configuration that it is for, under every command that has it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import pytest

from polydraft.cli import generate, serve
from polydraft.cli.options import ENGINE
from polydraft.config import EngineConfig
from polydraft.sampling_params import SamplingParams
from polydraft.serving.settings import ServerSettings

ELSEWHERE = {
    "generate": {
        "prompt", "prompts", "regex", "json_schema", "grammar", "provenance", "sanitize", "seed", "trace", "record",
        "record_steps", "record_drafts", "replay_drafts", "record_weights", "explain", "no_color", "as_json",
    },
    "serve": {"api_key_file", "admin_key_file", "no_playground", "as_json", "ray"},
}  # fmt: skip
"""Arguments that the commands take apart themselves."""


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def arguments(command: Any) -> set[str]:
    return {parameter.name for parameter in command.params if parameter.expose_value}


@pytest.mark.parametrize("module", [generate, serve])
def test_every_shared_option_is_a_field_of_the_engine(module: Any) -> None:
    assert set(ENGINE) <= fields(EngineConfig)
    assert set(ENGINE) <= arguments(module.command)


def test_every_other_option_of_serve_is_a_setting() -> None:
    rest = arguments(serve.command) - set(ENGINE) - set(serve.OWN) - set(serve.RAY) - ELSEWHERE["serve"]
    assert rest <= fields(ServerSettings)
    assert set(serve.OWN) <= fields(EngineConfig)


def test_every_other_option_of_generate_belongs_to_its_requests() -> None:
    rest = arguments(generate.command) - set(ENGINE) - ELSEWHERE["generate"]
    assert rest <= set(generate.SAMPLING) | {"constraint"}
    assert set(generate.SAMPLING) <= fields(SamplingParams)


def test_the_engine_is_what_each_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` hands over exactly what it was given, and its own default for slots."""
    from polydraft.serving import main

    seen: dict[str, Any] = {}
    monkeypatch.setattr(main, "run", lambda engine, settings, ready: seen.update(engine))
    arguments = ["--draft-tokens", "2", "--variants", "off", "--allow-cpu-fallback", "--think-end-ids", "3,4", "--logprobs", "-1"]
    serve.command.main(arguments, standalone_mode=False)
    assert seen == {
        "draft_tokens": 2, "variants": "off", "allow_cpu_fallback": True, "think_end_ids": (3, 4), "max_num_seqs": 32,
    }  # fmt: skip
    EngineConfig.from_mapping(seen)


def test_what_binds_a_text_is_read_from_one_option(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('root ::= "a"')
    for given, wanted in (
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"json_schema": str(schema)}, {"json_schema": {"type": "integer"}}),
        ({"grammar": str(grammar)}, {"grammar": 'root ::= "a"'}),
    ):
        assert generate._constraint(dict(given)) == {"constraint": wanted}
    assert generate._constraint({"model": "x"}) == {}
    for given, told in (
        ({"regex": "a", "grammar": str(grammar)}, "both --regex and --grammar"),
        ({"grammar": str(tmp_path / "none")}, "give a file with a grammar"),
        ({"json_schema": str(grammar)}, "give a file with one JSON schema"),
    ):
        with pytest.raises(click.UsageError, match=told):
            generate._constraint(dict(given))
