"""Converts text to token ids and back: encoding, decoding, streaming whole characters, chats.

The engine encodes prompts and streams texts through it, one `IncrementalDecoder` for each request. It does not truncate or pad,
does not add special tokens to a rendered chat, and imports `tokenizers` only when needed.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polydraft.errors import CheckpointError, RequestError
from polydraft.models.chat_template import ChatTemplate
from polydraft.models.config_file import ConfigFile, eos_token_ids, read_json_object

if TYPE_CHECKING:
    import tokenizers

__all__ = ["IncrementalDecoder", "TextOffsets", "Tokenizer"]

_REPLACEMENT = "\ufffd"
_CHARACTERS = 8
"""Of a token, in the first part of a text that is measured: more than most have."""
_LONG = 1 << 13
"""Characters or tokens that take milliseconds."""
_BESIDE = 4
"""Words beside a cut whose tokens may change with what is behind it."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Kind = Literal["none", "special", "byte", "text"]
"""An id without a token, one that `decode` skips by default, one of a byte (`<0x0A>`), any other."""


class Tokenizer:
    """The tokenizer of one model directory. Host only; safe to share between requests, since it keeps no state."""

    def __init__(self, directory: Path, backend: tokenizers.Tokenizer) -> None:
        """Wrap `backend`, as read from `directory`; `from_dir` is the usual way."""
        backend.no_truncation()
        backend.no_padding()
        self.directory = directory
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._added = {token.content: i for i, token in added.items()}
        self.kind: Callable[[int], Kind] = functools.cache(self._kind)
        """What an id is. Remembered: a stream asks of every token, and the library builds a string each time."""

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load tokenizer.json of the directory `path`. Errors: `CheckpointError` where it is missing or malformed."""
        import tokenizers

        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing, wanted a tokenizer in the format of the tokenizers library; copy it from the "
                f"model's repository, or create it with transformers' AutoTokenizer and its save_pretrained"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{file} is malformed, got {error}, wanted a tokenizer; download it again") from error
        return cls(Path(path), backend)

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a token, added ones included; the model's `vocab_size` may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, ascending: the union of config.json and generation_config.json of the directory.

        Errors: `CheckpointError` for a missing or malformed file or id.
        """
        config = read_json_object(self.directory / "config.json")
        size = ConfigFile(self.directory / "config.json", config).integer("vocab_size")
        return eos_token_ids(self.directory, config, size)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The directory's chat template, None where it has none. Errors: `CheckpointError` for a malformed one."""
        return ChatTemplate.from_dir(self.directory)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Return the ids of all of `text`, with the special tokens (often a leading BOS) that the tokenizer adds.

        `most`: how many are of use. A text that has more is refused by its beginning, where that shows it already.
        Errors: `RequestError` for text that is no valid Unicode (lone surrogates), and for one that is refused.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is no valid Unicode text, got a lone surrogate at character {error.start}, wanted text; "
                f"decode the input as UTF-8",
                "prompt",
            ) from None
        if most is not None:
            self._measure(text, most)
        return list(self._encoding(text, add_special_tokens=add_special_tokens).ids)

    def _encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """Only the library's batches leave the interpreter to other threads meanwhile, which matters where it takes long."""
        if len(text) < _LONG:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _measure(self, text: str, most: int) -> None:
        """Refuse a text of which a part has more than `most` tokens. What stands behind a cut may change tokens of the word that
        it goes through, and of words beside it where the tokenizer looks ahead; the others are those of the whole text."""
        size = _CHARACTERS * most
        while len(text) > 2 * size:
            (found,) = self._backend.encode_batch([text[:size]], add_special_tokens=False)
            words = [word for word in found.word_ids if word is not None]
            certain = bisect_left(words, words[-1] - _BESIDE) if words else 0
            if certain > most:
                raise RequestError(f"the prompt has more than {certain} tokens, wanted fewer than {most}; shorten it", "prompt")
            if not certain:  # it has no words, and its parts tell nothing of the whole
                return
            size *= 4

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of a conversation rendered by the chat template, which writes its special tokens itself.

        `messages`, `tools` and `variables` (for example `enable_thinking=False`) as in `ChatTemplate.render`.
        Errors: `RequestError` where the model has no template or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise RequestError(
                f"{self.directory} has no chat template, wanted chat_template.jinja or a chat_template in "
                f"tokenizer_config.json; send a plain prompt instead of messages"
            )
        text = self.chat_template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Bytes that form no character become U+FFFD, ids without a token nothing."""
        ids = list(token_ids)
        if len(ids) < _LONG:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]  # as `_encoding`

    def token(self, token_id: int) -> str | None:
        """Return the tokenizer's own spelling of one id, None where it has no token."""
        return self._backend.id_to_token(token_id)

    def byte(self, token_id: int) -> int | None:
        """Return the byte that a token like `<0x0A>` stands for, None for every other id."""
        spelled = self.token(token_id) if self.kind(token_id) == "byte" else None
        return None if spelled is None else int(spelled[3:5], 16)

    def added_id(self, text: str) -> int | None:
        """Return the id of the added token that is spelled so, special or not, None where there is none."""
        return self._added.get(text)

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` skips this id by default."""
        return token_id in self._special

    def _kind(self, token_id: int) -> Kind:
        spelled = self.token(token_id)
        if spelled is None:
            return "none"
        if token_id in self._special:
            return "special"
        return "byte" if _BYTE_TOKEN.fullmatch(spelled) else "text"


class IncrementalDecoder:
    """Streams the text of one request in pieces of whole characters; the pieces joined equal `decode` of all ids.

    What a token adds depends on its neighbours: a character may span tokens, and many tokenizers drop a leading space
    of whatever they are given first. So the last few tokens are kept as an anchor and decoded again with each push, and
    only the characters after those already handed out are new. The kept tokens are cut to `_ANCHOR` whenever there are
    more than `_LONGEST`, so the work of a push does not grow with the text.

    At most one U+FFFD at the end can still become a character (an unfinished sequence of at most 3 bytes), so only that
    one is held back. Byte-fallback tokens (`<0x0A>`) are held back until their run ends: their tokenizers judge a run
    as a whole.
    """

    _ANCHOR = 5  # more than the 3 unfinished bytes, each of which may be a token, plus one token before them
    _LONGEST = 16

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, generated: bool = False) -> None:
        """Start an empty text. `skip_special_tokens` as in `Tokenizer.decode`; where they are shown, a `generated` text leaves
        out those that end one all the same."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ends = frozenset(tokenizer.eos_token_ids) if generated and not skip_special_tokens else frozenset()
        self._hidden = {"none", "special"} if skip_special_tokens else {"none"}
        self._recent: list[int] = []
        self._emitted = 0  # characters of the decoded recent tokens that were handed out
        self.holds = False
        """Whether the last token ended within a character, or with bytes that are none."""

    def hides(self, token: int) -> bool:
        """Whether a token has no text, and is between others as if it were not there."""
        return self._tokenizer.kind(token) in self._hidden or token in self._ends

    def push(self, token_ids: Iterable[int]) -> str:
        """Append `token_ids` and return the new text that is certain; may be empty."""
        self._recent += [token for token in token_ids if not self.hides(token)]
        if not self._recent or self._tokenizer.kind(self._recent[-1]) == "byte":
            return ""
        text = self._decode()
        held = self.holds = text.endswith(_REPLACEMENT)
        piece = text[self._emitted : len(text) - held]
        self._emitted += len(piece)
        if len(self._recent) > self._LONGEST:
            self._recent = self._recent[-self._ANCHOR :]
            self._emitted = len(self._decode()) - held
        return piece

    def flush(self) -> str:
        """End the text and return what was held back, unfinished characters as U+FFFD."""
        piece = self._decode()[self._emitted :]
        self._recent, self._emitted = [], 0
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._recent, skip_special_tokens=self._skip)


class TextOffsets:
    """Where in a text its tokens begin, in characters. A token that is a part of a character begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, start: int = 0, **shown: bool) -> None:
        """The first token begins at `start`. `shown`: as `IncrementalDecoder` was told to decode the text."""
        self._tokenizer, self._decoder = tokenizer, IncrementalDecoder(tokenizer, **shown)
        self._at = start
        self._run: list[int] = []
        """Bytes, each of them a token, whose text is held back until another token ends them."""

    def push(self, token: int) -> int:
        """Append `token` and return where it begins."""
        byte = self._tokenizer.byte(token)
        if byte is not None:
            self._run.append(token)
            self._decoder.push((token,))
            begun = sum(_begins_character(self._tokenizer.byte(one) or 0) for one in self._run)
            return self._at + max(begun - 1, 0)
        begin = self._at + (len(self._tokenizer.decode(self._run)) if self._run else 0)
        if self._decoder.hides(token):
            return begin
        held, self._run = self._decoder.holds and not self._run, []
        piece = self._decoder.push((token,))
        self._at += len(piece)
        return begin + (held and piece.startswith(_REPLACEMENT))  # what was held back is no character: this begins another one


def _begins_character(byte: int) -> bool:
    return byte & 0xC0 != 0x80
