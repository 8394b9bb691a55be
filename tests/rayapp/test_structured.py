"""Structured output: what the masks let through obeys, whatever is chosen; what cannot be obeyed is refused in time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedModel

from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from rayapp import grammar_text, structured
from rayapp.failures import Overloaded
from rayapp.structured import Compiler, GrammarConstraint, check
from rayapp.text.detokenizer import Detokenizer
from rayapp.text.tokenizer import Tokenizer
from tests.conftest import wait_limit
from tests.harness import Stepper, collect, running, tokens
from tests.models import SMOL_VOCAB

EOS, OTHER_EOS = 2, 0
PADDED = SMOL_VOCAB + 100  # rows of logits without tokens
LONGEST = 200

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "Grün", "日本", 'a"b']}, "maxItems": 3},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "tags", "zip", "where"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number", "multipleOf": 0.5}, "ok": {"const": True}},
            "required": ["x", "ok"],
            "additionalProperties": False,
        }
    },
}
RECURSIVE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
            "required": ["children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
UNION = {
    "oneOf": [
        {"type": "object", "properties": {"k": {"const": k}, k: {"type": "boolean"}}, "required": ["k", k]}
        | {"additionalProperties": False}
        for k in ("a", "b")
    ]
}
SCHEMAS = [PERSON, RECURSIVE, UNION, {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}, {"const": "ü\n"}]
REGEXES = [
    r"(yes|no|[0-9]{1,3}(\.[0-9]{2})?)",
    r"[A-Z]{2}/[0-9]{4}\n[a-f]?",
    r"(?i)hello,? (w[öo]rld|\p{Han}{1,3})!",
    r"<\|im_start\|>x{0,2}",
    "",
]
CHOICES = [["yes", "no"], ["a", "ab", "a b"], ["日本😀", '\n\t"\\', "<|im_end|>"], ["", "x"]]
SUM = 'start: TERM ("+" TERM)~0..3\nTERM: /[1-9][0-9]?/  // "+" <none>\n'


@pytest.fixture(scope="module")
def tokenizer(smol_path: Path) -> Tokenizer:
    return Tokenizer.load(smol_path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, PADDED, [EOS, OTHER_EOS])


def ask(kind: str, value: Any = None) -> dict[str, Any]:
    return {"kind": kind, "value": value}


@cache
def closing_tokens(tokenizer: Tokenizer) -> Any:
    """bool [vocabulary]: those that begin with what ends a value."""
    return np.array([tokenizer.token_bytes(i)[:1] in (b'"', b"}", b"]", b",") for i in range(SMOL_VOCAB)])


def walk(constraint: GrammarConstraint, tokenizer: Tokenizer, seed: int) -> tuple[list[int], bool]:
    """Tokens chosen at random from the masks, and whether they came to an end. Prefers short ends to long texts."""
    rng = np.random.default_rng(seed)
    closing = closing_tokens(tokenizer)
    output: list[int] = []
    while len(output) < LONGEST:
        mask = constraint.allowed(output)
        ids = np.flatnonzero(mask)
        assert mask.shape == (PADDED,) and len(ids) and ids[-1] < SMOL_VOCAB
        assert not set(ids.tolist()) & (tokenizer.special_ids - {EOS, OTHER_EOS})
        assert mask[EOS] == mask[OTHER_EOS]
        if mask[EOS] and (len(ids) == 2 or rng.random() < 0.3):
            return output, True
        ids = ids[(ids != EOS) & (ids != OTHER_EOS)]
        ending = ids[closing[ids]]
        output.append(int(rng.choice(ending if len(ending) and rng.random() < 0.3 else ids)))
    return output, False


def text_of(tokenizer: Tokenizer, output: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push(output) + detokenizer.finish()
    assert text.encode() == b"".join(map(tokenizer.token_bytes, output))
    return text


@given(seed=st.integers(0, 2**32), schema=st.sampled_from(SCHEMAS))
@settings(max_examples=30)
def test_any_way_through_a_schema_is_valid(
    compiler: Compiler, tokenizer: Tokenizer, seed: int, schema: dict[str, Any]
) -> None:
    output, ended = walk(compiler.constraint(ask("json_schema", schema)), tokenizer, seed)
    assert ended or schema is RECURSIVE
    if ended:
        jsonschema.validate(json.loads(text_of(tokenizer, output)), schema)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=15)
def test_any_way_through_json_object_is_an_object(compiler: Compiler, tokenizer: Tokenizer, seed: int) -> None:
    output, ended = walk(compiler.constraint(ask("json_object")), tokenizer, seed)
    text = text_of(tokenizer, output) if ended else ""
    assert not ended or isinstance(json.loads(text), dict)
    assert not re.search(r"[ \t\n\r]{33}", re.sub(r'"(\\.|[^"\\])*"', "-", text))


@given(seed=st.integers(0, 2**32), pattern=st.sampled_from(REGEXES))
@settings(max_examples=20)
def test_any_way_through_a_regex_matches_it(compiler: Compiler, tokenizer: Tokenizer, seed: int, pattern: str) -> None:
    output, ended = walk(compiler.constraint(ask("regex", pattern)), tokenizer, seed)
    python = pattern.replace(r"\p{Han}", "[\u2e80-\U0003ffff]")
    assert ended and re.fullmatch(python, text_of(tokenizer, output))


@given(seed=st.integers(0, 2**32), choices=st.sampled_from(CHOICES))
@settings(max_examples=20)
def test_any_way_through_choices_is_one_of_them(
    compiler: Compiler, tokenizer: Tokenizer, seed: int, choices: list[str]
) -> None:
    output, ended = walk(compiler.constraint(ask("choice", choices)), tokenizer, seed)
    assert ended and text_of(tokenizer, output) in choices


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_any_way_through_a_grammar_follows_it(compiler: Compiler, tokenizer: Tokenizer, seed: int) -> None:
    output, ended = walk(compiler.constraint(ask("grammar", SUM)), tokenizer, seed)
    assert ended and re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){0,3}", text_of(tokenizer, output))


@given(data=st.data(), seeds=st.lists(st.integers(0, 2**32), min_size=2, max_size=4))
@settings(max_examples=12)
def test_masks_depend_on_the_output_alone(
    compiler: Compiler, tokenizer: Tokenizer, data: st.DataObject, seeds: list[int]
) -> None:
    """One object, asked by several choices in any order, some of them twice, back and from the middle on."""
    structure = ask("json_schema", PERSON)
    outputs = [walk(compiler.constraint(structure), tokenizer, seed)[0] for seed in seeds]
    shared = compiler.constraint(structure)
    fresh: dict[tuple[int, ...], Any] = {}
    for _ in range(12):
        output = data.draw(st.sampled_from(outputs))
        position = data.draw(st.integers(0, len(output)))
        for prefix in (output[:position], output[: position + 1]):
            key = tuple(prefix)
            if key not in fresh:
                fresh[key] = compiler.constraint(structure).allowed(prefix)
            assert (shared.allowed(prefix) == fresh[key]).all()


def test_more_choices_than_states_are_kept(compiler: Compiler, tokenizer: Tokenizer) -> None:
    shared = compiler.constraint(ask("regex", "[a-z]{3} .*"))
    letters = [tokenizer.encode(chr(97 + i % 26) + chr(97 + i // 26) + "c")[:1] for i in range(100)]
    for _ in range(2):
        for output in letters:
            expected = compiler.constraint(ask("regex", "[a-z]{3} .*")).allowed(output)
            assert (shared.allowed(output) == expected).all()
    assert len(shared._states) == structured.KEPT_STATES


def test_after_the_end_only_ending_tokens_may_come(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.constraint(ask("choice", ["yes"]))
    yes = tokenizer.encode("yes")
    for output in (yes, [*yes, EOS], [*yes, OTHER_EOS, EOS, EOS]):
        assert np.flatnonzero(constraint.allowed(output)).tolist() == [OTHER_EOS, EOS]
    with pytest.raises(ValueError, match=r"token \d+ at position 1 of the output does not follow it"):
        constraint.allowed([*yes, *yes])
    assert np.flatnonzero(constraint.allowed(yes)).tolist() == [OTHER_EOS, EOS]


def test_a_model_without_an_end_or_with_an_unknown_tokenizer(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no token that ends an output"):
        Compiler(tokenizer, SMOL_VOCAB, [SMOL_VOCAB]).constraint(ask("json_object"))


def nested(depth: int) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[tuple[str, Any, str]] = [
    ("xml", None, "unknown kind 'xml' of structure; these are json_object, "),
    ("json_object", {}, "takes no value"),
    ("json_schema", "{}", "expected a JSON schema, which is an object or a boolean, and got str"),
    ("json_schema", False, "the JSON schema: Unsatisfiable schema"),
    ("json_schema", {"type": "string", "pattern": "(?=x)"}, "look-around, including look-ahead"),
    ("json_schema", {"type": "object", "propertyNames": {"minLength": 3}}, r'Unimplemented keys: \["propertyNames"\]'),
    ("json_schema", {"$ref": "http://example.com/x.json"}, "does not fetch resources"),
    ("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable schema: incompatible types"),
    ("json_schema", {"$ref": "#"}, "no text can follow it"),
    ("json_schema", {"type": "string", "maxLength": float("nan")}, "Out of range float values"),
    ("json_schema", {"type": "strng"}, "strng"),
    ("json_schema", nested(500), "recursion limit"),
    ("json_schema", nested(100_000), "nested too deeply"),
    ("json_schema", {"enum": ["x" * 70_000]}, "the schema has 70014 bytes; at most 65536 are taken"),
    ("json_schema", {"type": "integer", "multipleOf": 1_000_003}, "multiples of 1000003, and 10000 is the largest"),
    (
        "json_schema",
        {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
        "multiples of 99400891, and",
    ),
    (
        "json_schema",
        {"allOf": [{"anyOf": [{"pattern": f"a{i}.*"}, {"pattern": f"b{i}.*"}]} for i in range(20)]},
        "too large",
    ),
    ("regex", None, "expected a regular expression as a string, and got NoneType"),
    ("regex", "(a", "(?s)the regular expression: .*unclosed group"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "a[^\\s\\S]", "no text can follow it"),
    ("regex", "(" * 1000 + "a" + ")" * 1000, r"\.\.\.$"),
    ("regex", "\ud800", "."),
    ("regex", "x" * 70_000, "a regular expression has 70000 bytes; at most 65536"),
    ("choice", [], "one or more strings"),
    ("choice", ["a", 1], "one or more strings"),
    ("choice", ["a"] * 1001, "there are 1001 strings to choose from; at most 1000"),
    ("choice", ["é" * 40_000], "the list of strings has 80000 bytes"),
    ("choice", ["\ud800"], "."),
    ("grammar", "start: missing", 'the grammar: .*unknown name: "missing"'),
    ("grammar", 'root ::= "a"', "must be in Lark's syntax"),
    ("grammar", "start: <|im_start|>", "names special tokens"),
    ("grammar", 'start: "a" # "\n | <[1-5]>', "names special tokens"),
    ("grammar", '%llguidance {"no_forcing": false}\nstart: "a"', "directive %llguidance is not taken"),
    ("grammar", "start: start", "no text can follow it"),
    ("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "too deeply nested"),
]


@pytest.mark.parametrize(("kind", "value", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused_says_why(tokenizer: Tokenizer, compiler: Compiler, kind: str, value: Any, reason: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(ValueError, match=reason) as refused:
            check(ask(kind, value), tokenizer)
        assert len(str(refused.value)) < 2 * structured.REASON_LENGTH
    with pytest.raises(ValueError):
        compiler.constraint(ask(kind, value))


# Each held the library up for seconds to minutes until it was asked otherwise.
HARD = [
    ask("regex", "x{1000}{1000}{1000}"),
    ask("regex", "[ab](((x{50}){50}){50}){50}"),
    ask("regex", "(" * 40 + "x" + "){2}" * 40),
    ask("grammar", 'start: "q" A\nA: B{1000}\nB: C{1000}\nC: /x{1000}/'),
    ask("grammar", 'start: "q" a{1000}\na: b{1000}\nb: "x"{1000}'),
    ask("json_schema", {"type": "array", "items": {"const": 1}, "minItems": 1_000_000}),
    ask("json_schema", {"type": "string", "pattern": "^((x{1000}){1000}){1000}$"}),
]


@pytest.mark.parametrize("structure", HARD, ids=range(len(HARD)))
def test_hard_ones_take_no_time(tokenizer: Tokenizer, compiler: Compiler, structure: dict[str, Any]) -> None:
    started = time.monotonic()
    check(structure, tokenizer)
    constraint = compiler.constraint(structure)
    output: list[int] = []
    while len(output) < 20:
        output.append(int(np.flatnonzero(constraint.allowed(output))[-1]))
    assert time.monotonic() - started < wait_limit(10), "not a measure of speed: it hung"


def test_what_does_not_compile_in_time_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    running_now: list[str] = []

    def stuck(self: Compiler, text: str) -> None:
        running_now.append(text)
        assert release.wait(wait_limit(30))

    monkeypatch.setattr(Compiler, "compile", stuck)
    for i in range(structured.COMPILES_AT_ONCE):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"the list of choices: it could not be compiled within 0\.05 s"):
                check(ask("choice", ["stuck", str(i)]), tokenizer, limit_s=0.05)
    assert len(running_now) == structured.COMPILES_AT_ONCE, "what was too slow once is not tried again"
    with pytest.raises(Overloaded, match="still being compiled"):
        check(ask("choice", ["late"]), tokenizer, limit_s=0.05)
    release.set()
    check(ask("choice", ["late"]), tokenizer, limit_s=wait_limit(10))


def test_threads_may_check_and_compile_at_once(tokenizer: Tokenizer, compiler: Compiler) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                structure = ask("choice", [f"{number % 2}-{i}", "other"])
                check(structure, tokenizer)
                walk(compiler.constraint(structure), tokenizer, number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(wait_limit(30))
    assert not failures


def test_checking_loads_no_torch(smol_path: Path) -> None:
    child = (
        "import sys; from rayapp.structured import check; from rayapp.text.tokenizer import Tokenizer;"
        "check({'kind': 'json_object', 'value': None}, Tokenizer.load(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", child, str(smol_path)], check=True, timeout=wait_limit(60))


# --- in the engine

GREEDY = GenerationConfig(do_sample=False, eos_token_id=EOS)
IN_ENGINE = ask(
    "json_schema",
    {
        "type": "object",
        "properties": PERSON["properties"] | {"name": {"enum": ["Anna", "Otto", "Zoë"]}, "where": {"type": "boolean"}},
        "required": PERSON["required"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    },
)


@pytest.fixture(scope="module")
def model_compiler(smol_path: Path) -> Compiler:
    return Compiler(smol_path, SMOL_VOCAB, [EOS])


def prompt(i: int) -> list[int]:
    return tokens(i, 40, SMOL_VOCAB)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_obeys_also_under_preemption(
    tiny_http: PreTrainedModel, model_compiler: Compiler, tokenizer: Tokenizer, sampled: bool, overlap: bool
) -> None:
    config = GenerationConfig(do_sample=sampled, temperature=0.5, top_k=0, eos_token_id=EOS)

    def generate(**fields: Any) -> tuple[list[Request], Stepper]:
        stepper = Stepper(tiny_http, config, overlap=overlap, per_request_processors=True, safety_margin=0.0, **fields)
        shared = model_compiler.constraint(IN_ENGINE)
        requests = [stepper.add(prompt(i), 90, constraint=shared, seed=i) for i in range(4)]
        stepper.drain()
        return requests, stepper

    calm, _ = generate(num_blocks=128)
    tight, stepper = generate(num_blocks=9)
    assert stepper.core.scheduler.num_preemptions > 0
    assert [request.output_ids for request in tight] == [request.output_ids for request in calm]
    for request in calm:
        assert request.output_ids[-1] == EOS
        jsonschema.validate(json.loads(tokenizer.decode(request.output_ids)), IN_ENGINE["value"])


def test_what_was_begun_elsewhere_goes_on_as_it_would_have(
    tiny_http: PreTrainedModel, model_compiler: Compiler
) -> None:
    with running(tiny_http, GREEDY, per_request_processors=True) as manager:

        def run(output_ids: list[int]) -> list[int]:
            constraint = model_compiler.constraint(IN_ENGINE)
            request_id = manager.add_request(
                prompt(1), max_new_tokens=150, output_ids=output_ids, constraint=constraint
            )
            return collect(manager, [str(request_id)])[0].generated_tokens

        whole = run([])
        for known in (1, 7, len(whole) - 1):
            assert run(whole[:known]) == whole


def first_tokens(sampler_fields: dict[str, Any], output: list[int]) -> tuple[list[int], dict[int, str]]:
    import torch

    sampler = Sampler(SMOL_VOCAB)
    request = Request("r", [5, *output], 1, SamplingParams(max_new_tokens=9, **sampler_fields))
    outcome = sampler(torch.zeros(1, SMOL_VOCAB), sampler.plan([request])).read()
    return outcome.token_ids, outcome.errors


def test_the_end_of_the_grammar_outweighs_min_tokens(model_compiler: Compiler, tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = {"min_new_tokens": 5, "eos_token_ids": (EOS,)}
    yes = model_compiler.constraint(ask("choice", ["yes"]))
    assert first_tokens(fields | {"constraint": yes}, tokenizer.encode("yes")) == ([EOS], {})
    either = model_compiler.constraint(ask("choice", ["yes", "yes!"]))  # where it may go on, it must
    assert first_tokens(fields | {"constraint": either}, tokenizer.encode("yes")) == (tokenizer.encode("!"), {})


@pytest.mark.parametrize("value", [3, 2.5, 0.01, 1e-7, 1e22, 10_000, 12_300_000])
def test_multiples_that_are_taken(value: float) -> None:
    grammar_text.grammar_text(ask("json_schema", {"type": "number", "multipleOf": value}))


def test_a_property_may_be_called_multiple_of(tokenizer: Tokenizer) -> None:
    check(ask("json_schema", {"type": "object", "properties": {"multipleOf": {"type": "integer"}}}), tokenizer)
