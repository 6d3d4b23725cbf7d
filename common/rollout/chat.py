"""ChatTokenizer: text to token ids and back for multi-turn episodes, on a tokenizer and chat template in Hugging Face form.

The folder it loads and saves (tokenizer.json, tokenizer_config.json, chat template) is the one transformers' AutoTokenizer takes,
and `encode_prompt` gives the ids of apply_chat_template. What the agent sampled is never encoded again: between two turns only the
ids that the template puts after an agent's turn are appended. They are found from the template itself, by rendering a placeholder
turn and taking what follows. A template for which that cannot work is refused at construction: the agent's turn must end with one
special token, in the middle of a chat as at its end, and the observation must appear in the text.

As in transformers, special tokens spelled out in an observation become special tokens: an environment that passes on text from
strangers must remove them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, UNK, SYSTEM, USER, AGENT, END = "<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
WORD_SPECIAL_TOKENS = (PAD, UNK, SYSTEM, USER, AGENT, END)

WORD_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}<|system|> {{ message.content }} "
    "{%- elif message.role == 'user' -%}<|user|> {{ message.content }} "
    "{%- elif message.role == 'assistant' -%}<|assistant|> {{ message.content }} <|end|> "
    "{%- else -%}{{ raise_exception('unknown role ' + message.role) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)

_PLACEHOLDER_TURN = "PLACEHOLDERTURN"
_PLACEHOLDER_OBSERVATION = "PLACEHOLDEROBSERVATION"
_MAX_CACHED_OBSERVATIONS = 8192  # short observations recur; rendering and encoding one costs more than the environment's step

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # how tokenizers with byte fallback write a single byte


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character stands for in a byte-level vocabulary: printable ones themselves, the others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()

Message = dict[str, str]


class _GenerationTag(jinja2.ext.Extension):
    """Lets templates mark the agent's text with {% generation %} ... {% endgeneration %}; the tag itself renders nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _compile_template(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


