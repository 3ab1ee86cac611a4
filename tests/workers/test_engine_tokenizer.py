"""Tokenizers kept with the weights: the same ids from extras as from files, chat templates, and errors for the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers.tokenizer import ByteCodec, HubCodec, PromptError, from_extras, from_files

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that adds a BOS to plain prompts, saved as transformers does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def codec(folder: Path) -> HubCodec:
    return from_files(folder, None)


def test_from_extras_is_the_same_tokenizer(codec: HubCodec) -> None:
    kept = from_extras(codec.extras())
    for text in ("Hello", " é😀\n", "<s>x</s>", ""):
        assert kept.encode(text) == codec.encode(text)
        assert kept.decode(codec.encode(text)) == codec.decode(codec.encode(text))
    messages = [{"role": "user", "content": "Hi"}]
    assert kept.chat(messages) == codec.chat(messages)


def test_a_plain_prompt_gets_the_special_tokens_and_a_conversation_only_the_templates(codec: HubCodec) -> None:
    assert codec.encode("a")[0] == 256 and codec.encode("a").count(256) == 1
    ids = codec.chat([{"role": "user", "content": "a"}])
    assert ids[0] == 256 and ids.count(256) == 1
    assert codec.decode(ids) == "[user]a[assistant]", "special tokens have no text"


def test_content_may_be_a_list_of_text_parts(codec: HubCodec) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert codec.chat(parts) == codec.chat([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("messages", "words", "param"),
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url", "messages[0].content"),
        ([{"role": "user", "content": 3}], "must be text", "messages[0].content"),
        ([{"content": "x"}], "no role", "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "no tools here", "messages"),
    ],
)
def test_messages_that_do_not_fit_are_the_clients_error(codec: HubCodec, messages: list[Any], words: str, param: str) -> None:
    with pytest.raises(PromptError, match=words) as refused:
        codec.chat(messages)
    assert refused.value.param == param


def test_half_a_surrogate_pair_is_the_clients_error(codec: HubCodec) -> None:
    with pytest.raises(PromptError, match="UTF-16"):
        codec.encode("a\ud800")


def test_a_template_of_the_config_replaces_the_models(codec: HubCodec, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    own = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    assert (text := from_extras(codec.extras(), own)).decode(text.chat(messages)) == "a!"
    file = tmp_path / "template.jinja"
    file.write_text(own)
    assert from_extras(codec.extras(), str(file)).chat(messages) == text.chat(messages)
    with pytest.raises(WorkerError, match="No such file"):
        from_extras(codec.extras(), "/nowhere.jinja")


def test_without_a_template_conversations_are_refused_and_prompts_are_not(codec: HubCodec) -> None:
    extras = {name: content for name, content in codec.extras().items() if not name.endswith(".jinja")}
    bare = from_extras(extras)
    assert bare.encode("a") == codec.encode("a")
    with pytest.raises(PromptError, match="no chat template"):
        bare.chat([{"role": "user", "content": "a"}])


def test_a_folder_without_a_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(WorkerError, match="tokenizer cannot be read") as refused:
        from_files(tmp_path, None)
    assert refused.value.fatal


def test_bytes_are_the_tokenizer_of_models_that_have_none() -> None:
    codec = ByteCodec(300)
    assert codec.decode(codec.encode("é😀")) == "é😀" and codec.decode([299]) == " 299"
    kept = from_extras(codec.extras())
    assert kept.encode("abc") == [97, 98, 99]
    assert codec.decode(codec.chat([{"role": "user", "content": "Hi"}])) == "user: Hi\nassistant: "
