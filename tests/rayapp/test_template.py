"""Chat messages to prompt ids, on SmolLM2's template and on ones that refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rayapp.config import ModelConfig
from rayapp.router import load_served
from rayapp.text.template import ChatTemplate, TemplateRefused
from rayapp.text.tokenizer import Tokenizer

SAY_HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture(scope="module")
def smol_text(smol_path: Path) -> Tokenizer:
    return Tokenizer.load(smol_path)


@pytest.fixture(scope="module")
def template(smol_text: Tokenizer) -> ChatTemplate:
    found = ChatTemplate.of(smol_text)
    assert found is not None
    return found


def test_O30_O32_ids_are_those_of_transformers(template: ChatTemplate, smol_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = smol_tokenizer.encode(template.render(SAY_HI), add_special_tokens=False)
    assert len(ids) == 33
    assert ids == smol_tokenizer.apply_chat_template(SAY_HI, add_generation_prompt=True, return_dict=False)


def test_O31_every_message_is_in_the_prompt(template: ChatTemplate) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "tool", "content": "result", "tool_call_id": "1"},
        {"role": "user", "content": "last"},
    ]
    rendered = template.render(messages)
    for message in messages:
        assert f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>" in rendered
    assert rendered.endswith("<|im_start|>assistant\n")


def test_a_template_may_refuse(smol_text: Tokenizer) -> None:
    picky = ChatTemplate(smol_text, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefused, match="refuses this conversation: roles must alternate"):
        picky.render(SAY_HI)


@pytest.mark.parametrize("source", ["{{ messages[5].content }}", "{{ messages[0].content + 5 }}", "{% if %}"])
def test_a_template_that_fails_is_a_refusal(smol_text: Tokenizer, source: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(smol_text, source).render(SAY_HI)


def test_content_is_text_and_not_a_template(template: ChatTemplate) -> None:
    assert "{{ 7 * 7 }}" in template.render([{"role": "user", "content": "{{ 7 * 7 }}"}])


def test_no_template(smol_path: Path) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(smol_path)
    fast.chat_template = None
    assert ChatTemplate.of(Tokenizer(fast)) is None
    fast.chat_template = {"default": "A", "tool_use": "B"}
    several = ChatTemplate.of(Tokenizer(fast))
    assert several is not None
    assert several.render(SAY_HI) == "A"


def test_a_parser_of_calls_that_the_template_cannot_ask_for_is_warned_of(
    tiny_http_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for parser, warned in (("auto", False), ("none", False), ("hermes", True)):
        caplog.clear()
        load_served(ModelConfig.model_validate({"name": "tiny", "source": str(tiny_http_path), "tool_parser": parser}))
        assert any("does not mention tools" in message for message in caplog.messages) is warned, parser
