"""The tokenizer as the Router loads it: same ids as transformers, special tokens once, no torch."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rayapp.text.template import ChatTemplate
from rayapp.text.tokenizer import Tokenizer
from tests.conftest import wait_limit


@pytest.fixture(scope="module")
def smol_text(smol_path: Path) -> Tokenizer:
    return Tokenizer.load(smol_path)


def test_ids_are_those_of_transformers(smol_text: Tokenizer, smol_tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ["1, 2, 3, 4, 5,", " Paris", "你好 e\u0301\n\n  x", "<|im_start|>user\nhi<|im_end|>", ""]:
        assert smol_text.encode(text) == smol_tokenizer(text)["input_ids"]
    assert smol_text.vocab_size == 49152
    assert smol_text.byte_level


def test_truncation_and_padding_of_the_file_are_off(smol_path: Path) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(smol_path)
    fast.backend_tokenizer.enable_truncation(2)
    fast.backend_tokenizer.enable_padding(length=50)
    assert Tokenizer(fast).encode("1, 2, 3, 4, 5,") == Tokenizer.load(smol_path).encode("1, 2, 3, 4, 5,")


def test_half_a_surrogate_pair_is_refused(smol_text: Tokenizer) -> None:
    with pytest.raises(ValueError, match="character 2 of the text"):
        smol_text.encode("ab\ud800c")


def test_check_ids(smol_text: Tokenizer) -> None:
    smol_text.check_ids([0, 49151])
    for ids, position in [([49152], 0), ([1, -1], 1), ([1, 1, 10**18], 2)]:
        with pytest.raises(ValueError, match=f"position {position} is not in the vocabulary: ids run from 0 to 49151"):
            smol_text.check_ids(ids)


def test_vocabulary_of_the_model_wins(smol_path: Path) -> None:
    with pytest.raises(ValueError, match="0 to 511"):
        Tokenizer.load(smol_path, vocab_size=512).check_ids([512])


def test_every_token_has_the_bytes_that_decode_gives_it(smol_text: Tokenizer) -> None:
    decoded = [smol_text.decode([token_id]) for token_id in range(smol_text.vocab_size)]
    assert [smol_text.token_bytes(token_id).decode(errors="replace") for token_id in range(len(decoded))] == decoded


def test_pickles(smol_text: Tokenizer) -> None:
    again = pickle.loads(pickle.dumps(smol_text))
    assert again.encode("Hello") == smol_text.encode("Hello")
    assert again.vocab_size == smol_text.vocab_size


@pytest.fixture
def with_bos(smol_path: Path, tmp_path: Path) -> Path:
    """SMOL's tokenizer with a post-processor that puts id 1 first, and a template that begins with it too."""
    fast = PreTrainedTokenizerFast.from_pretrained(smol_path)
    fast.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    fast.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    fast.save_pretrained(tmp_path)
    return tmp_path


def test_O32_special_tokens_are_not_doubled(with_bos: Path) -> None:
    tokenizer = Tokenizer.load(with_bos)
    messages = [{"role": "user", "content": "Say hi."}]
    template = ChatTemplate.of(tokenizer)
    assert template is not None
    chat = tokenizer.encode(template.render(messages), add_special_tokens=False)
    expected = PreTrainedTokenizerFast.from_pretrained(with_bos).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert chat == expected
    assert chat.count(1) == 1
    assert chat[0] == 1
    completion = tokenizer.encode("Hello")
    assert completion.count(1) == 1
    assert completion[0] == 1


def test_loads_no_torch_and_no_ray(smol_path: Path) -> None:
    code = (
        "import json, sys\n"
        "import rayapp.api.routes, rayapp.text.detokenizer, rayapp.text.stop\n"
        "from rayapp.text.template import ChatTemplate\n"
        "from rayapp.text.tokenizer import Tokenizer\n"
        f"template = ChatTemplate.of(Tokenizer.load({str(smol_path)!r}))\n"
        "template.render([{'role': 'user', 'content': 'Say hi.'}])\n"
        "print(json.dumps([name for name in ('torch', 'ray') if name in sys.modules]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=wait_limit(60), check=True
    )
    assert json.loads(run.stdout.splitlines()[-1]) == []
