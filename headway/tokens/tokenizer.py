"""Tokenizers and chat templates of Hugging Face model folders, without torch or transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headway.records.errors import ConfigurationError
from headway.records.tokens import TokenIds
from headway.tokens.messages import json_text

Template = Literal["raw", "chat"]
_LONG_TOKEN = 16  # characters; the average token of a text is shorter
_PIECE = 1 << 16  # characters encoded at a time
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2: these bytes stand for themselves
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Conversion of text to token ids and back, as the model folder's own files define it.

    Text is encoded once, on its way in; sampled tokens are never decoded and encoded again.
    """

    def __init__(
        self,
        backend: Backend,
        eos_ids: Sequence[int],
        *,
        pad_id: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "tokenizer",
    ) -> None:
        if not eos_ids:
            where = "eos_token in tokenizer_config.json, or eos_token_id in generation_config.json or config.json"
            raise ConfigurationError(f"{origin}: no end-of-sequence token; set {where}")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._origin = origin
        self.chat_template = chat_template  # its source; None: the folder has none
        self._special_tokens = dict(special_tokens or {})
        self.eos_id = eos_ids[0]
        self.stop_ids = tuple(dict.fromkeys(eos_ids))  # every id that ends a response; eos_id first
        self.pad_id = eos_ids[0] if pad_id is None else pad_id
        self.vocabulary_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        outside = [i for i in (*self.stop_ids, self.pad_id) if not 0 <= i < self.vocabulary_size]
        if outside:
            raise ConfigurationError(
                f"{origin}: end or padding token {outside[0]} is outside the vocabulary of {self.vocabulary_size}"
            )
        self._renders: dict[bool, Callable[..., str]] = {}  # with marks around generation blocks or without -> template

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and, for eos, generation_config.json and config.json.

        tokenizer.json alone defines how text is split and joined, whatever class tokenizer_config.json names. Raises
        ConfigurationError for a missing or unreadable file and when no eos is defined.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(_missing(folder, file))
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception for any malformed file
            raise ConfigurationError(f"{file}: not a readable tokenizer: {error}") from None
        settings = _json_object(folder / "tokenizer_config.json")
        _add_tokens(backend, settings, folder / "tokenizer_config.json")
        named = {**_json_object(folder / "special_tokens_map.json"), **settings}
        special = {name: text for name in _NAMED_TOKENS if (text := _token_text(named.get(name))) is not None}
        eos_ids = _token_id(backend, special.get("eos_token"), file)
        for name in ("generation_config.json", "config.json"):
            eos_ids += _id_list(_json_object(folder / name).get("eos_token_id"), folder / name)
        pad = _token_id(backend, special.get("pad_token"), file)
        return cls(
            backend,
            eos_ids,
            pad_id=pad[0] if pad else None,
            chat_template=_chat_template(folder, settings),
            special_tokens=special,
            origin=str(folder),
        )

    def encode(self, text: str, *, add_special_tokens: bool = False, most: int | None = None) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` lets the tokenizer's post-processor add its own (a bos).
        ``most``: number of ids the caller can use. A far longer text is encoded only until it surely exceeds that:
        the result is then more than twice as many ids of its beginning."""
        if most is not None and len(text) > _LONG_TOKEN * most:
            ids: list[int] = []
            for at in range(0, len(text), _PIECE):
                ids += self._backend.encode(text[at : at + _PIECE], add_special_tokens=False).ids
                if len(ids) > 2 * most:
                    return ids
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of ``text`` (no special tokens added), and each one's span of characters: [first, behind).

        Blanks that a token swallows without counting them belong to it; tokens for the bytes of one character all
        span that character.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        spans: list[tuple[int, int]] = []
        reached = 0
        for first, end in encoding.offsets:
            spans.append((min(first, reached), end))
            reached = max(reached, end)
        return encoding.ids, spans

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of token ids; special tokens are left out unless ``keep_special``."""
        return self._backend.decode(list(ids), skip_special_tokens=not keep_special)

    def vocabulary_bytes(self) -> list[bytes]:
        """Bytes of each id's text, special tokens' too, so that joined they are what `decode` makes into characters. A
        blank that a decoder strips from the start of a text stays, and so do those that WordPiece puts between words
        only when it decodes whole texts. Ids without a token: empty."""
        decoder = self._backend.decoder
        kind = b"" if decoder is None else decoder.__getstate__()
        added = {i: token.content.encode() for i, token in self._backend.get_added_tokens_decoder().items()}
        texts = [b""] * self.vocabulary_size
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i in added:
                texts[i] = added[i]
            elif b'"ByteLevel"' in kind:
                whole = all(c in _BYTE_LEVEL for c in token)
                texts[i] = bytes(_BYTE_LEVEL[c] for c in token) if whole else token.encode()
            elif b'"ByteFallback"' in kind and _BYTE_TOKEN.fullmatch(token):
                texts[i] = bytes([int(token[3:5], 16)])
            elif "▁".encode() in kind or b'"ByteFallback"' in kind:  # SentencePiece's: Metaspace, or Replace
                texts[i] = (token.replace("▁", " ") if "▁".encode() in kind else token).encode()
            else:
                texts[i] = self.decode([i], keep_special=True).encode()
        return texts

    def verbatim_tokens(self) -> dict[str, bool]:
        """Added tokens that are matched in the unnormalised text -> whether the text always splits there: special
        tokens that match whatever stands beside them."""
        added = (token for token in self._backend.get_added_tokens_decoder().values() if not token.normalized)
        return {token.content: token.special and not (token.lstrip or token.single_word) for token in added}

    def token(self, token_id: int) -> str | None:
        """The vocabulary's entry for an id; None for an unknown id."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def render(self, prompt: str | Sequence[Mapping[str, Any]], template: Template = "raw") -> TokenIds:
        """Prompt ids of a task: its text as it is ("raw"), or a user turn or conversation rendered by the folder's chat
        template ("chat"). Raises ConfigurationError."""
        if template == "raw":
            if not isinstance(prompt, str):
                raise ConfigurationError("template = 'raw' takes texts; a conversation needs 'chat'")
            return TokenIds(self.encode(prompt, add_special_tokens=True))
        if template != "chat":
            raise ConfigurationError(f"template = {template!r}: valid are 'raw' and 'chat'")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return TokenIds(self.encode(self.render_messages(messages)))

    def render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        marks: bool = False,
    ) -> str:
        """The chat template's text for ``messages``; ``variables``: additional template variables; ``marks``: around
        its ``{% generation %}`` blocks. Raises ConfigurationError when there is no template or it fails."""
        if self.chat_template is None:
            raise ConfigurationError(
                f"{self._origin}: no chat template (chat_template in tokenizer_config.json, or chat_template.jinja); "
                "use template 'raw'"
            )
        try:
            if marks not in self._renders:
                self._renders[marks] = _environment(marks).from_string(self.chat_template).render
            return self._renders[marks](
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError) as error:
            message = f"{self._origin}: the chat template fails: {error}"
            if "strftime_now" in str(error):
                message += "; templates get no date, or a resumed run's prompts would differ: write a fixed one into it"
            raise ConfigurationError(message) from None

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole conversation, and the spans of the template's ``{% generation %}`` blocks in it:
        [first character, behind the last). Without blocks: an empty list."""
        text = self.render_messages(messages, tools=tools, add_generation_prompt=False)
        if "generation" not in (self.chat_template or ""):
            return text, []
        marked = self.render_messages(messages, tools=tools, add_generation_prompt=False, marks=True)
        spans: list[tuple[int, int]] = []
        plain, opened = 0, -1
        for piece in _MARK.split(marked):
            if piece == _OPEN:
                opened = plain
            elif piece == _CLOSE:
                spans.append((opened, plain))
            else:
                plain += len(piece)
        if _MARK.sub("", marked) != text:
            raise ConfigurationError(
                f"{self._origin}: the chat template changes what its {{% generation %}} blocks hold after they end (a "
                "filter around them?), so it can't be told what the assistant wrote: put the filter inside"
            )
        return text, [span for span in spans if span[0] < span[1]]

    def is_open(self, token_id: int) -> bool:
        """Whether the text of this token may change with the next: it is part of a character."""
        token = self._backend.id_to_token(token_id) or ""
        return token_id in self.special_ids or bool(_BYTE_TOKEN.fullmatch(token))


class IncrementalDecoder:
    """Text of a growing response, with detection of stop strings.

    Invariant: ``text == tokenizer.decode(ids pushed so far)`` after every push, at a cost that does not grow with the
    response: text up to a token boundary that no later token can change is settled; only the rest is decoded again.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._stop = tuple(text for text in stop if text)
        self._reach = max((len(text) for text in self._stop), default=1) - 1
        self.settled = (
            ""  # what no further token can change: text of everything before the tail's anchor and of the anchor itself
        )
        self._tail: list[int] = []  # the anchor tokens, then those not settled
        self._anchor = 0  # how many of the tail's tokens are settled
        self._anchor_text = ""  # text of those: context that keeps a leading space of the next token
        self._open_text = ""  # text of the unsettled rest
        self.stopped: str | None = None  # the stop string that appeared first

    @property
    def text(self) -> str:
        return self.settled + self._open_text

    def push(self, token_id: int) -> bool:
        """Append a sampled token; True when a stop string is now in the text."""
        self._tail.append(token_id)
        whole = self._tokenizer.decode(self._tail, keep_special=self._keep_special)
        self._open_text = whole[len(self._anchor_text) :]
        if self._stop and self.stopped is None:
            self._search()
        if self._open_text and not whole.endswith("�") and not self._tokenizer.is_open(token_id):
            self.settled += self._open_text
            self._open_text = ""
            self._tail = self._tail[self._anchor :]
            self._anchor = len(self._tail)
            self._anchor_text = self._tokenizer.decode(self._tail, keep_special=self._keep_special)
        return self.stopped is not None

    def _search(self) -> None:
        window = self.settled[max(0, len(self.settled) - self._reach) :] + self._open_text
        found = [(at, text) for text in self._stop if (at := window.find(text)) >= 0]
        self.stopped = min(found)[1] if found else None


def _missing(folder: Path, file: Path) -> str:
    if not folder.is_dir():
        return f"no such folder: {folder}"
    message = f"no such file: {file}"
    if (best := folder / "best" / file.name).is_file():
        return f"{message}; {folder} is a run's folder, its model is {best.parent}"
    if other := [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]:
        message += (
            f"; {other[0]} alone is not read: transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) "
            "writes tokenizer.json out of it"
        )
    return message


def _add_tokens(backend: Backend, settings: Mapping[str, Any], file: Path) -> None:
    """Add the tokens that only tokenizer_config.json has (added to a model after its tokenizer.json was written)."""
    listed: Mapping[str, Mapping[str, Any]] = settings.get("added_tokens_decoder") or {}
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _token_text(dict(entry))
        if text is None or backend.token_to_id(text) is not None:
            continue
        options = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        special = bool(entry.get("special", False))
        (backend.add_special_tokens if special else backend.add_tokens)([AddedToken(text, special=special, **options)])
        if backend.token_to_id(text) != int(key):
            raise ConfigurationError(
                f"{file}: added_tokens_decoder gives {text!r} the id {key}, but tokenizer.json leaves it "
                f"{backend.token_to_id(text)}: the two files don't belong together"
            )


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{file}: a JSON object is needed, not {type(raw).__name__}")
    return raw


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _token_id(backend: Backend, text: str | None, file: Path) -> list[int]:
    if text is None:
        return []
    found = backend.token_to_id(text)
    if found is None:
        raise ConfigurationError(f"{file}: tokenizer_config.json names {text!r}, which is not in the vocabulary")
    return [found]


def _id_list(value: Any, file: Path) -> list[int]:
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigurationError(f"{file}: eos_token_id = {value!r}: an integer or a list of integers is needed")
    return list(ids)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The folder's chat template: a separate file wins over tokenizer_config.json, whose value is a text or a list of
    named texts."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = _json_object(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) else None


# Marks around a generation block's content: private-use characters, which no text has by accident.
_OPEN, _CLOSE = "\U0010f8a1\U0010f8a2", "\U0010f8a2\U0010f8a1"
_MARK = re.compile(f"({_OPEN}|{_CLOSE})")


class _Generation(Extension):
    """``{% generation %}`` encloses the assistant's text; plain rendering outputs its content alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGeneration(_Generation):
    """``{% generation %}`` with marks in the text at its beginning and end, wherever a macro or a loop puts it."""

    def parse(self, parser: Any) -> list[nodes.Node]:
        content = super().parse(parser)
        first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_OPEN, _CLOSE))
        return [first, *content, last]


def _environment(marks: bool) -> ImmutableSandboxedEnvironment:
    """The Jinja sandbox that chat templates expect: block trimming, loop controls, plain-JSON ``tojson``.

    Without ``strftime_now``: a prompt must be the same when its run resumes on another day. Templates with a default
    date (Llama 3's) use that. ``marks``: generation blocks are marked in the text.
    """

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_MarkedGeneration if marks else _Generation, loopcontrols]
    )
    environment.filters["tojson"] = json_text
    environment.globals["raise_exception"] = refuse
    return environment
