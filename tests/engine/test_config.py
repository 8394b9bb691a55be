"""ContinuousBatchingConfig: defaults, ranges, deprecated names, and that no field is accepted and dropped."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CompileConfig

from engine.acceleration import Capabilities
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.facts import ModelFacts
from engine.settings import Settings, resolve

FACTS = ModelFacts(2, 2, 4, 16, 4, 256, 512, "cuda", (None,) * 2)
DEVICE = Capabilities(graphs=True, block_tables=True)
FIELDS = {field.name: field for field in dataclasses.fields(ContinuousBatchingConfig)}
THEIRS = {field.name: field for field in dataclasses.fields(transformers.ContinuousBatchingConfig)}
PAGE_SIZE = "page_size" if "page_size" in THEIRS else "block_size"  # up to transformers 5.17

# Every field the guide names.
GUIDE = {
    "max_memory_percent", "page_size", "block_size", "scheduler_type", "max_batch_tokens", "num_blocks",
    "max_requests_per_batch", "safety_margin", "return_logprobs", "use_cuda_graph", "q_padding_interval_size",
    "kv_padding_interval_size", "use_async_batching", "default_compile_level", "varlen_compile_config",
    "decode_compile_config", "max_blocks_per_request", "cpu_offload_space", "cpu_offload_space_safety_threshold",
    "cpu_group_timeout", "allow_block_sharing", "per_request_processors", "auto_switch_to_flash",
}  # fmt: skip

# One value per field that changes the settings, the setting it changes, and what must come with it.
EFFECTIVE: dict[str, tuple[Any, str]] = {
    "page_size": (8, "page_size"),
    "num_blocks": (77, "num_blocks"),
    "max_batch_tokens": (300, "max_batch_tokens"),
    "max_memory_percent": (0.01, "num_blocks"),
    "max_requests_per_batch": (3, "max_requests"),
    "max_blocks_per_request": (64, "max_blocks_per_request"),
    "allow_block_sharing": (False, "sharing"),
    "use_async_batching": (False, "async_batching"),
    "use_cuda_graph": (True, "graphs"),
    "q_padding_interval_size": (128, "q_padding"),
    "kv_padding_interval_size": (1024, "kv_padding"),
    "varlen_compile_config": (CompileConfig(mode="default"), "mixed_compile"),
    "decode_compile_config": (CompileConfig(dynamic=True), "decode_compile"),
    "default_compile_level": (2, "decode_compile"),
    "scheduler_type": ("prefill_first", "scheduler_type"),
    "safety_margin": (0.5, "safety_margin"),
    "return_logprobs": (True, "return_logprobs"),
    "seed": (11, "seed"),
    "auto_switch_to_flash": (False, "auto_switch_to_flash"),
    "cpu_offload_space": (0.5, "host_slots"),
    "max_queue_size": (10, "max_queue_size"),
    "weight_quantization": ("int8", "weight_quantization"),
    "release_weights": (True, "release_weights"),
    "per_request_processors": (True, "per_request_processors"),
    "drop_unsupported_processors": (True, "drop_unsupported_processors"),
    "cpu_group_timeout": (600.0, "cpu_group_timeout"),
}
ELSEWHERE = {
    "cpu_offload_space_safety_threshold",  # test_settings.py: only with cpu_offload_space
    "disable_nccl_graph_mixing",  # below: acts when a config is made
}
OURS = {"drop_unsupported_processors", "release_weights", "weight_quantization"}  # that transformers has not
DEPRECATED = {"block_size", "use_default_compile_configs", "max_cached_graphs"}


def settings(**config: Any) -> Settings:
    """On a device that can do everything."""
    full = ContinuousBatchingConfig(**({"seed": 0} | config))
    return resolve(full, FACTS, memory=1 << 30, host_memory=1 << 30, capabilities=DEVICE)


def test_every_field_is_there() -> None:
    assert FIELDS.keys() >= GUIDE
    assert THEIRS.keys() <= FIELDS.keys()


def test_every_field_acts() -> None:
    assert FIELDS.keys() == EFFECTIVE.keys() | DEPRECATED | ELSEWHERE


def test_defaults_are_those_of_transformers() -> None:
    ours = {name: field.default for name, field in FIELDS.items() if name in THEIRS}
    theirs = {name: field.default for name, field in THEIRS.items()}
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert differing == {PAGE_SIZE, "drop_unsupported_processors"}
    assert FIELDS["page_size"].default is None  # by device


@pytest.mark.parametrize("name", EFFECTIVE)
def test_effective_field(name: str) -> None:
    value, setting = EFFECTIVE[name]
    assert getattr(settings(**{name: value}), setting) != getattr(settings(), setting)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("page_size", [3, 0, -1, True, 4.0, "256"]),
        ("num_blocks", [0, -5, 1.5]),
        ("max_batch_tokens", [0, -1, "8192"]),
        ("max_memory_percent", [0, 0.0, -0.1, 1.01, 80, True, "0.9", float("nan")]),
        ("max_requests_per_batch", [0, -1, 2.0]),
        ("max_blocks_per_request", [-1, 0.5]),
        ("allow_block_sharing", [None, 1, "yes"]),
        ("use_async_batching", ["auto", 2]),
        ("use_cuda_graph", ["yes", (True,), (True, False, True), 7, (None, True)]),
        ("q_padding_interval_size", [-1, None]),
        ("kv_padding_interval_size", [-1, 0.5]),
        ("default_compile_level", [-1, 4, True]),
        ("varlen_compile_config", [3, "default", {"mode": 3}, {"options": 3}, {"dynamic": "yes"}]),
        ("decode_compile_config", [3, {"speed": 3}]),
        ("scheduler_type", ["lifo", None, 3, []]),
        ("safety_margin", [-0.01, 1.01, "0.1", True]),
        ("return_logprobs", [1, None]),
        ("seed", ["7", 7.0, True]),
        ("auto_switch_to_flash", [None]),
        ("cpu_offload_space", [-1.0, float("inf")]),
        ("cpu_offload_space_safety_threshold", [-0.1, 1.1, None]),
        ("max_queue_size", [-1]),
        ("weight_quantization", ["int4", 8, True]),
        ("release_weights", [None, 1]),
        ("per_request_processors", ["true"]),
        ("drop_unsupported_processors", [None]),
        ("disable_nccl_graph_mixing", [0]),
        ("cpu_group_timeout", [-1.0, 0, "300", float("inf")]),
    ],
)
def test_out_of_range_is_a_value_error_naming_field_and_value(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name) as error:
            ContinuousBatchingConfig(**{name: value})
        assert str(value) in str(error.value) or "speed" in str(error.value)


def test_async_batching_needs_graphs() -> None:
    for off in (False, (False, False), [False, False]):
        with pytest.raises(ValueError, match="use_async_batching=True needs CUDA graphs"):
            ContinuousBatchingConfig(use_async_batching=True, use_cuda_graph=off)  # type: ignore[arg-type]
    ContinuousBatchingConfig(use_async_batching=True, use_cuda_graph=(True, False))
    ContinuousBatchingConfig(use_async_batching=True)
    ContinuousBatchingConfig(use_async_batching=False, use_cuda_graph=False)


@pytest.mark.parametrize("config", [CompileConfig(fullgraph=True), {"fullgraph": True}])
def test_one_graph_of_the_whole_model_is_refused(config: Any) -> None:
    for name in ("varlen_compile_config", "decode_compile_config"):
        with pytest.raises(NotImplementedError, match=f"{name} sets fullgraph"):
            ContinuousBatchingConfig(**{name: config})


@pytest.mark.parametrize("margin", [0, 0.0, 1, 0.15])
def test_margin_borders(margin: float) -> None:
    assert settings(safety_margin=margin).safety_margin == margin


@pytest.mark.parametrize(
    ("processes", "before", "wanted", "after"),
    [
        ("2", None, True, "0"),
        ("2", "1", True, "1"),
        ("2", None, False, None),
        ("1", None, True, None),
        ("", None, True, None),
    ],
)
def test_graph_mixing_of_nccl(
    processes: str, before: str | None, wanted: bool, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", before or "")
    if before is None:
        monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT")
    ContinuousBatchingConfig(disable_nccl_graph_mixing=wanted)
    assert os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == after


def test_block_size_is_page_size() -> None:
    with pytest.warns(FutureWarning, match="block_size.*page_size") as caught:
        config = ContinuousBatchingConfig(block_size=16)
    assert config == ContinuousBatchingConfig(page_size=16)
    assert Path(caught[0].filename) == Path(__file__)  # it points at the caller
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="page_size is 2"):
        ContinuousBatchingConfig(block_size=2)
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match=r"block_size=16.*page_size=32"):
        ContinuousBatchingConfig(block_size=16, page_size=32)


def test_other_deprecated_names() -> None:
    with pytest.warns(FutureWarning, match="default_compile_level"):
        assert ContinuousBatchingConfig(use_default_compile_configs=False) == ContinuousBatchingConfig()
    with pytest.warns(FutureWarning):
        config = ContinuousBatchingConfig(use_default_compile_configs=True)
    assert config == ContinuousBatchingConfig(default_compile_level=3)
    with pytest.warns(FutureWarning, match="max_cached_graphs"):
        assert ContinuousBatchingConfig(max_cached_graphs=4) == ContinuousBatchingConfig()


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ContinuousBatchingConfig().page_size = 8  # type: ignore[misc]
    with pytest.warns(FutureWarning):
        config = ContinuousBatchingConfig(block_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(config, num_blocks=4).page_size == 16


def test_every_field_has_help() -> None:
    help_text = ContinuousBatchingConfig.help_text()
    assert help_text.keys() == FIELDS.keys()
    assert all(len(text) > 20 for name, text in help_text.items() if name not in DEPRECATED)


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="no field 'scheduler'; did you mean 'scheduler_type'"):
        ContinuousBatchingConfig(scheduler="fifo")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no field 'x'; its fields are page_size, num_blocks"):
        ContinuousBatchingConfig(x=1)  # type: ignore[call-arg]


def test_from_dict() -> None:
    assert ContinuousBatchingConfig.from_dict({"page_size": 8, "safety_margin": 0}).page_size == 8
    with pytest.raises(ValueError, match="max_batch_token'.*did you mean 'max_batch_tokens'"):
        ContinuousBatchingConfig.from_dict({"max_batch_token": 8})
    with pytest.raises(ValueError, match=r"'x'; its fields are page_size"):
        ContinuousBatchingConfig.from_dict({"x": 8})


def test_non_default() -> None:
    assert ContinuousBatchingConfig().non_default() == {}
    assert ContinuousBatchingConfig(seed=0, page_size=8).non_default() == {"seed": 0, "page_size": 8}


class TestFromTransformers:
    def test_defaults_count_as_not_set(self) -> None:
        theirs = transformers.ContinuousBatchingConfig()
        assert ContinuousBatchingConfig.from_transformers(theirs) == ContinuousBatchingConfig()

    @pytest.mark.parametrize("name", sorted(EFFECTIVE.keys() - OURS))
    def test_what_is_set_is_kept(self, name: str) -> None:
        if name not in THEIRS and name != "page_size":
            pytest.skip("this version of transformers has no such field")
        value, _ = EFFECTIVE[name]
        theirs = transformers.ContinuousBatchingConfig(**{PAGE_SIZE if name == "page_size" else name: value})
        assert ContinuousBatchingConfig.from_transformers(theirs) == ContinuousBatchingConfig(**{name: value})

    def test_dropping_settings_must_be_asked_for_here(self) -> None:
        theirs = transformers.ContinuousBatchingConfig(drop_unsupported_processors=True)  # their default
        assert ContinuousBatchingConfig.from_transformers(theirs).drop_unsupported_processors is False

    def test_explicit_256_is_their_default(self) -> None:
        theirs = transformers.ContinuousBatchingConfig(**{PAGE_SIZE: 256})
        assert ContinuousBatchingConfig.from_transformers(theirs).page_size is None

    def test_the_only_name_of_earlier_versions_is_not_deprecated(self) -> None:
        @dataclasses.dataclass
        class Earlier:
            block_size: int = 256
            max_batch_tokens: int | None = None

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ContinuousBatchingConfig.from_transformers(Earlier(block_size=16)).page_size == 16
            assert ContinuousBatchingConfig.from_transformers(Earlier()).page_size is None

    @pytest.mark.skipif(PAGE_SIZE == "block_size", reason="this version of transformers has no other name")
    def test_deprecated_name(self) -> None:
        theirs = transformers.ContinuousBatchingConfig(block_size=16)
        with pytest.warns(FutureWarning, match="block_size"):
            assert ContinuousBatchingConfig.from_transformers(theirs).page_size == 16

    def test_invalid(self) -> None:
        with pytest.raises(ValueError, match="page_size is 2"):
            ContinuousBatchingConfig.from_transformers(transformers.ContinuousBatchingConfig(**{PAGE_SIZE: 2}))

    def test_a_field_that_we_do_not_know(self) -> None:
        @dataclasses.dataclass
        class Newer(transformers.ContinuousBatchingConfig):
            hyperspace: int = 0
            lanes: list[int] = dataclasses.field(default_factory=list)

        assert ContinuousBatchingConfig.from_transformers(Newer(**{PAGE_SIZE: 8})) == ContinuousBatchingConfig(
            page_size=8
        )
        with pytest.raises(NotImplementedError, match="hyperspace=3"):
            ContinuousBatchingConfig.from_transformers(Newer(hyperspace=3))

    def test_other_objects(self) -> None:
        ours = ContinuousBatchingConfig(page_size=8)
        assert ContinuousBatchingConfig.from_transformers(ours) is ours
        for other in (None, {}, {"page_size": 8}, 3, transformers.ContinuousBatchingConfig, WorkloadHints()):
            with pytest.raises(TypeError, match="ContinuousBatchingConfig"):
                ContinuousBatchingConfig.from_transformers(other)


def test_workload_hints() -> None:
    assert WorkloadHints() == WorkloadHints(max_prompt_length=0, max_generated_length=0, num_requests=0)
    for value in (-1, 1.5, "3", True):
        with pytest.raises(ValueError, match="num_requests"):
            WorkloadHints(num_requests=value)  # type: ignore[arg-type]
