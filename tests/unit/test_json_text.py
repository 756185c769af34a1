"""The one reader of JSON: what it takes, and the sentence about each thing that is none."""

from pathlib import Path
from typing import Any

import pytest

from polydraft.errors import CheckpointError, ConfigError
from polydraft.json_text import as_json, checked, parsed, read

DEEP = "[" * 100_000
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize("data", ['{"a": [1, "é"]}', '{"a": [1, "é"]}'.encode(), b'\xef\xbb\xbf{"a": [1, "\xc3\xa9"]}'])
def test_texts_and_bytes_of_utf_8(data: str | bytes):
    assert parsed(data) == {"a": [1, "é"]}


@pytest.mark.parametrize(
    "data",
    [DEEP, DEEP.encode(), '{"a":' * 100_000, "", "{", b'"\xff"', b'"\xed\xa0\x80"', '{"a": ' + "9" * 10_000 + "}", '"\n"'],
    ids=["deep", "deep bytes", "deep objects", "empty", "cut off", "no UTF-8", "half a character", "huge", "control character"],
)  # fmt: skip
def test_what_is_no_json_is_one_kind_of_error(data: str | bytes):
    with pytest.raises(ValueError, match=r"."):
        parsed(data)
    with pytest.raises(CheckpointError, match=r"^it is no valid JSON, got .+, wanted a JSON object; mend it$"):
        checked(data, dict, "it", "mend it", error=CheckpointError)


def test_control_characters_where_they_are_asked_for():
    assert parsed('"a\nb"', strict=False) == "a\nb"


def test_values_of_another_kind():
    assert checked("3", object, "it", "mend it") == 3
    assert checked("[3]", list, "it", "mend it") == [3]
    with pytest.raises(ConfigError, match=r"^it holds a JSON int, wanted a JSON list; mend it$"):
        checked("3", list, "it", "mend it")


def test_files(tmp_path: Path):
    file = tmp_path / "f.json"
    file.write_text("[1]")
    assert read(file, list, "mend it") == [1]
    file.write_text(DEEP)
    with pytest.raises(ConfigError, match=r"f\.json is no valid JSON, got values that nest too deep, wanted a JSON list; mend"):
        read(file, list, "mend it")
    with pytest.raises(CheckpointError, match=r"^--it is no valid JSON, got values that nest too deep, wanted JSON; mend it$"):
        read(file, object, "mend it", what="--it", error=CheckpointError)


def test_files_that_are_not_there_or_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none is missing, wanted a JSON file; mend it$"):
        read(tmp_path / "none", list, "mend it")
    with pytest.raises(ConfigError, match=r"none is missing, wanted a JSON file; bring one$"):
        read(tmp_path / "none", list, "mend it", missing="bring one")
    with pytest.raises(ConfigError, match=r"cannot be read, got Is a directory, wanted a readable file; name another"):
        read(tmp_path, list, "mend it")
    with pytest.raises(ConfigError, match=r"cannot be read, got .*null"):
        read(tmp_path / "a\0b", list, "mend it")


def test_what_a_value_is_in_a_file():
    assert as_json({"a": (1, None), 2: True}) == {"a": [1, None], "2": True}


@pytest.mark.parametrize("value", [{1, 2}, ITSELF, {"a": object()}, {(1, 2): 3}], ids=["set", "itself", "object", "key"])
def test_what_json_does_not_know(value: object):
    with pytest.raises(ValueError, match=r"."):
        as_json(value)


def test_values_that_nest_without_end_are_not_written():
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match="recursion"):
        as_json(value)
