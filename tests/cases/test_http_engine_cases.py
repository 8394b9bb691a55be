"""Cases O07, O15-O17, O30-O32 over HTTP, from real engines in float32, without Ray. The others: test_http_cases."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.cases.test_http_cases import COUNT_TEXT, both, complete, events, refused
from tests.conftest import wait_limit
from tests.models import CJK, COUNT, build_chain, ref, save
from tests.rayapp.local_server import local_server, small
from tests.rayapp.openai_forms import read_json

SAY_HI = {"role": "user", "content": "Say hi."}
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


@pytest.fixture(scope="module")
def http(
    smol_path: Path, tiny_http: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """SMOL; `ends`, a CHAIN by what ends it; and `bos`, TINY whose tokenizer and template both begin with BOS."""
    folder = tmp_path_factory.mktemp("models")
    engine = {"page_size": 16, "num_blocks": 128, "max_batch_tokens": 256}
    models = [small("smol", smol_path, engine=engine)]
    for name, eos in {"either": [0, 2], "zero": 0, "only zero": [0]}.items():
        chain = build_chain([504, 253, 2, 28, 0, 216], eos_token_id=eos)
        models.append(small(name, save(chain, folder / name, smol_path), engine=engine))
    models.append(small("bos", save_with_bos(tiny_http, folder / "bos", smol_path), engine=engine))
    with local_server(*models) as url, httpx.Client(base_url=url, timeout=wait_limit(60)) as client:
        yield client


def save_with_bos(model: PreTrainedModel, folder: Path, tokenizer: Path) -> Path:
    save(model, folder, tokenizer)
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    first = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    fast.backend_tokenizer.post_processor = first
    fast.chat_template = BOS_TEMPLATE
    fast.save_pretrained(folder)
    return folder


def chat(http: httpx.Client, messages: list[Any], model: str = "smol", **fields: Any) -> dict[str, Any]:
    """One chat answer, which must be the same streamed and not: its choice, and `usage` in it."""
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8} | fields
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = read_json(response.text)
    (choice,) = answer["choices"]
    *chunks, last = events(http, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    scores = [part["logprobs"] for part in parts if part["logprobs"]]
    streamed = {"content": [entry for one in scores for entry in one["content"]], "refusal": None} if scores else None
    assert streamed == choice["logprobs"]
    for key in ("prompt_tokens", "completion_tokens"):
        assert last["usage"][key] == answer["usage"][key]
    return choice | {"usage": answer["usage"]}


def prompt_of(http: httpx.Client, messages: list[Any], model: str = "smol") -> list[int]:
    """The ids that messages become."""
    response = http.post("/tokenize", json={"model": model, "messages": messages})
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


def own_scores(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[positions, vocabulary]: what plain transformers thinks comes after each token."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_O07_what_ends_an_answer(http: httpx.Client) -> None:
    def ended(model: str, **fields: Any) -> tuple[str, str, int]:
        text, reason, count, parts = both(http, [504], model, **{"max_tokens": 9} | fields)
        assert all("<|" not in part for part in parts)
        return text, reason, count

    assert ended("either")[:2] == (" a", "stop")
    assert ended("zero") == ended("only zero")
    assert ended("zero")[:2] == (" a,", "stop")  # through the id 2, which does not show
    assert ended("either", ignore_eos=True, max_tokens=5) == (" a, ", "length", 5)


def test_O15_logit_bias(http: httpx.Client) -> None:
    def biased(bias: dict[str, float], max_tokens: int) -> str:
        return both(http, COUNT, logit_bias=bias, max_tokens=max_tokens)[0]

    with ThreadPoolExecutor(1) as pool:
        for change in ({"216": -100}, {"28": 100}, {"49152": 5}, {"-1": 5}, {"abc": 1}, {"28": 1e9}):
            plain = pool.submit(complete, http, COUNT, max_tokens=16)
            if change == {"216": -100}:
                scores = complete(http, COUNT, max_tokens=2, logit_bias=change, logprobs=0)["choices"][0]["logprobs"]
                assert scores["tokens"][0] != " "
                assert not COUNT_TEXT.startswith(biased(change, 2))
            elif change == {"28": 100}:
                assert biased(change, 5) == ",,,,,"
            else:
                for stream in (False, True):
                    body = {"model": "smol", "prompt": COUNT, "logit_bias": change, "stream": stream}
                    error = refused(http.post("/v1/completions", json=body))
                    assert error["param"].split(".")[0] == "logit_bias"
            assert plain.result()["choices"][0]["text"] == COUNT_TEXT


@pytest.mark.parametrize("top", [3, 0])
@pytest.mark.parametrize("stop", [None, " for your X"], ids=["at once", "held back"])
def test_O16_chat_logprobs(http: httpx.Client, smol: PreTrainedModel, top: int, stop: str | None) -> None:
    messages = [{"role": "user", "content": CJK}]
    choice = chat(http, messages, max_tokens=12, logprobs=True, top_logprobs=top, stop=stop)
    entries = choice["logprobs"]["content"]
    assert choice["finish_reason"] == "length" and len(entries) == choice["usage"]["completion_tokens"] == 12
    said = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert said.decode(errors="ignore") == choice["message"]["content"]
    ids = prompt_of(http, messages)
    made = ref(smol, ids, 12)
    for token, row, entry in zip(made, own_scores(smol, ids + made)[len(ids) - 1 :], entries, strict=False):
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-3)
        tops = entry["top_logprobs"]
        assert [one["logprob"] for one in tops] == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)
        assert not tops or tops[0] == {key: entry[key] for key in ("token", "logprob", "bytes")}


@pytest.mark.parametrize("stream", [False, True])
def test_O17_echo(http: httpx.Client, smol: PreTrainedModel, smol_tokenizer: Any, stream: bool) -> None:
    prompt = "The capital of France is"
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1}
    if stream:
        body = {"model": "smol", "prompt": prompt} | fields
        choices = [chunk["choices"][0] for chunk in events(http, "/v1/completions", body)]
        text = "".join(choice["text"] for choice in choices)
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        scores = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    else:
        (choice,) = complete(http, prompt, **fields)["choices"]
        text, scores = choice["text"], choice["logprobs"]
    assert text == prompt + " Paris"
    ids = smol_tokenizer.encode(text)
    assert scores["tokens"] == [smol_tokenizer.decode([token]) for token in ids] and len(ids) == 6
    assert scores["text_offset"] == [sum(map(len, scores["tokens"][:i])) for i in range(6)]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    own = own_scores(smol, ids)
    expected = [own[i - 1, ids[i]].item() for i in range(1, 6)]
    assert scores["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)


def test_O30_content_as_parts(http: httpx.Client) -> None:
    def parts(*texts: str, role: str = "user") -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}

    plain = chat(http, [SAY_HI])
    assert plain["usage"]["prompt_tokens"] == 33
    for same in (parts("Say hi."), parts("Say", " hi.")):
        again = chat(http, [same])
        assert (again["message"], again["usage"]["prompt_tokens"]) == (plain["message"], 33)
    assert prompt_of(http, [parts("Say", " hi.")]) != prompt_of(http, [parts(" hi.", "Say")])
    history = [SAY_HI, {"role": "assistant", "content": "Hi. Again?"}, SAY_HI]
    in_parts = [parts("Say hi."), parts("Hi. ", "Again?", role="assistant"), parts("Say hi.")]
    assert chat(http, in_parts)["message"] == chat(http, history)["message"]
    assert prompt_of(http, in_parts) == prompt_of(http, history)
    assert prompt_of(http, in_parts[:2]) == prompt_of(http, history[:2])
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    for stream in (False, True):
        body = {"model": "smol", "messages": [picture], "stream": stream}
        error = refused(http.post("/v1/chat/completions", json=body), param="messages.0.content.0.type")
        assert "'image_url'" in error["message"]


def test_O31_null_content_and_tool_messages(http: httpx.Client, smol_tokenizer: Any) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "It is blue."}
    served = [
        [
            SAY_HI,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            result,
            {"role": "user", "content": "Why?"},
        ],
        [SAY_HI, {"role": "assistant"}, {"role": "user", "content": "Why?"}],
    ]
    for messages in served:
        answer = chat(http, messages)
        ids = prompt_of(http, messages)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        prompt = smol_tokenizer.decode(ids)
        turns = [f"<|im_start|>{one['role']}\n{one.get('content') or ''}<|im_end|>" for one in messages]
        places = [prompt.find(turn) for turn in turns]
        assert -1 not in places and places == sorted(places)
    refusals: list[tuple[Any, str]] = [
        ({key: result[key] for key in ("role", "content")}, "messages.1.tool_call_id"),
        ({"role": "user", "content": 5}, "messages.1.content"),
        ({"role": "user"}, "messages.1.content"),
        ({"role": "assistant", "content": None, "tool_calls": "look"}, "messages.1.tool_calls"),
    ]
    for message, param in refusals:
        for stream in (False, True):
            body = {"model": "smol", "messages": [SAY_HI, message], "stream": stream}
            refused(http.post("/v1/chat/completions", json=body), param=param)


def test_O32_special_tokens_are_not_doubled(http: httpx.Client, smol_tokenizer: Any) -> None:
    """TINY's text depends on every token of the prompt, so equal texts come of equal prompts."""
    ids = smol_tokenizer.apply_chat_template(
        [SAY_HI], chat_template=BOS_TEMPLATE, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert ids[0] == 1 and ids.count(1) == 1
    answer = chat(http, [SAY_HI], "bos")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["message"]["content"] == both(http, ids, "bos", max_tokens=8)[0]
    hello = smol_tokenizer.encode("Hello")
    texts = [both(http, prompt, "bos", max_tokens=12)[0] for prompt in ("Hello", [1, *hello], hello)]
    assert texts[0] == texts[1] != texts[2]
    echoed = complete(http, "Hello", "bos", echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    assert echoed["tokens"] == ["<|im_start|>", *(smol_tokenizer.decode([token]) for token in hello)]
    assert chat(http, [SAY_HI])["usage"]["prompt_tokens"] == 33
