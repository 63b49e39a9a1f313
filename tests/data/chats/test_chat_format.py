"""Conversations as tokens: of three templates, token by token, only what the assistant says counts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.chats.chat_format import ChatFormat, Conversation, find_template, in_spans
from meshwright.errors import DataError
from tests.data.chats.formats import CHATML, REWRITES, TAGGED, TEMPLATES, build, chat, parts

pytest.importorskip("tokenizers")

SAID = [
    chat("What is two and two?", "It is four."),
    chat("a", "b", "c", "d", "e"),
    chat("ä ö ü 漢字", "🦊 é\u0301 漢字 \U0001f469\u200d\U0001f680", "ok?", "🦊🦊"),
    chat("Hi", "Hello\n", system=""),
    chat("Hi", "\nline breaks\n\n around \n", "\n", " \n x"),
    chat("", "", system="The quick brown fox"),
    [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, *({"role": "assistant", "content": c} for c in "bc")],
    chat("<|im_end|> in a text is one", "The token <|im_end|> ends a turn"),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: build(folder / name, template) for name, template in TEMPLATES.items()}


def encoded(tokenizer, *chats):
    chats = [Conversation(messages, f"x.jsonl:{n}", None) for n, messages in enumerate(chats, start=1)]
    return ChatFormat(str(tokenizer.folder)).encode_batch(chats)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("number", range(len(SAID)))
def test_only_the_tokens_of_the_assistant_count(tokenizers, name, number):
    (found,) = encoded(tokenizers[name], SAID[number])
    assert found.counts.tolist() == tokenizers[name].mask(found.ids.tolist(), parts(name, SAID[number]))


def test_of_a_known_text_each_token(tokenizers):
    tokenizer = tokenizers["chatml"]
    (found,) = encoded(tokenizer, chat("a", "bc", "d", "e"))
    texts = [tokenizer.token_bytes[i].decode() for i in found.ids]
    assert texts == ["<|im_start|>", "user", "\n", "a", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n", "b",
                     "c", "<|im_end|>", "\n", "<|im_start|>", "user", "\n", "d", "<|im_end|>", "\n", "<|im_start|>",
                     "assistant", "\n", "e", "<|im_end|>", "\n"]  # fmt: skip
    assert np.flatnonzero(found.counts).tolist() == [9, 10, 11, 22, 23]


def test_there_is_one_begin_of_text(tokenizers):
    (found,) = encoded(tokenizers["llama"], chat("a", "b", system="s"))
    assert found.ids[0] == 3 and (found.ids == 3).sum() == 1


contents = st.text(st.characters(exclude_characters="\0\ufdd0\ufdd1", exclude_categories=["Cs"]), max_size=12)


@given(texts=st.lists(contents, min_size=2, max_size=6), system=st.none() | contents)
def test_any_text_is_counted_by_the_bytes_of_its_tokens(tokenizers, texts, system):
    messages = chat(*texts, system=system)
    for name, tokenizer in tokenizers.items():
        (found,) = encoded(tokenizer, messages)
        assert found.counts.tolist() == tokenizer.mask(found.ids.tolist(), parts(name, messages))


def test_a_token_on_a_border_counts_and_one_without_characters_is_where_it_is():
    offsets = np.array([[0, 3], [3, 5], [5, 5], [5, 8], [8, 8], [8, 9]])
    assert in_spans(offsets, [(4, 8)]).tolist() == [False, True, True, True, False, False]
    assert in_spans(offsets, [(8, 9)]).tolist() == [False, False, False, False, True, True]
    assert not in_spans(offsets, []).any()


def test_a_template_that_rewrites_history_is_refused(tmp_path):
    tokenizer = build(tmp_path, REWRITES)
    assert encoded(tokenizer, chat("A", "b"))
    with pytest.raises(DataError) as caught:
        encoded(tokenizer, chat("A", "b"), chat("A", "b", "C", "d"))
    error = caught.value
    assert "writes message 2 in another way once messages follow it, of x.jsonl:2" in error.what
    assert "{% generation %}" in error.fix and "chat_template.jinja" in error.fix


def test_a_generation_prompt_that_a_turn_does_not_begin_with_is_refused(tmp_path):
    tokenizer = build(tmp_path, CHATML.replace("assistant\\n' }}\n{%- endif", "assistant\\n<think>' }}\n{%- endif"))
    with pytest.raises(DataError, match="generation prompt is not how it begins message 2"):
        encoded(tokenizer, chat("A", "b"))


REFUSED = {
    "it raises": ("{{ raise_exception('roles must alternate') }}", "refuses x.jsonl:1: roles must alternate"),
    "it lacks something": ("{{ messages[7].content }}", "refuses x.jsonl:1"),
    "it leaves the sandbox": ("{{ messages.append(1) }}", "refuses x.jsonl:1"),
    "nothing is generated": (TAGGED.replace("'assistant' %}", "'bot' %}"), "no token of x.jsonl:1 counts"),
    "it is none": ("{% for message in messages %}", "is no chat template"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_fails_is_named_with_the_conversation(tmp_path, name):
    template, says = REFUSED[name]
    with pytest.raises(DataError) as caught:
        encoded(build(tmp_path, template), chat("a", "b"))
    assert says in caught.value.what and "chat_template.jinja" in caught.value.where


def test_templates_see_what_they_see_in_transformers(tmp_path):
    template = (
        "{%- for m in messages if m.role != 'system' %}{% if loop.index > 9 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ tools is none }}{{ eos_token }}{{ pad_token is defined }}"
        "{% macro said(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{{ said(messages[1]) }}"
    )
    (found,) = encoded(build(tmp_path, template), chat("<a>", "é"))
    tokenizer = build(tmp_path, template)
    expected = '{"role": "user", "content": "<a>"}{"role": "assistant", "content": "é"}4True<|im_end|>False'
    assert found.counts.tolist() == tokenizer.mask(found.ids.tolist(), [(expected, False), ("é", True)])


def test_the_identity_is_that_of_the_template_and_its_tokens(tmp_path):
    first = ChatFormat(str(build(tmp_path / "a", CHATML).folder)).identity
    assert ChatFormat(str(build(tmp_path / "b", CHATML, in_config=True).folder)).identity == first
    assert ChatFormat(str(build(tmp_path / "c", TAGGED).folder)).identity != first
    config = tmp_path / "a" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "unk_token": "x"}))
    assert ChatFormat(str(tmp_path / "a")).identity != first


def test_data_of_conversations_differ_with_their_text_and_the_date(tmp_path):
    dated, plain = (ChatFormat(str(build(tmp_path / name, template).folder)) for name, template in
                    (("a", CHATML + "{{ strftime_now('%d') }}"), ("b", CHATML)))  # fmt: skip
    one, other = (Conversation(chat("a", text), "", dated).data() for text in "bc")
    assert one != other and one != Conversation(chat("a", "b"), "", plain).data()


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_transformers(tokenizers, name):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tokenizers[name].folder))
    found = encoded(tokenizers[name], *SAID)
    for messages, ours in zip(SAID, found, strict=True):
        given = theirs.apply_chat_template(messages, tokenize=True, return_dict=True,
                                           return_assistant_tokens_mask=name == "tagged")  # fmt: skip
        assert given["input_ids"] == ours.ids.tolist()
        # It leaves out the last tokens of a character of several, and turns that begin with white space.
        if name == "tagged" and not any(m["content"][:1].isspace() or "🦊" in m["content"] for m in messages):
            assert given["assistant_masks"] == ours.counts.tolist()


def turn(inside, *, after="", prompt="<|im_start|>assistant\n"):
    """A template whose turns of the assistant have something inside, and something after them."""
    return ("{% for m in messages %}{% if m.role == 'assistant' %}" + prompt + inside + after + "{% else %}"
            "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}" + prompt + "{% endif %}")  # fmt: skip


SAY, TAGS = "{{ m.content }}", ("{% generation %}", "{% endgeneration %}")
ENDS = {
    **{name: (template, "<|eot_id|>" if name == "llama" else "<|im_end|>") for name, template in TEMPLATES.items()},
    "eos_token": (turn(SAY + " {{ eos_token }}\n"), "<|im_end|>"),
    "two tokens": (turn(SAY + "<|eot_id|>\n<|endoftext|>\n"), "<|endoftext|>"),
    "no token": (turn(SAY + "\n"), None),
    "a text": (turn(SAY + "\n### End\n"), None),
    "a token, then text": (turn(SAY + "<|im_end|>\nBye"), None),
    "a token before": (turn("<|eot_id|>" + SAY), None),
    "a token outside the tags": (turn(SAY.join(TAGS), after="<|im_end|>\n"), None),
    "a token inside the tags": (turn((SAY + "<|eot_id|>").join(TAGS), after="<|im_end|>\n"), "<|eot_id|>"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_turn_ends_with_the_token_that_is_learned(tmp_path, name):
    template, end = ENDS[name]
    found = ChatFormat(str(build(tmp_path, template).folder)).turn_end
    assert (found and found.text) == end
    if found is not None:
        tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
        assert {"id": found.id, "content": end}.items() <= next(
            token for token in tokenizer["added_tokens"] if token["content"] == end
        ).items()  # fmt: skip


def test_a_token_that_is_not_called_special_ends_a_turn(tmp_path):
    path = build(tmp_path, CHATML).folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(tokenizer))
    assert ChatFormat(str(tmp_path)).turn_end.text == "<|im_end|>"


def test_a_template_that_refuses_the_conversation_it_is_tried_with_says_no_end(tmp_path):
    refuses = "{{ raise_exception('no') if messages[0].role != 'system' }}" + CHATML
    assert ChatFormat(str(build(tmp_path, refuses).folder)).turn_end is None


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
