"""What serves on a cluster of Ray, as far as it needs no Ray: options and what they refuse, records, and the router's choice."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from typing import Any, get_origin

import msgspec
import pytest
from click.testing import CliRunner

from polydraft.cli.serve import command
from polydraft.errors import ConfigError, DeviceError, RecordError, RequestError
from polydraft.ray import records
from polydraft.ray.prefixes import BLOCK, DIGEST, Sent, digests, prefix_of, ranked
from polydraft.ray.settings import Deployment, replicas, resources
from polydraft.serving import wire
from polydraft.serving.engine_client import Busy, EngineGone, Overrun
from polydraft.serving.metrics import Metrics

A, B, C = "a", "b", "c"


def test_a_prefix_is_known_by_its_whole_blocks() -> None:
    ids = list(range(5 * BLOCK + 3))
    found = digests(prefix_of(ids))
    assert len(found) == 5
    assert len(set(found)) == 5
    assert found[:3] == digests(prefix_of(ids[: 3 * BLOCK]))
    assert prefix_of(ids[: BLOCK - 1]) == b""
    other = [*ids[:BLOCK], 999, *ids[BLOCK + 1 :]]
    assert [one == two for one, two in zip(found, digests(prefix_of(other)), strict=True)] == [True, *[False] * 4]


def test_equal_blocks_behind_different_ones_are_not_a_common_prefix() -> None:
    same = list(range(BLOCK))
    assert digests(prefix_of([*same, *same]))[1] not in digests(prefix_of([*same, *same, *same]))[2:]
    assert digests(prefix_of([*same, *same]))[1] != digests(prefix_of([*range(1, BLOCK + 1), *same]))[1]


def test_sent_prefixes_are_counted_block_by_block_and_forgotten_with_their_replica() -> None:
    sent, ids = Sent(), list(range(4 * BLOCK))
    sent.add(A, prefix_of(ids[: 2 * BLOCK]))
    assert sent.blocks(A, prefix_of(ids)) == 2
    assert sent.blocks(B, prefix_of(ids)) == 0
    sent.keep([B])
    assert sent.blocks(A, prefix_of(ids)) == 0


def test_what_was_not_sent_for_longest_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    sent, old, new = Sent(most=4), list(range(3 * BLOCK)), list(range(1000, 1000 + 2 * BLOCK))
    sent.add(A, prefix_of(old))
    sent.add(A, prefix_of(new))
    assert sent.blocks(A, prefix_of(old)) == 2
    assert sent.blocks(A, prefix_of(new)) == 2


PREFIX = prefix_of(list(range(8 * BLOCK)))


def test_a_request_goes_where_most_of_its_prefix_is() -> None:
    assert ranked(PREFIX, {A: 1, B: 1, C: 0}, {A: 2, B: 5, C: 0}, slack=1) == [[B], [A, C]]


def test_of_replicas_that_have_as_much_of_it_serve_takes_the_less_busy_one() -> None:
    assert ranked(PREFIX, {A: 1, B: 0, C: 0}, {A: 5, B: 5}, slack=1)[0] == [A, B]


def test_a_replica_that_has_far_more_to_do_is_not_preferred_for_its_cache() -> None:
    assert ranked(PREFIX, {A: 3, B: 1}, {A: 8, B: 1}, slack=2)[0] == [A]
    assert ranked(PREFIX, {A: 4, B: 1}, {A: 8, B: 1}, slack=2) == [[B], [A]]


def test_a_small_part_of_a_prompt_is_no_reason_to_go_anywhere() -> None:
    long = prefix_of(list(range(64 * BLOCK)))
    names = [f"replica-{number}" for number in range(8)]
    loads = dict.fromkeys(names, 0)
    alone = ranked(long, loads, {}, slack=1)[0]
    other = next(name for name in names if name not in alone)
    assert ranked(long, loads, {other: 3}, slack=1)[0] == alone
    assert ranked(long, loads, {other: 7}, slack=1)[0] == [other]


def test_ingresses_agree_on_new_prefixes_spread_them_and_move_few_when_a_replica_comes() -> None:
    chosen = random.Random(7)
    prompts = [prefix_of([chosen.randrange(1000) for _ in range(2 * BLOCK)]) for _ in range(600)]
    three, four = dict.fromkeys((A, B, C), 0), dict.fromkeys((A, B, C, "d"), 0)
    first = [ranked(prompt, three, {}, slack=1)[0][0] for prompt in prompts]
    assert first == [ranked(prompt, dict(reversed(three.items())), {}, slack=1)[0][0] for prompt in prompts]
    assert all(150 < first.count(name) < 250 for name in three)
    moved = [
        now for before, now in zip(first, (ranked(p, four, {}, slack=1)[0][0] for p in prompts), strict=True) if now != before
    ]
    assert set(moved) == {"d"}


def test_a_request_without_a_prefix_goes_to_the_least_busy_one() -> None:
    assert ranked(b"", {A: 3, B: 0}, {A: 4}, slack=1) == [[A, B]]
    assert ranked(PREFIX, {}, {}, slack=1) == [[]]


def test_every_replica_is_ranked_once() -> None:
    chosen = random.Random(3)
    for _ in range(300):
        names = [f"r{number}" for number in range(chosen.randrange(1, 6))]
        loads = {name: chosen.randrange(6) for name in names}
        blocks = {name: chosen.randrange(len(PREFIX) // DIGEST + 1) for name in names}
        ranks = ranked(PREFIX, loads, blocks, chosen.randrange(4))
        assert ranks[0]
        assert sorted(name for rank in ranks for name in rank) == sorted(names)


# -- records ---------------------------------------------------------------------------------------
def test_records_come_back_as_they_were() -> None:
    ask = records.Ask([([1, 2], {"max_new_tokens": 3})], 5.0)
    assert records.decode_ask(records.encode(ask)) == ask
    for reply in (records.Taken("a"), records.Failed("busy", "why", retry_s=1), wire.Outputs(b"abcd", 1.0, 2.0, [])):
        assert records.decode_reply(records.encode(reply)) == reply


@pytest.mark.parametrize("read", [records.decode_ask, records.decode_reply, records.decode_report])
@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", wire.encode(wire.Stop())])
def test_what_is_no_record_is_refused_by_a_sentence(read: Any, data: bytes) -> None:
    with pytest.raises(RecordError, match="run one version on all nodes"):
        read(data)


def test_a_request_of_another_version_is_refused() -> None:
    with pytest.raises(RecordError, match="version 99"):
        records.decode_ask(records.encode(records.Ask([], 1.0, version=99)))


@pytest.mark.parametrize(
    "error",
    [
        RequestError("wrong", "prompt"), Busy("full", 3), EngineGone("ended"), Overrun("slow"), DeviceError("broken"),
        RecordError("unreadable"), asyncio.TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_error_of_a_replica_is_the_same_at_the_ingress(error: Exception) -> None:
    again = records.raised(records.failed(error))
    assert isinstance(again, DeviceError if isinstance(error, RecordError) else type(error))
    assert str(again) == str(error)
    assert vars(again) == (vars(error) if not isinstance(error, RecordError) else {})


def test_a_bug_of_a_replica_is_no_record() -> None:
    with pytest.raises(ZeroDivisionError):
        records.failed(ZeroDivisionError())


# -- figures ---------------------------------------------------------------------------------------
def counts(**given: Any) -> wire.Stats:
    """Of an engine that has done nothing, but for what is given."""
    empty = {one.name: (get_origin(one.type) or one.type)() for one in msgspec.structs.fields(wire.Stats)}
    return wire.Stats(**{**empty, **given})


def test_figures_say_of_which_replica_and_rank_they_are() -> None:
    metrics = Metrics("m", replica="ingress")
    page = metrics.text({A: counts(steps=3, behind=[0, 2]), B: counts(steps=5, behind=[1, 0])}).decode()
    found = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert [found[f'polydraft:steps_total{{model_name="m",replica="{name}"}}'] for name in (A, B)] == ["3.0", "5.0"]
    of_ranks = {name: value for name, value in found.items() if name.startswith("polydraft:rank_plans_waiting{")}
    label = 'polydraft:rank_plans_waiting{{model_name="m",rank="{}",replica="{}"}}'
    wanted = {(1, A): "0.0", (2, A): "2.0", (1, B): "1.0", (2, B): "0.0"}
    assert of_ranks == {label.format(*of): value for of, value in wanted.items()}
    assert found['vllm:prompt_tokens_total{model_name="m",replica="ingress"}'] == "0.0"


# -- options ---------------------------------------------------------------------------------------
def test_limits_follow_the_engine() -> None:
    wanted = Deployment.from_mapping({"engine": {"max_num_seqs": 64}, "replicas": "2:5", "resources": {"CPU": 4, "XPU": 1}})
    assert wanted.slots == 64
    assert wanted.slack == 16
    assert wanted.replicas == (2, 5)
    assert wanted.actor_options() == {"num_cpus": 4, "resources": {"XPU": 1}}
    assert Deployment.from_mapping({"engine": {}}).slack == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "an argument `engine`, which is missing"),
        ({"engine": {}, "replica": 3}, "no argument 'replica', wanted some of api_key_file, engine"),
        ({"engine": {"max_seqs": 3}}, "max_seqs"),
        ({"engine": {}, "server": {"drain": 3}}, "the server has no setting 'drain', wanted some of"),
        ({"engine": {}, "server": {"port": 0}}, "whose proxies on all nodes have one port"),
        ({"engine": {}, "server": {"drain_s": 0}}, "--drain-timeout is 0"),
        ({"engine": {}, "replicas": "3:2"}, "'3:2', wanted N or MIN:MAX"),
        ({"engine": {}, "ingresses": 0}, "0 ingresses, wanted at least 1"),
        ({"engine": {}, "resources": {"GPU": -1}}, "takes -1 of GPU, wanted more than 0"),
        ({"engine": {"enable_sleep_mode": True}}, "enable_sleep_mode was given and is not served on Ray"),
        ({"engine": {}, "server": {"admin_key": "k"}}, "deploy again instead"),
        ({"engine": {}, "server": {"api_keys": ["k"]}}, "give api_key_file"),
    ],
)
def test_wrong_arguments_are_refused_by_a_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Deployment.from_mapping(given)
    assert said in str(raised.value)


@pytest.mark.parametrize("value", ["", "0", "2:1", "1:2:3", "many", "-1"])
def test_a_wrong_number_of_replicas_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="wanted N or MIN:MAX"):
        replicas(value)


@pytest.mark.parametrize("value", ["", "CPU", "CPU=many", "CPU=1,,GPU=1"])
def test_wrong_resources_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="wanted NAME=AMOUNT"):
        resources(value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ray-replicas", "2"], "--ray-replicas was given without --ray"),
        (["--ray", "--ray-replicas", "no"], "wanted N or MIN:MAX"),
        (["--ray", "--head-timeout", "3"], "--head-timeout was given with --ray, where Serve's proxy has the connections"),
        (["--ray", "--max-connections", "3"], "--max-connections was given with --ray"),
        (["--ray", "--admin-key-file", "keys"], "--admin-key-file was given with --ray, which is refused since a replica"),
        (["--ray", "--enable-sleep-mode"], "enable_sleep_mode was given and is not served on Ray"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CliRunner().invoke(command, options, standalone_mode=False, catch_exceptions=False)
    assert said in str(raised.value)


def test_without_ray_the_option_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(ConfigError, match=r"needs ray; install the extra: pip install 'polydraft\[ray\]'"):
        CliRunner().invoke(command, ["--ray"], standalone_mode=False, catch_exceptions=False)


def test_nothing_but_an_application_imports_ray() -> None:
    code = (
        "import sys; import polydraft.cli.serve, polydraft.serving.main, polydraft.ray.settings, polydraft.ray.records, "
        "polydraft.ray.prefixes; sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
