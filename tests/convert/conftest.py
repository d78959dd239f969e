"""One tiny checkpoint of random numbers, as each format has it."""

import pytest

from tests import tiny_checkpoints as tiny


@pytest.fixture(scope="module")
def params():
    return tiny.random_params(tiny.CONFIG)


@pytest.fixture(scope="module")
def tensors(params):
    return tiny.hugging_face_tensors(params)


@pytest.fixture(scope="module")
def gguf_tensors(tensors):
    return tiny.gguf_tensors(tensors, tiny.CONFIG)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tiny_tokenizer()
