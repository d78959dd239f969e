"""Tokens and text: what goes in comes out, and markers in a task stay text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.data.tokenizer import Tokenizer, train_bpe

TEXTS = ["def f(x):\n    x = x + 12\n    return x\n"] * 20 + ["add 3, then square it."]
TOKENIZER = train_bpe(TEXTS, 300)


@given(st.text())
def test_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_training_is_deterministic_and_digits_are_single():
    again = train_bpe(TEXTS, 300)
    assert again.backend.to_str() == TOKENIZER.backend.to_str()
    assert len(TOKENIZER.encode("2026")) == 4
    assert TOKENIZER.vocab_size <= 300


def test_special_tokens_in_a_task_are_only_text():
    specials = {TOKENIZER.pad_id, TOKENIZER.eos_id, TOKENIZER.bos_id}
    text = "a <eos> b <pad><bos>"
    assert not specials & set(TOKENIZER.encode(text))
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    ids = TOKENIZER.encode_chat([{"role": "user", "content": text}])
    assert ids[0] == TOKENIZER.bos_id and not specials & set(ids[1:])


def test_a_template_makes_its_own_markers():
    template = (
        "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>\n"
        "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
    )
    tokenizer = Tokenizer(
        backend=TOKENIZER.backend,
        pad_id=0,
        eos_id=TOKENIZER.eos_id,
        bos_id=None,
        chat_template=template,
    )
    ids = tokenizer.encode_chat(
        [{"role": "system", "content": "x"}, {"role": "user", "content": "<eos>"}]
    )
    assert ids.count(TOKENIZER.bos_id) == 3 and ids.count(TOKENIZER.eos_id) == 2
    assert tokenizer.decode(ids) == "system\nx\nuser\n<eos>\nassistant\n"


def test_saved_and_loaded_is_the_same(tmp_path):
    TOKENIZER.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("f(12)") == TOKENIZER.encode("f(12)")
    assert (loaded.pad_id, loaded.bos_id, loaded.eos_id) == (
        TOKENIZER.pad_id,
        TOKENIZER.bos_id,
        TOKENIZER.eos_id,
    )
    assert loaded.chat_template == TOKENIZER.chat_template


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size=100 must be at least 259"):
        train_bpe(TEXTS, 100)
