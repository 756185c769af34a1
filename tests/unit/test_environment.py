"""Environment variables: typed accessors, and a documented table that cannot drift."""

import re

import pytest

from polydraft import environment
from polydraft.errors import ConfigError


def test_nothing_set_means_everything_off():
    environment.check_environment()
    assert not environment.wants_debug()
    assert not environment.no_color()
    assert not environment.is_ci()


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("TRUE", True), (" on ", True), ("0", False), ("", False)])
def test_debug_values(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool):
    monkeypatch.setenv("POLYDRAFT_DEBUG", value)
    assert environment.wants_debug() is wanted


def test_debug_refuses_what_it_cannot_understand(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYDRAFT_DEBUG", "maybe")
    with pytest.raises(ConfigError, match=r"POLYDRAFT_DEBUG .*'maybe'.*wanted one of"):
        environment.wants_debug()


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", True), ("", False)])
def test_no_color_is_on_for_any_text(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool):
    monkeypatch.setenv("NO_COLOR", value)
    assert environment.no_color() is wanted


@pytest.mark.parametrize(("value", "wanted"), [("true", True), ("jenkins", True), ("False", False), ("0", False)])
def test_ci_values(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool):
    monkeypatch.setenv("CI", value)
    assert environment.is_ci() is wanted


def test_a_misspelt_variable_is_an_error_that_names_the_right_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYDRAFT_DEBGU", "1")
    with pytest.raises(ConfigError, match=r"POLYDRAFT_DEBGU is unknown.*did you mean POLYDRAFT_DEBUG"):
        environment.check_environment()


def test_the_documented_table_is_the_table_in_force():
    rows = re.findall(r"^\| `(\w+)` +\| (.+?) +\|$", environment.__doc__ or "", flags=re.MULTILINE)
    assert dict(rows) == dict(environment.VARIABLES)


def test_variables_of_libraries_are_suggested_dictated_and_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOG_v", "3")
    environment.suggest("GLOG_v", "0")
    assert environment.given("GLOG_v") == "3"
    environment.dictate("GLOG_v", "1")
    assert environment.given("GLOG_v") == "1"
    monkeypatch.delenv("GLOG_v")
    assert environment.given("GLOG_v") == ""
