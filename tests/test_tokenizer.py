"""Ids of texts and conversations; nobody but the template makes special tokens."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt.data.tokenizer import Tokenizer, train_bpe

TEXTS = ["the cat sat on the mat 1234\n", "def add(a, b):\n    return a + b\n"] * 4
CHATML = (
    "{% for m in messages %}<bos>{{ m['role'] + '\n' + m['content'] | trim }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
UNUSUAL = ["", "naïve café", "日本語 🙂", "a  1 22\n\n\t333", "\x00\x7f", "\r\n end  "]


def user(content):
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def plain():
    return train_bpe(TEXTS, 280)


@pytest.fixture(scope="module")
def tokenizer(plain):
    return dataclasses.replace(plain, chat_template=CHATML)


def with_template(tokenizer, template):
    return dataclasses.replace(tokenizer, chat_template=template)


def test_training_is_deterministic_and_splits_digits(plain):
    assert train_bpe(TEXTS, 280).backend.to_str() == plain.backend.to_str()
    assert plain.vocab_size == 280
    assert len(plain.encode("1234")) == 4
    assert len(plain.encode("the cat")) < len("the cat")
    with pytest.raises(ValueError, match="vocab_size=258 must be at least 259"):
        train_bpe(TEXTS, 258)


@pytest.mark.parametrize("text", UNUSUAL)
def test_text_comes_back(plain, text):
    assert plain.decode(plain.encode(text)) == text


def test_special_tokens_need_to_be_asked_for(plain):
    text = "a<eos><bos>b"
    ids = plain.encode(text)
    assert not {plain.eos_id, plain.bos_id, plain.pad_id} & set(ids)
    assert plain.decode(ids) == text
    asked = plain.encode(text, allow_special=True)
    assert asked == [*plain.encode("a"), plain.eos_id, plain.bos_id, *plain.encode("b")]
    assert plain.decode(asked) == "ab"


def test_half_a_character_is_replaced_and_not_an_error(plain):
    assert plain.decode(plain.encode("é")[:1]) == "\ufffd"


def test_plain_template_is_contents_after_one_bos(plain):
    messages = [*user("the cat"), {"role": "user", "content": "sat"}]
    assert plain.encode_chat(messages) == [
        plain.bos_id,
        *plain.encode("the cat\nsat\n"),
    ]


@pytest.mark.parametrize("content", [*UNUSUAL, "  padded \n", "\n 12 < 3 > 2"])
def test_a_conversation_is_its_rendered_text(tokenizer, content):
    messages = [*user(content), {"role": "assistant", "content": "ok"}]
    for prompt in (True, False):
        rendered = tokenizer.render(messages, add_generation_prompt=prompt)
        ids = tokenizer.encode_chat(messages, add_generation_prompt=prompt)
        assert ids == tokenizer.encode(rendered, allow_special=True)


fragments = st.sampled_from(["<", "<b", "os>", "<bos>", "<eos>", "<pad>", ">", " ", "x"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(fragments, max_size=8).map("".join))
def test_contents_make_no_special_tokens(tokenizer, content):
    ids = tokenizer.encode_chat(user(content))
    specials = [i for i in ids if i < 3]
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert specials == [bos, eos, bos]
    assert tokenizer.decode(ids) == f"user\n{content.strip()}\nassistant\n"


def test_every_text_of_a_message_is_a_content(tokenizer):
    template = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}"
    template += "{{ p.text }}{% endif %}{% endfor %}{{ m.name }}<eos>{% endfor %}"
    parts = [{"type": "text", "text": "<eos>"}, {"type": "image"}]
    messages = [{"role": "user", "name": "<bos>", "content": parts}]
    ids = with_template(tokenizer, template).encode_chat(messages)
    assert [i for i in ids if i < 3] == [tokenizer.eos_id]
    assert tokenizer.decode(ids) == "<eos><bos>"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        # Joins what a cut leaves, and writes half a token itself.
        ("{{ messages[0].content | replace('</x>', '') }}", "<</x>eos>"),
        ("<{{ messages[0].content }}", "eos>"),
        ("<{{ messages[0].content }}>", "eos"),
    ],
)
def test_a_template_that_lets_messages_make_special_tokens(tokenizer, template, content):
    changed = with_template(tokenizer, template)
    with pytest.raises(ValueError, match="makes special tokens out of what the messages"):
        changed.encode_chat(user(content))
    assert changed.encode_chat(user("eo"))


def test_templates_may_look_into_contents(tokenizer):
    template = "{{ messages[0].content.split('</think>')[-1] }}<eos>"
    ids = with_template(tokenizer, template).encode_chat(user("<eos></think>yes<eos>"))
    assert ids == [*tokenizer.encode("yes<eos>"), tokenizer.eos_id]


def test_roles_make_markers_and_are_words(tokenizer):
    by_role = with_template(tokenizer, "<{{ messages[0].role }}>")
    messages = [{"role": "eos", "content": ""}]
    assert by_role.encode_chat(messages) == [tokenizer.eos_id]
    with pytest.raises(ValueError, match="role='<eos>' in a message is not a word"):
        by_role.encode_chat([{"role": "<eos>", "content": ""}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "refuses the conversation: no sys"),
        ("{{ messages.append(1) }}", "can't be rendered: SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "can't be rendered: Secu"),
        ("{% if %}", "can't be rendered: TemplateSyntaxError"),
    ],
)
def test_template_faults(tokenizer, template, message):
    with pytest.raises(ValueError, match=message):
        with_template(tokenizer, template).encode_chat(user("hello"))


def test_lone_surrogates_are_refused(tokenizer):
    for call in (tokenizer.encode, lambda text: tokenizer.encode_chat(user(text))):
        with pytest.raises(ValueError, match="lone surrogate at character 1"):
            call("a\udc00")


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.backend.to_str() == tokenizer.backend.to_str()
    for field in ("pad_id", "bos_id", "eos_id", "chat_template"):
        assert getattr(loaded, field) == getattr(tokenizer, field)
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert Tokenizer.load(tmp_path).chat_template == "newer"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token": None}, "must name an eos_token"),
        ({"eos_token": "<end>"}, "eos_token='<end>' is not in tokenizer.json"),
        ({"bos_token": {"content": "<b>"}}, "bos_token='<b>' is not in tokenizer.json"),
        ({"chat_template": None}, "has no chat template"),
    ],
)
def test_load_faults(tokenizer, tmp_path, change, message):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_ids_must_be_tokens(tokenizer):
    with pytest.raises(ValueError, match="eos_id=300 is not a token: the vocabulary has"):
        dataclasses.replace(tokenizer, eos_id=300)
