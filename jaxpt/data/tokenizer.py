"""Text to token ids and back, and conversations by a chat template.

Special tokens are how a model knows who speaks, so only two things make them: a
template, and a caller who asks for it (`encode(text, allow_special=True)`). In every
other text their spelling is only text.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

PLAIN_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
_TOKENIZER_FILE, _CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"  # where newer transformers keep the template
# Put into a special token's spelling so that it is not one. A lone surrogate: no valid
# text holds it, so taking it out again changes nothing else.
_BREAK = "\udc00"
_OWN_WORDS = ("role", "type")

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A byte-level `tokenizers` tokenizer, its special tokens and its chat template.

    bos_id: what the template gets as `bos_token`; nothing else puts it anywhere.
    pad_id: fills rows and is never read; the end token's id where a model has no other.
    """

    backend: tokenizers.Tokenizer
    pad_id: int
    eos_id: int
    bos_id: int | None
    chat_template: str

    def __post_init__(self):
        for name in ("pad_id", "eos_id", "bos_id"):
            token_id = getattr(self, name)
            if token_id is not None and self.backend.id_to_token(token_id) is None:
                raise ValueError(
                    f"{name}={token_id!r} is not a token: the vocabulary has "
                    f"{self.vocab_size}."
                )

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of a text; nothing is put before or after it.

        allow_special: take spellings of special tokens as these tokens. For text that
        the program wrote itself; other text could end a turn or a message with them.
        """
        backend = self.backend if allow_special else self._plain_backend
        return backend.encode(_valid(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens left out, invalid UTF-8 replaced."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the template writes it, to be read by people."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._token(self.bos_id),
                eos_token=self._token(self.eos_id),
                pad_token=self._token(self.pad_id),
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"The chat template can't be rendered: {type(error).__name__}: {error}."
            ) from error

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins.

        The same as encoding `render(messages)`, except that messages can't make special
        tokens. Templates look into contents (trim them, cut the reasoning off), so they
        are rendered as they are, with the spellings of special tokens broken; special
        tokens are then looked for in the result, and what lies between them is encoded
        as plain text. Roles and types are the caller's own words: templates compare
        them and make markers of them.

        Raises:
          ValueError: the template refuses the conversation, or it joins pieces of the
            messages to special tokens.
        """
        rendered = self._render_changed(
            messages,
            # Wherever a special token begins and, at the end of a text, might begin.
            lambda text: self._openings.sub(rf"\g<0>{_BREAK}", text),
            add_generation_prompt,
        )
        found = list(self._specials.finditer(rendered))
        # A template may cut something out and so join what was apart, or write half a
        # special token itself. The tokens must be those that it makes of messages whose
        # every character stands alone.
        alone = self._render_changed(
            messages, lambda text: _BREAK.join([*text, ""]), add_generation_prompt
        )
        expected = [match.lastgroup for match in self._specials.finditer(alone)]
        if [match.lastgroup for match in found] != expected:
            raise ValueError(
                "The chat template makes special tokens out of what the messages hold. "
                "Remove the special tokens' spellings from the messages."
            )
        ids, start = [], 0
        for match in found:
            ids += self.encode(rendered[start : match.start()].replace(_BREAK, ""))
            ids.append(int(match.lastgroup[1:]))
            start = match.end()
        return ids + self.encode(rendered[start:].replace(_BREAK, ""))

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as Hugging Face has them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _TOKENIZER_FILE).write_text(self.backend.to_str(pretty=True))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": self._token(self.pad_id),
            "eos_token": self._token(self.eos_id),
            "bos_token": self._token(self.bos_id) or None,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
        }
        # Last, so that its presence says that the folder is whole.
        (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    @staticmethod
    def load(folder: Path) -> "Tokenizer":
        """Reads what `save` or a Hugging Face model folder holds."""
        for name in (_TOKENIZER_FILE, _CONFIG_FILE):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} has no {name}: it holds no tokenizer.")
        config = json.loads((folder / _CONFIG_FILE).read_text())
        backend = tokenizers.Tokenizer.from_file(str(folder / _TOKENIZER_FILE))

        def token_id(name: str) -> int | None:
            token = config.get(name)
            token = token["content"] if isinstance(token, dict) else token
            found = None if token is None else backend.token_to_id(token)
            if token is not None and found is None:
                raise ValueError(
                    f"{folder / _CONFIG_FILE}: {name}={token!r} is not in "
                    f"{_TOKENIZER_FILE}."
                )
            return found

        template = config.get("chat_template")
        if (folder / _TEMPLATE_FILE).is_file():
            template = (folder / _TEMPLATE_FILE).read_text()
        if not isinstance(template, str):
            raise ValueError(
                f"{folder} has no chat template (one text in {_CONFIG_FILE} or in "
                f"{_TEMPLATE_FILE}); write the one that the model was trained with."
            )
        eos_id, pad_id = token_id("eos_token"), token_id("pad_token")
        if eos_id is None:
            raise ValueError(f"{folder / _CONFIG_FILE} must name an eos_token.")
        return Tokenizer(
            backend=backend,
            pad_id=eos_id if pad_id is None else pad_id,
            eos_id=eos_id,
            bos_id=token_id("bos_token"),
            chat_template=template,
        )

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self.backend.id_to_token(token_id) or ""

    def _render_changed(
        self,
        messages: Sequence[Message],
        change: Callable[[str], str],
        add_generation_prompt: bool,
    ) -> str:
        """Renders the messages with every text in them changed, but for _OWN_WORDS."""

        def walk(value: Any, name: str = "") -> Any:
            match value:
                case str() if name in _OWN_WORDS:
                    if not re.fullmatch(r"[\w-]+", value):
                        raise ValueError(f"{name}={value!r} in a message is not a word.")
                    return value
                case str():
                    return change(_valid(value))
                case Mapping():
                    return {key: walk(item, key) for key, item in value.items()}
                case list() | tuple():
                    return [walk(item) for item in value]
            return value

        return self.render(walk(messages), add_generation_prompt=add_generation_prompt)

    @functools.cached_property
    def _special_tokens(self) -> dict[int, tokenizers.AddedToken]:
        added = self.backend.get_added_tokens_decoder()
        return {number: token for number, token in added.items() if token.special}

    @functools.cached_property
    def _specials(self) -> re.Pattern:
        """Finds special tokens, longest first; group `t7` is the token with id 7."""

        def pattern(number: int, token: tokenizers.AddedToken) -> str:
            left, right = (r"\s*" * side for side in (token.lstrip, token.rstrip))
            return f"{left}(?P<t{number}>{re.escape(token.content)}(?!{_BREAK})){right}"

        longest_first = sorted(
            self._special_tokens.items(), key=lambda item: -len(item[1].content)
        )
        return re.compile("|".join(pattern(*item) for item in longest_first) or "(?!)")

    @functools.cached_property
    def _openings(self) -> re.Pattern:
        """Finds where a special token begins or, at the end of a text, might begin."""
        openings = {token.content[:2] for token in self._special_tokens.values()}
        patterns = [
            rf"{re.escape(text[:1])}(?={re.escape(text[1:])}|\s*\Z)"
            for text in sorted(openings)
        ]
        return re.compile("|".join(patterns) or "(?!)")

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer without an eye for special tokens."""
        plain = tokenizers.Tokenizer.from_str(self.backend.to_str())
        plain.encode_special_tokens = True
        for number, token in list(self._special_tokens.items())[:1]:
            whole = self.encode(token.content + "a b", allow_special=True)
            pieces = [number, *plain.encode("a b", add_special_tokens=False).ids]
            if whole != pieces:
                raise ValueError(
                    f"This tokenizer makes {whole} of {token.content + 'a b'!r}, but "
                    f"{pieces} of its parts. Only byte-level tokenizers are supported."
                )
        return plain

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self.chat_template)


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "The text is not valid Unicode: it has a lone surrogate at character "
            f"{error.start}. Decode its source with errors='replace'."
        ) from None
    return text


def _environment() -> jinja2.Environment:
    """As `transformers` renders templates: sandboxed, blocks trimmed."""

    def raise_exception(message: str):
        raise ValueError(f"The chat template refuses the conversation: {message}")

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = to_json  # jinja2's own escapes for HTML
    return environment


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with single digits as tokens; the same for the same texts."""
    specials = ["<pad>", "<bos>", "<eos>"]
    smallest = len(specials) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least {smallest}: every byte is one."
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return Tokenizer(
        backend=backend,
        pad_id=specials.index("<pad>"),
        bos_id=specials.index("<bos>"),
        eos_id=specials.index("<eos>"),
        chat_template=PLAIN_TEMPLATE,
    )
