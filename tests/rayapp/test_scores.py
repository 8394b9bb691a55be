"""Log-probabilities, penalties and biases over HTTP, from a real engine, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.conftest import wait_limit
from tests.models import ref
from tests.rayapp.local_server import local_server, small

PROMPT = "Once upon a time in a village by the sea"
CLOSE = 2e-4


@pytest.fixture(scope="module")
def url(tiny_http_path: Path) -> Iterator[str]:
    with local_server(small("tiny", tiny_http_path)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=wait_limit(60), _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def lax(client: openai.OpenAI) -> openai.OpenAI:
    """For what OpenAI sends and its own types do not allow: the null of a first token, a stream of completions."""
    return openai.OpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=wait_limit(60))


def log_probs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[positions, vocabulary]: what the model thinks comes after each token."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


@pytest.fixture(scope="module")
def ids(smol_tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return list(smol_tokenizer(PROMPT).input_ids)


def test_completion_logprobs(
    client: openai.OpenAI, tiny_http: PreTrainedModel, ids: list[int], smol_tokenizer: PreTrainedTokenizerFast
) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
    choice = answer.choices[0]
    made = ref(tiny_http, ids, 6)
    expected = log_probs(tiny_http, ids + made)[len(ids) - 1 : -1]
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(
        [float(row[t]) for row, t in zip(expected, made, strict=True)], abs=CLOSE
    )
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.text_offset == [sum(len(t) for t in (choice.logprobs.tokens or [])[:i]) for i in range(6)]
    for row, top in zip(expected, choice.logprobs.top_logprobs or [], strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(3).values.tolist(), abs=CLOSE)
        assert max(top, key=lambda one: top[one]) == smol_tokenizer.decode(row.argmax())


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_the_prompt(
    lax: openai.OpenAI, tiny_http: PreTrainedModel, ids: list[int], max_tokens: int, as_ids: bool
) -> None:
    answer = lax.completions.create(
        model="tiny", prompt=ids if as_ids else PROMPT, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True
    )
    choice = answer.choices[0]
    whole = ids + (ref(tiny_http, ids, max_tokens) if max_tokens else [])
    scores = log_probs(tiny_http, whole)
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None and (choice.logprobs.top_logprobs or [1])[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        [float(scores[i - 1][whole[i]]) for i in range(1, len(whole))], abs=CLOSE
    )
    assert choice.text.startswith(PROMPT) and "".join(choice.logprobs.tokens or []) == choice.text
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_is_whole(lax: openai.OpenAI, n: int) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 1, "seed": 5, "n": n}
    whole = lax.completions.create(prompt=PROMPT, logprobs=2, echo=True, **fields)
    texts, scores = [""] * n, [[] for _ in range(n)]  # type: list[str], list[list[Any]]
    offsets: list[list[int]] = [[] for _ in range(n)]
    for chunk in lax.completions.create(prompt=PROMPT, logprobs=2, echo=True, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                scores[choice.index] += choice.logprobs.top_logprobs or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    assert scores == [choice.logprobs.top_logprobs for choice in whole.choices if choice.logprobs]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs]


@pytest.mark.parametrize("top", [0, 4])
def test_chat_logprobs_streamed_and_not(client: openai.OpenAI, top: int) -> None:
    fields: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "temperature": 0,
        "logprobs": True, "top_logprobs": top,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert b"".join(bytes(one.bytes or ()) for one in whole.logprobs.content).decode() == whole.message.content
    assert [len(one.top_logprobs) for one in whole.logprobs.content] == [top] * 9
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **fields):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == whole.logprobs.content


def test_O13_scores_are_the_models_own_whatever_is_sampled(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "logprobs": 5}
    plain = client.completions.create(temperature=0, **fields).choices[0]
    for change in ({"temperature": 0.3}, {"top_p": 0.1}, {"logit_bias": {"5": 100}}, {"presence_penalty": 2}):
        other = client.completions.create(**(fields | {"seed": 3} | change)).choices[0]
        assert plain.logprobs and other.logprobs and plain.logprobs.top_logprobs and other.logprobs.top_logprobs
        ours, theirs = plain.logprobs.top_logprobs[0], other.logprobs.top_logprobs[0]
        for name in ours.keys() & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5)
        assert len(ours.keys() & theirs.keys()) >= 5


def test_biases_and_penalties_change_what_is_chosen(
    client: openai.OpenAI, tiny_http: PreTrainedModel, ids: list[int], smol_tokenizer: PreTrainedTokenizerFast
) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    token = 9 * 100
    biased = client.completions.create(logit_bias={str(token): 100}, **fields).choices[0].text
    assert biased == smol_tokenizer.decode([token] * 8)
    first = ref(tiny_http, ids, 1)[0]
    banned = client.completions.create(logit_bias={str(first): -100}, logprobs=0, **fields).choices[0]
    assert banned.logprobs and banned.logprobs.tokens and smol_tokenizer.decode([first]) not in banned.logprobs.tokens
    penalised = client.completions.create(
        logit_bias={str(token): 50}, presence_penalty=2, frequency_penalty=2, **(fields | {"max_tokens": 40})
    ).choices[0]
    assert smol_tokenizer.decode([token] * 12) in penalised.text  # 50 lasts for about a dozen
    assert penalised.text != smol_tokenizer.decode([token] * 40)
    with torch.no_grad():
        expected = tiny_http.generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, repetition_penalty=1.7, pad_token_id=0
        )[0, len(ids) :]
    answer = client.completions.create(extra_body={"repetition_penalty": 1.7}, **fields)
    assert answer.choices[0].text == smol_tokenizer.decode(expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"repetition_penalty": 1e-38}}, "repetition_penalty"),
        ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
    ],
)
def test_O33_values_out_of_range_are_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**({"model": "tiny", "prompt": PROMPT} | fields))
    assert refused.value.param == param


def test_a_salt_keeps_prefixes_apart(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        answer = client.completions.create(
            model="tiny", prompt=list(range(100, 200)), max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage and answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("a"), cached("a"), cached("b"), cached("b")] == [0, 96, 0, 96]
