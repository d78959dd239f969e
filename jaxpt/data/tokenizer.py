"""Text to token ids and back, and conversations by a chat template."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

PLAIN_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
_TOKENIZER_FILE, _CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A `tokenizers` tokenizer, its special tokens, and its chat template (jinja2).

    bos_id: put before a conversation, or None where the template does it or nothing does.
    """

    backend: tokenizers.Tokenizer
    pad_id: int
    eos_id: int
    bos_id: int | None
    chat_template: str

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: special tokens written in it are only text.

        So nobody can end a turn or a message by writing its marker into a task.
        """
        pieces = []
        for piece in self._split_at_specials(text):
            pieces += self.backend.encode(piece, add_special_tokens=False).ids
        return pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, invalid UTF-8 replaced."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins.

        Special tokens are those of the template; contents are encoded as plain text.
        """
        marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks)]
        rendered = _environment().from_string(self.chat_template)
        text = rendered.render(
            messages=marked,
            add_generation_prompt=True,
            bos_token=self._token(self.bos_id),
            eos_token=self._token(self.eos_id),
        )
        ids = [] if self.bos_id is None else [self.bos_id]
        for piece in re.split("(\ue000\\d+\ue001)", text):
            if piece in marks:
                # The template's text and a content meet at a boundary of tokens.
                ids += self.encode(messages[marks.index(piece)]["content"])
            elif piece:
                ids += self.backend.encode(piece, add_special_tokens=False).ids
        return ids

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self.backend.id_to_token(token_id) or ""

    def _split_at_specials(self, text: str) -> Iterable[str]:
        """Cuts special tokens' spellings in two, so that they are not recognised."""
        specials = [
            re.escape(token.content)
            for token in self.backend.get_added_tokens_decoder().values()
            if token.special
        ]
        if not specials:
            yield text
            return
        start = 0
        for match in re.finditer("|".join(specials), text):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        yield text[start:]

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as Hugging Face has them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / _TOKENIZER_FILE))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": self._token(self.pad_id),
            "eos_token": self._token(self.eos_id),
            "bos_token": self._token(self.bos_id) or None,
            "chat_template": self.chat_template,
        }
        # Last, so that its presence says that the folder is whole.
        (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    @staticmethod
    def load(folder: Path) -> "Tokenizer":
        """Reads what `save` or a Hugging Face model folder holds."""
        config = json.loads((folder / _CONFIG_FILE).read_text())
        backend = tokenizers.Tokenizer.from_file(str(folder / _TOKENIZER_FILE))

        def token_id(name: str) -> int | None:
            token = config.get(name)
            token = token["content"] if isinstance(token, dict) else token
            return None if token is None else backend.token_to_id(token)

        eos_id, pad_id = token_id("eos_token"), token_id("pad_token")
        if eos_id is None or config.get("chat_template") is None:
            raise ValueError(
                f"{folder / _CONFIG_FILE} must name an eos_token of the vocabulary and a "
                "chat_template."
            )
        return Tokenizer(
            backend=backend,
            pad_id=eos_id if pad_id is None else pad_id,
            eos_id=eos_id,
            bos_id=token_id("bos_token"),
            chat_template=config["chat_template"],
        )


def _environment() -> jinja2.Environment:
    """As `transformers` renders templates: sandboxed, blocks trimmed."""

    def raise_exception(message: str):
        raise ValueError(f"The chat template refuses the conversation: {message}")

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    return environment


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A small byte-level BPE with single digits as tokens; the same for the same texts."""
    specials = ["<pad>", "<bos>", "<eos>"]
    smallest = len(specials) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least {smallest}: every byte is a token."
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
    pad_id, bos_id, eos_id = range(len(specials))  # the trainer puts them first
    return Tokenizer(
        backend=backend,
        pad_id=pad_id,
        bos_id=bos_id,
        eos_id=eos_id,
        chat_template=PLAIN_TEMPLATE,
    )
