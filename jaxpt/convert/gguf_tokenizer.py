"""The tokenizer that a GGUF file carries in its metadata (`tokenizer.ggml.*`)."""

import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jaxpt.convert.gguf import GGUFFile
from jaxpt.convert.source import CheckpointError
from jaxpt.data.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."


class _TokenType(enum.IntEnum):
    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """Every digit alone, then GPT-2's words."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    """Words with one mark before them; digits by threes; marks with the line's end."""
    words = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# How a text is cut into words, by llama.cpp's name for it (tokenizer.ggml.pre).
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": _llama3,
}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word of the vocabulary is a token, merged or not


def from_gguf(path: Path) -> Tokenizer:
    """Reads a GGUF file's header.

    Raises:
      CheckpointError: it holds no byte-level BPE, or not all that a Tokenizer needs.
    """
    return from_metadata(path, GGUFFile(path).metadata)


def from_metadata(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """See `from_gguf`; path is for messages only."""

    def get(name: str) -> Any:
        if name not in metadata:
            raise CheckpointError(f"{path} has no {name} in its metadata.")
        return metadata[name]

    model, pre = get(_PREFIX + "model"), get(_PREFIX + "pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: a tokenizer of model={model!r}, pre={pre!r} can't be read; only "
            f"byte-level BPE (model='gpt2') with pre in {sorted(_PRE_TOKENIZERS)} can."
        )
    tokens, types = get(_PREFIX + "tokens"), get(_PREFIX + "token_type")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise CheckpointError(
            f"{path}: {len(tokens)} tokens, {len(vocabulary)} of them different, and "
            f"{len(types)} token types: these numbers must be equal."
        )
    # A merge is two tokens and a space; tokens have none, since bytes are spelled.
    merges = [tuple(merge.split(" ")) for merge in get(_PREFIX + "merges")]
    for number, merge in enumerate(merges):
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise CheckpointError(
                f"{path}: merge {number} is {' '.join(merge)!r}, which does not join "
                "two tokens of the vocabulary to a third."
            )
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_TokenType.CONTROL, True), (_TokenType.USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, token_type in zip(tokens, types, strict=True)
                if token_type == kind
            ]
        )
    eos_id = get(_PREFIX + "eos_token_id")
    try:
        return Tokenizer(
            backend=backend,
            pad_id=metadata.get(_PREFIX + "padding_token_id", eos_id),
            eos_id=eos_id,
            bos_id=metadata.get(_PREFIX + "bos_token_id"),
            chat_template=get("tokenizer.chat_template"),
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
