"""A tokenizer's chat template is found where transformers finds it, and one without is refused with what to do."""

from __future__ import annotations

import json

import pytest

from meshwright.data.chats.chat_format import find_template
from meshwright.errors import DataError


def folder_of(tmp_path, **files):
    for name, content in {"tokenizer.json": "{}", **files}.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return str(tmp_path)


def test_a_file_of_its_own_comes_first(tmp_path):
    config = {"chat_template": "b", "bos_token": None, "eos_token": {"content": "<e>"}, "add_bos_token": True}
    tokens = {"bos_token": "<b>", "eos_token": "<f>", "image_token": "<i>"}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": tokens}
    folder = folder_of(tmp_path, **files)
    assert find_template(folder).template == "b"
    folder_of(tmp_path, **{"chat_template.jinja": "ä"})
    found = find_template(str(tmp_path / "tokenizer.json"))
    assert found.template == "ä" and found.template_path == tmp_path / "chat_template.jinja"
    assert found.special_tokens == {"eos_token": "<e>", "image_token": "<i>"}


def test_of_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert find_template(folder_of(tmp_path, **{"tokenizer_config.json": {"chat_template": named}})).template == "d"
    folder = folder_of(tmp_path, **{"tokenizer_config.json": {"chat_template": named[:1]}})
    with pytest.raises(DataError, match="of the name default"):
        find_template(folder)


def test_older_files_have_it_too(tmp_path):
    assert find_template(folder_of(tmp_path, **{"chat_template.json": {"chat_template": "o"}})).template == "o"


def test_without_one_it_is_refused(tmp_path):
    with pytest.raises(DataError, match="data.tokenizer = bytes has no chat template") as caught:
        find_template("bytes")
    assert caught.value.fix.startswith("data.tokenizer=<the folder")
    with pytest.raises(DataError, match=f"{tmp_path} has no chat template") as caught:
        find_template(folder_of(tmp_path))
    assert f"write the template to {tmp_path}/chat_template.jinja" in caught.value.fix


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_damaged_file_is_named(tmp_path, content):
    folder_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match="tokenizer_config.json can't be read"):
        find_template(str(tmp_path))
