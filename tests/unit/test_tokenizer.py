"""Text and ids: nothing cut, nothing padded, and a stream of whole characters that joins to the decoded text."""

import json
import shutil
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from polydraft.demo import demo_model_path
from polydraft.errors import CheckpointError, RequestError
from polydraft.models import IncrementalDecoder, Tokenizer
from polydraft.models import tokenizer as module
from polydraft.models.tokenizer import TextOffsets


@cache
def demo() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


@cache
def byte_ids() -> dict[int, int]:
    """Byte value to the demo tokenizer's id of the token that is this byte alone.

    The byte-level alphabet writes a printable byte as itself and the others, in order, as U+0100 and the following.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    unprintable = [byte for byte in range(256) if chr(byte) not in alphabet]
    spelled = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    spelled |= {chr(256 + i): byte for i, byte in enumerate(unprintable)}
    found = {spelled[token]: i for i in range(demo().vocab_size) if (token := demo().token(i)) in spelled}
    assert len(found) == 256
    return found


@cache
def fallback() -> Tokenizer:
    """A SentencePiece-like tokenizer: words with a marked space, single bytes for everything else."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "▁▁", "e"]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(Path("fallback"), backend)


def stream(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], *, skip: bool = True) -> list[str]:
    """Push `token_ids` in groups of the given sizes (cycled), then flush."""
    decoder, pieces, begin, turn = IncrementalDecoder(tokenizer, skip_special_tokens=skip), [], 0, 0
    while begin < len(token_ids):
        size = sizes[turn % len(sizes)]
        pieces.append(decoder.push(token_ids[begin : begin + size]))
        begin, turn = begin + size, turn + 1
    return [*pieces, decoder.flush()]


ids_of_demo = st.lists(st.one_of(st.integers(0, 4199), st.sampled_from(range(4))), max_size=60)
raw_bytes = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=30).map(lambda text: text.encode("utf-8", "replace")),
    st.tuples(st.text(max_size=9), st.binary(max_size=5), st.text(max_size=9)).map(
        lambda t: t[0].encode("utf-8", "replace") + t[1] + t[2].encode("utf-8", "replace")
    ),
)
group_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=4)

# --- encoding and decoding --------------------------------------------------------------------------------------------


