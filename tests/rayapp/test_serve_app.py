"""The application on a real Ray: placement, both HTTP endpoints, handles, affinity, hang-ups, failures."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
import ray
from ray import serve
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rayapp.api.errors import ApiError
from rayapp.client import Client
from rayapp.config import ModelConfig
from rayapp.engine_actor import EngineActor
from rayapp.failures import InvalidRequest
from tests.conftest import wait_limit
from tests.models import ref
from tests.rayapp.conftest import App, tiny_model
from tests.serving import wait_until

OPENING = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def client(tiny_app: App) -> Client:
    return Client(tiny_app.name)


@pytest.fixture(scope="module")
def web(tiny_app: App) -> Iterator[openai.OpenAI]:
    http = httpx.Client(timeout=wait_limit(60))
    with openai.OpenAI(
        base_url=f"{tiny_app.url}/v1", api_key="none", max_retries=0, http_client=http, _strict_response_validation=True
    ) as client:
        yield client


def idle(app: App) -> bool:
    return all(one["running"] + one["waiting"] + one["streams"] == 0 for one in app.health().values())


@contextmanager
def stream(app: App, **body: Any) -> Iterator[Iterator[str]]:
    """The data of a streamed completion's events; leaving the block closes the connection."""
    body = {"model": "tiny", "temperature": 0, "stream": True} | body
    with (
        httpx.Client(timeout=wait_limit(60)) as http,
        http.stream("POST", f"{app.url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        yield (line[6:] for line in response.iter_lines() if line.startswith("data: "))


# Placement


def test_placement_each_engine_has_its_own_gpu_and_nothing_else_has_any(tiny_app: App) -> None:
    facts = tiny_app.facts()
    assert sorted(one["engine"]["cuda_visible_devices"] for one in facts) == ["0", "1"]
    assert {one["cuda_visible_devices"] for one in facts} == {""}
    assert serve.get_app_handle(tiny_app.name).facts.remote().result()["cuda_visible_devices"] == ""
    pids = [one["pid"] for one in facts] + [one["engine"]["pid"] for one in facts]
    assert len(set(pids)) == 4


def test_engine_threads_are_the_configured_ones_and_not_rays(tiny_app: App) -> None:
    assert {(one["threads"], one["engine"]["threads"]) for one in tiny_app.facts()} == {(1, 1)}


def test_engine_thread_itself_computes_with_threads_that_ray_did_not_choose(
    tiny_app: App, tiny_http_path: Path
) -> None:
    """Ray gives this actor OMP_NUM_THREADS=1, for its half a CPU."""
    config = ModelConfig(**tiny_model(tiny_http_path, device="cpu", num_threads=3))
    actor = ray.remote(EngineActor).options(num_cpus=0.5).remote(config)
    try:
        facts = ray.get(actor.start.remote(), timeout=wait_limit(180))
        environment = ray.get(actor.environment.remote(), timeout=wait_limit(30))
        assert (environment["omp_num_threads"], environment["threads"], facts["threads"]) == ("1", 3, 3)
    finally:
        ray.kill(actor)


# HTTP


def test_completion_equals_plain_generate(
    tiny_app: App, web: openai.OpenAI, tiny_http: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = smol_tokenizer("Once upon a time")["input_ids"]
    expected = smol_tokenizer.decode(ref(tiny_http, prompt, 12), skip_special_tokens=True)
    for given in ("Once upon a time", prompt):
        answer = web.completions.create(model="tiny", prompt=given, max_tokens=12, temperature=0)
        assert answer.choices[0].text.rstrip("\ufffd") == expected.rstrip("\ufffd")
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    with stream(tiny_app, prompt=prompt, max_tokens=12) as events:
        pieces = [json.loads(data)["choices"][0]["text"] for data in events if data != "[DONE]"]
    assert "".join(pieces) == answer.choices[0].text


def test_chat_streamed_equals_not_streamed(web: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    whole = web.chat.completions.create(model="tiny", messages=messages, max_tokens=20, temperature=0)
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(web.chat.completions.create(model="tiny", messages=messages, max_tokens=20, temperature=0, **asked))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage is not None
    assert whole.usage is not None
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_O13_choices_differ_and_repeat(web: openai.OpenAI) -> None:
    """n = 4 in one HTTP request: four calls with one request id, on replicas that take turns."""

    def ask() -> list[str]:
        messages: list[Any] = [{"role": "user", "content": OPENING}]
        answer = web.chat.completions.create(model="tiny", messages=messages, n=4, max_tokens=16, seed=7, temperature=1)
        return [choice.message.content or "" for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 4
    assert ask() == first


def test_list_prompts_and_choices_keep_their_order(web: openai.OpenAI) -> None:
    prompts = ["One", "Two", OPENING]
    answer = web.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=8, temperature=0)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone = web.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        assert {choice.text for choice in answer.choices[2 * number : 2 * number + 2]} == {alone.choices[0].text}


def test_more_choices_than_places_all_come(tiny_app: App, web: openai.OpenAI) -> None:
    """128 at once on two replicas of 40 places each."""
    answer = web.completions.create(model="tiny", prompt=OPENING, n=128, max_tokens=2)
    assert len(answer.choices) == 128
    wait_until(lambda: idle(tiny_app))


def test_O34_unknown_model(tiny_app: App) -> None:
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
        answer = httpx.post(f"{tiny_app.url}/v1/completions", json={"model": "no-such-model", **body})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
    listed = httpx.get(f"{tiny_app.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny"]
    assert httpx.get(f"{tiny_app.url}/v1/models/tiny").status_code == 200
    assert httpx.get(f"{tiny_app.url}/v1/models/nope").status_code == 404


def test_health_counts_replicas(tiny_app: App) -> None:
    answer = httpx.get(f"{tiny_app.url}/health")
    assert answer.status_code == 200
    assert answer.json()["models"]["tiny"]["replicas"] == 2


def test_stop_string_ends_the_request_in_the_engine(tiny_app: App, web: openai.OpenAI) -> None:
    prompt = "Once upon a time"
    whole = web.completions.create(model="tiny", prompt=prompt, max_tokens=40, temperature=0).choices[0].text
    stop = whole[20:23]
    answer = web.completions.create(model="tiny", prompt=prompt, max_tokens=4000, temperature=0, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 40
    wait_until(lambda: idle(tiny_app), 20)


# Handles


def test_handles_of_text_and_of_token_ids_agree(
    client: Client, tiny_http: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = smol_tokenizer("Once upon a time")["input_ids"]
    ids = client.generate_ids("tiny", prompt, max_new_tokens=12)
    assert ids["token_ids"] == ref(tiny_http, prompt, 12)
    assert (ids["finish_reason"], ids["prompt_tokens"]) == ("length", len(prompt))
    text = client.generate("Once upon a time", max_tokens=12, temperature=0)
    assert text["text"].rstrip("\ufffd") == smol_tokenizer.decode(ids["token_ids"]).rstrip("\ufffd")
    assert text["usage"]["completion_tokens"] == 12
    assert "".join(client.stream("Once upon a time", max_tokens=12, temperature=0)) == text["text"]
    chat = client.generate([{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0)
    assert chat["finish_reason"] == "length"


def test_generation_goes_on_behind_output_ids(
    tiny_app: App, tiny_http: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast
) -> None:
    """What a router sends to another replica when the first one dies."""
    from rayapp.link import wire_request

    prompt = smol_tokenizer("Once upon a time")["input_ids"]
    expected = ref(tiny_http, prompt, 12)
    request = wire_request(prompt, {"max_new_tokens": 12}, output_ids=expected[:5])
    items = list(tiny_app.engines().options(stream=True).generate.remote(request))
    assert [token for tokens, _, _ in items for token in tokens] == expected[5:]
    assert items[-1][1] == "length"


def test_refusals_reach_handle_callers_as_what_they_are(tiny_app: App, client: Client) -> None:
    with pytest.raises(InvalidRequest, match="top_p"):
        client.generate_ids("tiny", [1, 2], do_sample=True, top_p=7.0)
    with pytest.raises(InvalidRequest, match="49151"):
        client.generate_ids("tiny", [10**9])
    with pytest.raises(ApiError, match="no-such-model"):
        client.generate("x", model="no-such-model")
    with pytest.raises(ApiError, match="top_p"):
        list(client.stream("x", top_p=7.0))
    assert idle(tiny_app)


def test_router_has_not_loaded_torch(tiny_app: App, client: Client) -> None:
    client.generate([{"role": "user", "content": "Hello"}], max_tokens=2)
    assert serve.get_app_handle(tiny_app.name).facts.remote().result()["torch_loaded"] is False


# Affinity


def test_O40_conversations_stay_where_they_began(tiny_app: App, client: Client, web: openai.OpenAI) -> None:
    """Conversations of three turns, by HTTP and by this process's handle: ten, and more until each replica has some.

    A conversation's home follows from the replicas' ids, which are random: ten of them may well share one.
    """
    number, at_home, homes = 0, 0, set()
    while number < 10 or (len(homes) < 2 and number < 60):
        messages: list[Any] = [{"role": "user", "content": f"Conversation {number}. {OPENING}"}]
        home = None
        for turn in range(3):
            before = tiny_app.served()
            if turn == 1:
                text = client.generate(messages, max_tokens=8, temperature=0)["text"]
            else:
                answer = web.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
                text = answer.choices[0].message.content or ""
            (used,) = (replica for replica, count in tiny_app.served().items() if count > before[replica])
            home = home or used
            at_home += used == home
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        homes.add(home)
        number += 1
    assert at_home == 3 * number
    assert len(homes) == 2


def test_O40_hot_prefix_uses_both_replicas(tiny_app: App) -> None:
    before = tiny_app.served()
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda i: Client(tiny_app.name).generate(OPENING + str(i), max_tokens=30), range(20)))
    after = tiny_app.served()
    assert all(after[replica] > before[replica] for replica in before)
    assert sum(after.values()) - sum(before.values()) == 20


@pytest.mark.parametrize(
    "path_and_body",
    [
        ("chat/completions", {"messages": [{"role": "user", "content": OPENING}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": OPENING}]}]}),
        ("completions", {"prompt": OPENING}),
        ("completions", {"prompt": [OPENING, "short"]}),
        ("completions", {"prompt": list(range(100, 300))}),
    ],
)
def test_O40_every_body_form_is_routed(tiny_app: App, path_and_body: tuple[str, dict[str, Any]]) -> None:
    path, body = path_and_body
    answer = httpx.post(
        f"{tiny_app.url}/v1/{path}", json={"model": "tiny", "max_tokens": 2} | body, timeout=wait_limit(30)
    )
    assert answer.status_code == 200


def test_O40_another_process_chooses_the_same_replica(tiny_app: App, client: Client) -> None:
    prompts = [[number, *range(200)] for number in range(1, 33)]  # all at one replica: once in 2 ** 31
    here = [client.generate_ids("tiny", prompt, max_new_tokens=1)["replica"] for prompt in prompts]
    code = f"""
import json, ray
ray.init({tiny_app.address!r}, log_to_driver=False)
from rayapp.client import Client
client = Client({tiny_app.name!r})
print(json.dumps([client.generate_ids("tiny", p, max_new_tokens=1)["replica"] for p in {prompts}]))
"""
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=wait_limit(120), check=True
    )
    assert json.loads(other.stdout.splitlines()[-1]) == here
    assert len(set(here)) == 2


# Clients that leave


def test_O39_clients_that_hang_up(tiny_app: App, web: openai.OpenAI) -> None:
    """While streaming, before the first byte, and not streamed at all; one healthy stream goes on throughout."""
    expected = web.completions.create(model="tiny", prompt="healthy", max_tokens=300, temperature=0).choices[0].text
    with ThreadPoolExecutor(1) as pool:

        def healthy() -> str:
            with stream(tiny_app, prompt="healthy", max_tokens=300) as events:
                pieces = [json.loads(data)["choices"][0]["text"] for data in events if data != "[DONE]"]
            return "".join(pieces)

        running = pool.submit(healthy)

        def leave(number: int) -> None:
            body = {"model": "tiny", "prompt": f"{number}", "max_tokens": 3000, "stream": number % 3 != 2}
            if number % 3 == 0:
                with stream(tiny_app, **body) as events:
                    next(events)
                return
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{tiny_app.url}/v1/completions", json=body | {"n": 8}, timeout=0.15)

        threads = [threading.Thread(target=leave, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert running.result(wait_limit(60)) == expected
    wait_until(lambda: idle(tiny_app), 20)
    free = {one["kv_total_blocks"] - one["kv_used_blocks"] for one in tiny_app.health().values()}
    assert free == {1024}
    with ThreadPoolExecutor(80) as pool:  # every place of both replicas is free again
        answers = list(pool.map(lambda i: Client(tiny_app.name).generate(f"{i}", max_tokens=2), range(80)))
    assert len(answers) == 80


@contextmanager
def slow_reader(app: App, **body: Any) -> Iterator[HTTPResponse]:
    """A streamed completion whose answer nobody has read beyond its first bytes, on a connection with little room."""
    url = urlsplit(f"{app.url}/v1/completions")
    data = json.dumps({"model": "tiny", "stream": True, **body})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(wait_limit(60))
        connection.connect((url.hostname, url.port))
        head = f"POST {url.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall((head + data).encode())
        response = HTTPResponse(connection)
        response.begin()
        assert response.status == 200
        yield response


def test_a_reader_that_stops_holds_no_place_and_finds_its_answer_when_it_goes_on(
    tiny_app: App, web: openai.OpenAI
) -> None:
    """Its tokens are generated as for any other; what was not read waits in the proxy, as text."""
    ask: dict[str, Any] = {"prompt": "slow", "n": 2, "max_tokens": 300, "temperature": 1, "seed": 3}
    expected = [choice.text for choice in web.completions.create(model="tiny", **ask).choices]
    router = psutil.Process(serve.get_app_handle(tiny_app.name).facts.remote().result()["pid"])
    before = router.memory_info().rss
    with slow_reader(tiny_app, **ask) as reader, slow_reader(tiny_app, **ask) as never:
        wait_until(lambda: idle(tiny_app), 60)
        assert [choice.text for choice in web.completions.create(model="tiny", **ask).choices] == expected
        assert router.memory_info().rss - before < 50 * 2**20
        never.close()
        *events, last = [line.removeprefix("data: ") for line in reader.read().decode().split("\n\n") if line]
    texts = [""] * 2
    assert last == "[DONE]"
    for data in events:
        for choice in json.loads(data)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected


def test_leaving_a_python_stream_ends_the_request(tiny_app: App, client: Client) -> None:
    pieces = client.stream("Once upon a time", max_tokens=4000)
    next(pieces)
    pieces.close()
    wait_until(lambda: idle(tiny_app), 20)


# Failures


@pytest.fixture(scope="module")
def small_app(deploy: Callable[..., App], tiny_http_path: Path) -> Iterator[App]:
    """Two places and four in the queue."""
    small = tiny_model(tiny_http_path, num_gpus=None, max_ongoing_requests=2, max_queued_requests=4)
    app = deploy("small-app", models=[small])
    yield app
    serve.delete(app.name, _blocking=False)


def test_O41_overload_is_refused_at_once(small_app: App) -> None:
    """Of thirty requests six get in; the others are told before any of these has ended, and the places come free."""
    url = f"{small_app.url}/v1/completions"
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 150, "temperature": 0}

    def ask(number: int) -> httpx.Response:
        return httpx.post(url, json=body | {"stream": bool(number % 2)}, timeout=wait_limit(60))

    def hang_up(number: int) -> None:
        with suppress(httpx.TimeoutException):  # or is refused, while those who left before are being cleared away
            httpx.post(url, json=body | {"max_tokens": 4000}, timeout=0.3)

    def let_in(count: int) -> int:
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(ask, range(count)))
        good = [answer for answer in answers if answer.status_code == 200]
        bad = [answer for answer in answers if answer.status_code != 200]
        texts = [answer.json()["choices"][0]["text"] for answer in good if answer.text.startswith("{")]
        assert len(set(texts)) <= 1
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in good if not answer.text.startswith("{"))
        for answer in bad:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.elapsed < min(answer.elapsed for answer in good if answer.text.startswith("{"))
        return len(good)

    assert let_in(30) >= 6
    for _ in range(5):
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(hang_up, range(6)))
    wait_until(lambda: let_in(6) == 6)  # the counters have not drifted


def test_a_deadline_counts_in_the_queue_and_in_the_engine(small_app: App) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4000}
    url = f"{small_app.url}/v1/completions"

    def ask(timeout: float) -> httpx.Response:
        return httpx.post(
            url, json={"model": "tiny", **body, "timeout": timeout, "priority": 1}, timeout=wait_limit(60)
        )

    running = ask(0.3)
    with stream(small_app, **body) as first, stream(small_app, **body) as second:
        next(first), next(second)
        queued = ask(0.3)
    for answer in (running, queued):
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    with pytest.raises(ApiError, match="did not end within") as refused:
        Client(small_app.name).generate("Once upon a time", max_tokens=4000, timeout=0.3)
    assert refused.value.status == 504
    wait_until(lambda: idle(small_app), 20)