class ChatTokenizer:
    """See the module. Make one with `from_vocabulary` or `load`."""

    def __init__(self, *, tokenizer: Tokenizer, template: str, settings: dict[str, object]) -> None:
        """
        Args:
            settings: the content of tokenizer_config.json without the chat template.

        Raises:
            ValueError: the template does not compile, or an agent's turn cannot be followed in token ids (says why).
        """
        self._tokenizer = tokenizer
        self._template_text = template
        self._settings = settings
        self._special_tokens = _named_special_tokens(settings)
        self._added_ids = set(tokenizer.get_added_tokens_decoder())
        self._special_ids = {idx for idx, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        try:
            self._template = _compile_template(template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._end_token_id = self._find_end_token_id()
        self.stop_token_ids = self._find_stop_token_ids()
        self.pad_token_id = self._find_pad_token_id()
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._encode_between_turns = functools.lru_cache(_MAX_CACHED_OBSERVATIONS)(self._encode_between_turns_uncached)
        self.encode_observation(_PLACEHOLDER_OBSERVATION, previous_turn_ended=False)

    @classmethod
    def from_vocabulary(cls, words: Sequence[str]) -> ChatTokenizer:
        """A tokenizer whose tokens are `words`, separated by white space in text, after six special tokens.

        Raises:
            ValueError: a word is empty, holds white space, occurs twice, or contains a special token.
        """
        _check_words(words)
        ids = {word: idx for idx, word in enumerate((*WORD_SPECIAL_TOKENS, *words))}
        tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in WORD_SPECIAL_TOKENS])
        settings: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "unk_token": UNK,
            "eos_token": END,
            "additional_special_tokens": [SYSTEM, USER, AGENT],
            "clean_up_tokenization_spaces": False,
        }
        return cls(tokenizer=tokenizer, template=WORD_TEMPLATE, settings=settings)

    @classmethod
    def load(cls, folder: str | Path) -> ChatTokenizer:
        """Read a folder in Hugging Face form.

        Raises:
            ValueError: a file is missing or unreadable, there is no chat template, or the template is refused.
        """
        folder = Path(folder)
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        settings = _read_settings(folder / "tokenizer_config.json")
        in_settings = settings.pop("chat_template", None)
        template_path = folder / "chat_template.jinja"
        template = template_path.read_text(encoding="utf-8") if template_path.exists() else _default_template(in_settings)
        if template is None:
            raise ValueError(
                f"{folder} has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json"
            )
        try:
            return cls(tokenizer=tokenizer, template=template, settings=settings)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into `folder`, made if need be; files of the same names are replaced."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(self._settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        (folder / "chat_template.jinja").write_text(self._template_text, encoding="utf-8")

    def encode_prompt(self, system_prompt: str | None, observation: str) -> list[int]:
        """Ids of the first prompt: system prompt, observation, and the head of the agent's turn."""
        messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        return self._encode(self._render([*messages, {"role": "user", "content": observation}], add_generation_prompt=True))

    def encode_observation(self, observation: str, *, previous_turn_ended: bool) -> list[int]:
        """Ids between the agent's last sampled token and its next turn; the agent wrote none of them, so they carry no loss.

        Args:
            previous_turn_ended: the last sampled token is one of `stop_token_ids`. If not (the turn was cut by length), the missing
                end-of-turn token comes first.
        """
        token_ids = self._encode_between_turns(observation)
        return list(token_ids[1:]) if previous_turn_ended else list(token_ids)

    def encode_turn(self, text: str) -> list[int]:
        """Ids of a whole turn written for the agent (a demonstration), the end-of-turn token included."""
        return [*self._encode(text), self._end_token_id]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a whole chat and the head of the agent's next turn. Raises ValueError if the template refuses the messages."""
        return self._encode(self._render(list(messages), add_generation_prompt=True))

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text that is continued, with what the tokenizer puts at a text's beginning."""
        return self._tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which may be a part of a character only; of ids beyond the vocabulary, nothing."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id not in self._added_ids:
            if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            if _BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(token[3:5])
        return self.decode([token_id], skip_special_tokens=False).encode()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template cannot render the turns ({roles}): {error}") from error

    def _text_after_turn(self, *, next_observation: str | None) -> str:
        """What the template writes behind an agent's turn: up to the next turn's head, or to the end of the chat."""
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _PLACEHOLDER_TURN}]
        if next_observation is not None:
            messages.append({"role": "user", "content": next_observation})
        text = self._render(messages, add_generation_prompt=next_observation is not None)
        _, found, suffix = text.partition(_PLACEHOLDER_TURN)
        if not found:
            raise ValueError("the chat template leaves out an earlier turn of the agent, so turns cannot be concatenated")
        return suffix

    def _split_at_end_token(self, suffix: str) -> list[int]:
        """Ids of `suffix` from its first special token on.

        Raises:
            ValueError: something other than white space stands before that token, or there is none.
        """
        token_ids = self._encode(suffix)
        for idx, token_id in enumerate(token_ids):
            if token_id in self._special_ids:
                return token_ids[idx:]
            if self._tokenizer.decode([token_id]).strip():
                break
        raise ValueError(
            f"the chat template writes {suffix!r} after an agent's turn, which does not start with a special token: the end of a "
            "turn could not be seen in sampled ids; end the turn with a token that tokenizer.json marks as special"
        )

    def _find_end_token_id(self) -> int:
        between = self._split_at_end_token(self._text_after_turn(next_observation=_PLACEHOLDER_OBSERVATION))[0]
        last = self._split_at_end_token(self._text_after_turn(next_observation=None))[0]
        if between != last:
            names = [self._tokenizer.id_to_token(idx) for idx in (between, last)]
            raise ValueError(
                f"the chat template ends an agent's turn with {names[0]} before another turn but with {names[1]} at the end"
            )
        return between

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        eos = self._special_tokens.get("eos_token")
        eos_id = None if eos is None else self._tokenizer.token_to_id(eos)
        if eos is not None and eos_id is None:
            raise ValueError(f"eos_token={eos!r} of tokenizer_config.json is not in tokenizer.json")
        return (self._end_token_id,) if eos_id in (None, self._end_token_id) else (self._end_token_id, eos_id)

    def _find_pad_token_id(self) -> int:
        """Padding is masked wherever it is used, so without a pad token any id will do: the end of turn."""
        pad = self._special_tokens.get("pad_token")
        pad_id = None if pad is None else self._tokenizer.token_to_id(pad)
        return self._end_token_id if pad_id is None else pad_id

    def _encode_between_turns_uncached(self, observation: str) -> tuple[int, ...]:
        suffix = self._text_after_turn(next_observation=observation)
        if observation.strip() not in suffix:
            raise ValueError(f"the chat template changes the observation: {observation!r} became {suffix!r}")
        return tuple(self._split_at_end_token(suffix))


def _check_words(words: Sequence[str]) -> None:
    seen: set[str] = set()
    for word in words:
        if not word or word.split() != [word]:
            raise ValueError(f"vocabulary word {word!r} is empty or holds white space; words are separated by white space in text")
        if word in seen:
            raise ValueError(f"vocabulary word {word!r} occurs twice; list each word once")
        for token in WORD_SPECIAL_TOKENS:
            if token in word:
                raise ValueError(f"vocabulary word {word!r} contains the special token {token}; rename the word")
        seen.add(word)


def _named_special_tokens(settings: dict[str, object]) -> dict[str, str]:
    """bos_token, eos_token, ... as templates see them; Hugging Face stores each as a string or as a dict with `content`."""
    named = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise ValueError(f"{path} does not exist; save the tokenizer in its fast form (tokenizer.json)")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error


def _read_settings(path: Path) -> dict[str, object]:
    if not path.exists():
        raise ValueError(f"{path} does not exist; it names the special tokens")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a JSON {type(settings).__name__}, not an object")
    return settings


def _default_template(chat_template: object) -> str | None:
    """The template of tokenizer_config.json: one text, or a list of named ones of which "default" is meant."""
    if isinstance(chat_template, str):
        return chat_template
    if isinstance(chat_template, list):
        for entry in chat_template:
            if isinstance(entry, dict) and entry.get("name") == "default":
                return str(entry["template"])
    return None