@given(st.text())
def test_text_survives(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(RequestError, match="lone surrogate at character"):
            demo().encode(text)
        return
    assert demo().decode(demo().encode(text, add_special_tokens=False)) == text


def test_special_tokens() -> None:
    ids = demo().encode("a<|endoftext|>b")
    assert ids[1] == 0
    assert demo().decode(ids) == "ab"
    assert demo().decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"
    assert (demo().is_special(0), demo().is_special(1), demo().is_special(2)) == (True, True, False)
    assert demo().decode([ids[0], 4195, ids[2]]) == "ab"  # ids of a padded vocabulary have no text


def test_special_tokens_of_a_plain_prompt_only(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $0", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("a") == [0, *tokenizer.encode("a", add_special_tokens=False)]


def test_nothing_is_truncated_or_padded(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(backend.encode("a b c d e f").ids) == 50
    assert Tokenizer.from_dir(tmp_path).encode("a b c d e f") == demo().encode("a b c d e f")


def test_stop_tokens(tmp_path: Path) -> None:
    assert demo().eos_token_ids == (0,)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(demo_model_path() / name, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == (0, 1)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing, wanted .*; copy it"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is malformed, got .*; ?.*again"):
        Tokenizer.from_dir(tmp_path)


def test_libraries_load_when_needed() -> None:
    path = [str(Path(__file__).parents[2] / "core")]
    code = "import polydraft.models; print(sorted({'tokenizers', 'jinja2', 'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {code}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --- streaming --------------------------------------------------------------------------------------------------------


@given(ids_of_demo, group_sizes, st.booleans())
def test_pieces_join_to_the_text(token_ids: list[int], sizes: list[int], skip: bool) -> None:
    pieces = stream(demo(), token_ids, sizes, skip=skip)
    assert "".join(pieces) == demo().decode(token_ids, skip_special_tokens=skip)


@given(raw_bytes, group_sizes)
def test_bytes_stream_as_whole_characters(data: bytes, sizes: list[int]) -> None:
    pieces = stream(demo(), [byte_ids()[byte] for byte in data], sizes)
    assert "".join(pieces) == data.decode("utf-8", "replace")


@given(st.text(alphabet="aé你😀\ufffd ", max_size=40), group_sizes)
def test_valid_text_never_shows_half_a_character(text: str, sizes: list[int]) -> None:
    sent, shown = b"", ""
    decoder = IncrementalDecoder(demo())
    for byte in text.encode():
        sent += bytes([byte])
        shown += decoder.push([byte_ids()[byte]])
        complete = sent.decode("utf-8", "ignore")
        assert complete.startswith(shown)
        assert len(complete) - len(shown) <= complete.endswith("\ufffd")  # only a U+FFFD of the text itself may wait
    assert shown + decoder.flush() == text


def test_an_invalid_byte_waits_no_longer_than_a_token() -> None:
    decoder = IncrementalDecoder(demo())
    assert [decoder.push([byte_ids()[byte]]) for byte in b"a\xff\xf0\x9f\x98b"] == [
        "a",
        "",
        "\ufffd",
        "",
        "",
        "\ufffdb",
    ]
    assert decoder.push([byte_ids()[0xF0]]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


@given(st.lists(st.integers(0, 266), max_size=60), group_sizes, st.booleans())
def test_byte_fallback_tokenizers_stream_too(token_ids: list[int], sizes: list[int], skip: bool) -> None:
    pieces = stream(fallback(), token_ids, sizes, skip=skip)
    assert "".join(pieces) == fallback().decode(token_ids, skip_special_tokens=skip)


def test_spaces_between_pieces_of_a_sentencepiece_tokenizer() -> None:
    the, cat, s = 260, 261, 262
    assert [fallback().token(i) for i in (the, cat, s)] == ["▁the", "▁cat", "s"]
    assert stream(fallback(), [1, the, cat, s, 2, the], [1]) == ["", "the", " cat", "s", "", " the", ""]
    for silent in (2, 9999):  # a special token, an id of a padded vocabulary
        assert "".join(stream(fallback(), [the, *[silent] * 40, cat], [1])) == "the cat"


def offsets(tokenizer: Tokenizer, token_ids: list[int], start: int = 0) -> list[int]:
    found = TextOffsets(tokenizer, start)
    return [found.push(token) for token in token_ids]


def test_a_byte_begins_where_its_character_does() -> None:
    text = "a\u00e9\U0001f600b\u4f60"
    wanted = [place for place, character in enumerate(text) for _ in character.encode()]
    assert offsets(demo(), [byte_ids()[byte] for byte in text.encode()]) == wanted
    in_bytes = [3 + byte for byte in text.encode()]  # the tokens `<0x..>`
    assert offsets(fallback(), in_bytes, 7) == [7 + place for place in wanted]


def test_bytes_that_are_no_character_take_a_place_each() -> None:
    assert offsets(demo(), [byte_ids()[byte] for byte in b"a\xffb\xff\xffc"]) == [0, 1, 2, 3, 4, 5]
    the, cat = 260, 261
    assert fallback().decode([the, 3 + 0xFF, 3 + 0xFE, cat]) == "the\ufffd\ufffd cat"
    assert offsets(fallback(), [the, 3 + 0xFF, 3 + 0xFE, cat]) == [0, 3, 4, 5]


def test_a_token_without_text_leaves_bytes_in_front_of_it_held_back() -> None:
    the, cat, end = 260, 261, 2
    assert fallback().kind(end) == "special"
    assert fallback().decode([the, 3 + 0x21, end, 3 + 0x21, cat]) == "the!! cat"
    assert offsets(fallback(), [the, 3 + 0x21, end, 3 + 0x21, cat]) == [0, 3, 4, 4, 5]


def test_a_long_text_leaves_the_interpreter_to_others() -> None:
    longest, working = 0.0, True

    def other() -> None:
        nonlocal longest
        while working:
            begin = time.perf_counter()
            time.sleep(0.001)
            longest = max(longest, time.perf_counter() - begin)

    thread = threading.Thread(target=other)
    thread.start()
    begin = time.perf_counter()
    ids = demo().encode("a" * 1_000_000)
    took = time.perf_counter() - begin
    assert demo().decode(ids) == "a" * 1_000_000
    working = False
    thread.join()
    assert longest < took / 2


def test_long_texts_have_the_tokens_of_short_ones() -> None:
    text = "def f(x):\n    return 'h\u00e9llo \U0001f600 <|eos|>'\n" * 400
    with mock.patch.object(module, "_LONG", 1 << 30):
        short = demo().encode(text)
        wanted = demo().decode(short)
    assert demo().encode(text) == short
    assert demo().decode(short) == wanted == demo().decode(short[:5000]) + demo().decode(short[5000:])


@given(st.text(max_size=40))
def test_offsets_are_where_the_text_before_ends(text: str) -> None:
    ids = demo().encode(text)
    starts = [len(demo().decode(ids[:place]).rstrip("\ufffd")) for place in range(len(ids))]
    if "\ufffd" not in text:
        assert offsets(demo(), ids) == starts


def test_a_text_is_refused_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Counting:
        def encode_batch(self, texts: list[str], **more: bool) -> list[tokenizers.Encoding]:
            read.extend(map(len, texts))
            return demo()._backend.encode_batch(texts, **more)

    tokenizer = Tokenizer.from_dir(demo_model_path())
    monkeypatch.setattr(tokenizer, "_backend", Counting())
    with pytest.raises(RequestError, match=r"more than \d+ tokens, wanted fewer than 100; shorten it"):
        tokenizer.encode("x = 1\n" * 100_000, most=100)
    assert sum(read) < 5000


@given(
    st.lists(
        st.sampled_from(["def ", "return", " x", "    ", "\n", "self.", "<|eos|>", "'", "ll", "12345", "\u00e9", " "]),
        max_size=200,
    )
)
def test_no_text_that_fits_is_refused(words: list[str]) -> None:
    text = "".join(words)
    ids = demo().encode(text)
    with mock.patch.object(module, "_CHARACTERS", 1):  # measured from the first characters on
        assert demo().encode(text, most=max(len(ids), 1)) == ids


@pytest.mark.parametrize("token_ids", [[40], [0], [255], [0, 255, 300]])
def test_work_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch, token_ids: list[int]) -> None:
    """Also not for a text of nothing but stop tokens (ignored) or invalid bytes."""
    decoded = 0
    plain = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        nonlocal decoded
        decoded += len(ids)
        return plain(self, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    stream(demo(), token_ids * 2000, [1])
    assert decoded <= 2000 * len(token_ids) * 14
