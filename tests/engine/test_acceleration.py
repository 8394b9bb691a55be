"""How steps run, by config and device: the decode fast path, CUDA graphs, async batching, compilation."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from engine import build
from engine.acceleration import Capabilities, CompileSettings
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.facts import ModelFacts
from engine.model.shadow import model_facts
from engine.settings import Settings, resolve
from tests.models import build_tiny

CPU = ModelFacts(4, 2, 4, 16, 2, 4096, 512, "cpu", (None,) * 4)
CUDA = dataclasses.replace(CPU, device_type="cuda")
PLAIN = Capabilities(graphs=True)
KERNEL = Capabilities(graphs=True, block_tables=True)
TRITON = Capabilities(graphs=True, block_tables=True, splits=True, mixed_graphs=True)
FLASH = Capabilities(graphs=True, block_tables=True, flash=True)


def settle(
    facts: ModelFacts = CUDA, device: Capabilities | None = KERNEL, hints: WorkloadHints | None = None, **config: Any
) -> Settings:
    return resolve(ContinuousBatchingConfig(**config), facts, hints, memory=8 << 30, capabilities=device)


def on_cpu(**config: Any) -> Settings:
    return settle(CPU, None, **config)


def test_capabilities_by_device() -> None:
    assert Capabilities.of("cpu") == Capabilities.of("mps") == Capabilities(False, False, False)
    assert Capabilities.of("cuda") == PLAIN
    assert Capabilities.of("cuda", triton=True) == TRITON


class TestDecodeFastPath:
    def test_without_hints_it_is_for_the_context(self) -> None:
        assert settle().max_blocks_per_request == 4096 // 256
        assert settle(hints=WorkloadHints(max_prompt_length=500)).max_blocks_per_request == 4096 // 256
        assert settle(hints=WorkloadHints(max_generated_length=500)).max_blocks_per_request == 4096 // 256
        assert settle(page_size=1000).max_blocks_per_request == 5

    @pytest.mark.parametrize(
        ("context", "page", "blocks"), [(None, 256, 32), (40_000, 256, 128), (40_000, 16, 512), (9000, 16, 512)]
    )
    def test_without_hints_it_has_bounds(self, context: int | None, page: int, blocks: int) -> None:
        facts = dataclasses.replace(CUDA, context_length=context)
        assert settle(facts, page_size=page).max_blocks_per_request == blocks
        assert settle(facts, PLAIN, page_size=page, use_cuda_graph=True).max_blocks_per_request == 32

    def test_partial_results_of_a_kernel_that_splits_contexts_bound_it(self) -> None:
        """To a 32nd of the memory: here 1.8 GiB, for 1024 rows of 32 heads of 128 numbers each 256 tokens."""
        large = dataclasses.replace(CUDA, num_heads=32, head_dim=128, context_length=131_072)

        def blocks(device: Capabilities, memory: int, **config: Any) -> int:
            full = ContinuousBatchingConfig(**config)
            return resolve(full, large, memory=memory << 30, capabilities=device).max_blocks_per_request

        assert blocks(KERNEL, 64) == 128
        assert blocks(TRITON, 64) == 64 * 0.9 * 2**30 // 32 // (1024 * 32 * 130 * 4) == 113
        assert blocks(TRITON, 64, max_requests_per_batch=64) == 128
        assert blocks(TRITON, 8) < 20
        assert blocks(TRITON, 8, max_blocks_per_request=100) == 100

    @pytest.mark.parametrize(("prompt", "generated", "blocks"), [(10, 6, 2), (11, 6, 4), (32, 1, 4), (64, 16, 6)])
    def test_from_hints(self, prompt: int, generated: int, blocks: int) -> None:
        hints = WorkloadHints(max_prompt_length=prompt, max_generated_length=generated)
        assert settle(hints=hints, page_size=16).max_blocks_per_request == blocks

    def test_explicit(self) -> None:
        hints = WorkloadHints(max_prompt_length=10, max_generated_length=10)
        assert settle(hints=hints, max_blocks_per_request=63).max_blocks_per_request == 63

    def test_0_switches_it_off_silently(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            assert settle(max_blocks_per_request=0).max_blocks_per_request == 0
            assert on_cpu(max_blocks_per_request=0).max_blocks_per_request == 0
        assert not caplog.text

    @pytest.mark.parametrize(("facts", "device"), [(CPU, None), (CUDA, PLAIN)], ids=["cpu", "cuda without a kernel"])
    def test_without_a_kernel_it_is_off_and_said_only_if_asked(
        self, facts: ModelFacts, device: Capabilities | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            assert settle(facts, device).max_blocks_per_request == 0
        assert not caplog.text
        assert settle(facts, device, max_blocks_per_request=64).max_blocks_per_request == 0
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "max_blocks_per_request is 64" in caplog.text

    def test_without_a_kernel_steps_that_are_replayed_have_it(self, caplog: pytest.LogCaptureFixture) -> None:
        assert settle(CUDA, PLAIN, use_cuda_graph=(False, True)).max_blocks_per_request == 16
        assert settle(CUDA, PLAIN, use_async_batching=True).max_blocks_per_request == 16
        assert settle(CUDA, PLAIN, use_cuda_graph=True, max_blocks_per_request=64).max_blocks_per_request == 64
        assert not caplog.text
        assert settle(CUDA, PLAIN, use_cuda_graph=(True, False)).max_blocks_per_request == 0

    def test_a_kernel_takes_layers_with_a_window(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hybrid = dataclasses.replace(CUDA, windows=(None, None, None, 64))
        with caplog.at_level(logging.INFO):
            found = settle(hybrid, max_blocks_per_request=64)
        assert found.max_blocks_per_request == 64 and found.graphs == (False, True)
        assert not caplog.text

    def test_layers_with_a_window_and_no_kernel_force_0_and_it_is_said(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        groups = settle().groups
        monkeypatch.setattr("engine.settings.plan_groups", lambda windows: groups)
        hybrid = dataclasses.replace(CUDA, windows=(None, None, None, 64))
        with caplog.at_level(logging.INFO):
            assert settle(hybrid, PLAIN, use_cuda_graph=True).max_blocks_per_request == 0
            found = settle(hybrid, PLAIN, use_cuda_graph=True, max_blocks_per_request=64)
        assert found.max_blocks_per_request == 0 and found.graphs == (True, False)
        assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
        assert all("sliding window" in record.getMessage() for record in caplog.records)


class TestGraphs:
    @pytest.mark.parametrize(
        ("config", "graphs"),
        [
            ({}, (False, True)),
            ({"use_cuda_graph": True}, (True, True)),
            ({"use_cuda_graph": False}, (False, False)),
            ({"use_cuda_graph": (True, False)}, (True, False)),
            ({"use_cuda_graph": [False, True]}, (False, True)),
            ({"q_padding_interval_size": 64}, (True, True)),
            ({"kv_padding_interval_size": 64}, (True, True)),
            ({"q_padding_interval_size": 64, "use_cuda_graph": False}, (False, False)),
            ({"use_async_batching": True}, (False, True)),
            ({"use_async_batching": False}, (False, True)),
            ({"max_blocks_per_request": 0}, (False, False)),
            ({"use_async_batching": True, "use_cuda_graph": (False, True)}, (False, True)),
            ({"use_cuda_graph": True, "max_blocks_per_request": 0}, (True, False)),
        ],
    )
    def test_who_asks_for_them(self, config: dict[str, Any], graphs: tuple[bool, bool]) -> None:
        assert settle(**config).graphs == graphs

    def test_only_small_mixed_steps_are_recorded_unless_they_are_asked_for(self) -> None:
        assert settle(CUDA, TRITON).recorded_tokens == 512
        for config in ({"use_cuda_graph": True}, {"use_cuda_graph": (True, False)}, {"q_padding_interval_size": 64}):
            assert settle(CUDA, TRITON, **config).recorded_tokens is None

    def test_without_a_kernel_they_are_on_only_where_asked_for(self, caplog: pytest.LogCaptureFixture) -> None:
        assert settle(CUDA, TRITON).graphs == (True, True)
        assert settle(CUDA, PLAIN).graphs == (False, False)
        assert settle(CUDA, PLAIN, use_async_batching=True).graphs == (False, True)
        assert settle(CUDA, PLAIN, q_padding_interval_size=64).graphs == (True, True)
        assert not caplog.text

    def test_padding(self) -> None:
        assert (settle().q_padding, settle().kv_padding) == (64, 16384)
        found = settle(q_padding_interval_size=8, kv_padding_interval_size=4096)
        assert (found.q_padding, found.kv_padding) == (8, 4096)

    @pytest.mark.parametrize(
        "config", [{"use_cuda_graph": True}, {"use_cuda_graph": (False, True)}, {"q_padding_interval_size": 8}]
    )
    def test_on_cpu_they_are_off_with_a_warning(self, config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
        assert on_cpu(**config).graphs == (False, False)
        assert "CUDA graphs were asked for and are off: the model is on cpu" in caplog.text

    @pytest.mark.parametrize("config", [{}, {"use_cuda_graph": False}, {"use_cuda_graph": (False, False)}])
    def test_nothing_is_said_where_nobody_asked(self, config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
        assert on_cpu(**config).graphs == (False, False)
        assert not caplog.text

    @pytest.mark.parametrize("compile_config", [CompileConfig(), {"mode": "max-autotune"}, {}])
    def test_compiled_code_that_records_graphs_itself_is_not_recorded(
        self, compile_config: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert settle(use_cuda_graph=True, decode_compile_config=compile_config).graphs == (True, False)
        assert "decode-only steps are not recorded" in caplog.text
        assert settle(use_cuda_graph=True, varlen_compile_config=compile_config).graphs == (False, True)

    def test_compiled_code_that_records_is_no_reason_to_warn_where_nobody_asked(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = settle(decode_compile_config=CompileConfig())
        assert found.graphs == (False, False) and not found.async_batching
        assert settle(decode_compile_config={"mode": "default"}).graphs == (False, True)
        assert not caplog.text


class TestAsyncBatching:
    @pytest.mark.parametrize(
        ("config", "on"),
        [
            ({}, True),
            ({"use_cuda_graph": False}, False),
            ({"max_blocks_per_request": 0}, False),
            ({"use_cuda_graph": True}, True),
            ({"use_cuda_graph": (True, False)}, True),
            ({"use_cuda_graph": True, "use_async_batching": False}, False),
            ({"use_async_batching": True}, True),
            ({"use_async_batching": False}, False),
        ],
    )
    def test_on_cuda(self, config: dict[str, Any], on: bool) -> None:
        assert settle(**config).async_batching is on

    def test_without_a_decode_fast_path_it_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        assert settle(use_async_batching=True, max_blocks_per_request=0).async_batching is False
        assert "is off: it needs CUDA graphs, which are off (the model is on cuda, without a decode" in caplog.text

    @pytest.mark.parametrize("config", [{}, {"use_cuda_graph": True}])
    def test_on_cpu_it_falls_back_with_a_warning(
        self, config: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        assert on_cpu(use_async_batching=True, **config).async_batching is False
        assert "use_async_batching=True is off: it needs CUDA graphs" in caplog.text

    def test_on_cpu_nothing_is_said_where_nobody_asked(self, caplog: pytest.LogCaptureFixture) -> None:
        for value in (None, False):
            assert on_cpu(use_async_batching=value).async_batching is False
        assert not caplog.text

    def test_any_device_that_has_graphs(self) -> None:
        found = settle(CPU, KERNEL, use_cuda_graph=True)
        assert found.graphs == (True, True) and found.async_batching and found.max_blocks_per_request == 128


class TestCompile:
    @pytest.mark.parametrize(
        ("level", "mode", "dynamic"),
        [(1, "default", True), (2, "max-autotune-no-cudagraphs", True), (3, "max-autotune-no-cudagraphs", False)],
    )
    def test_levels(self, level: int, mode: str, dynamic: bool) -> None:
        expected = CompileSettings(mode=mode, dynamic=dynamic)
        found = settle(default_compile_level=level)
        assert found.mixed_compile == found.decode_compile == expected

    @pytest.mark.parametrize("found", [on_cpu(), settle()])
    def test_level_0_compiles_nothing(self, found: Settings) -> None:
        assert found.mixed_compile is found.decode_compile is None

    def test_level_4(self) -> None:
        with pytest.raises(ValueError, match="default_compile_level is 4"):
            settle(default_compile_level=4)

    def test_without_a_fast_path_only_mixed_steps_are_compiled(self, caplog: pytest.LogCaptureFixture) -> None:
        found = on_cpu(default_compile_level=1)
        assert found.mixed_compile == CompileSettings("default", True) and found.decode_compile is None
        assert not caplog.text

    def test_with_flash_attention_a_level_compiles_decode_steps_only(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            found = settle(CUDA, FLASH, default_compile_level=1)
        assert found.mixed_compile is None and found.decode_compile == CompileSettings("default", True)
        assert "compiles decode-only steps alone" in caplog.text
        explicit = settle(CUDA, FLASH, default_compile_level=1, varlen_compile_config={"mode": "default"})
        assert explicit.mixed_compile == CompileSettings("default")

    def test_explicit_configs_win(self) -> None:
        found = settle(
            default_compile_level=3,
            varlen_compile_config=CompileConfig(mode="default", dynamic=True),
            decode_compile_config={"dynamic": False, "backend": "eager"},
        )
        assert found.mixed_compile == CompileSettings("default", True)
        assert found.decode_compile == CompileSettings("reduce-overhead", False, "eager")

    def test_one_explicit_config_leaves_the_level_to_the_other(self) -> None:
        found = settle(default_compile_level=2, varlen_compile_config={"mode": "default"})
        assert found.mixed_compile == CompileSettings("default")
        assert found.decode_compile == CompileSettings("max-autotune-no-cudagraphs", True)

    def test_an_explicit_decode_config_without_a_fast_path_is_dropped_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert on_cpu(decode_compile_config=CompileConfig()).decode_compile is None
        assert settle(max_blocks_per_request=0, decode_compile_config={}).decode_compile is None
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
        assert "decode_compile_config has no effect" in caplog.text

    def test_options_take_the_place_of_the_mode(self) -> None:
        options = {"epilogue_fusion": True}
        for config in (CompileConfig(options=options), {"options": options}, {"mode": None, "options": options}):
            assert settle(varlen_compile_config=config).mixed_compile == CompileSettings(options=options)
        with pytest.raises(ValueError, match="varlen_compile_config sets mode 'default' and options"):
            settle(varlen_compile_config={"mode": "default", "options": options})


@pytest.mark.parametrize(
    ("dtype", "config", "recorded"),
    [
        (torch.float32, {}, True),
        (torch.float64, {}, False),
        (torch.float32, {"auto_switch_to_flash": False}, False),
        (torch.float32, {"use_cuda_graph": False}, False),
    ],
)
def test_steps_are_recorded_where_the_engines_own_kernels_run(
    dtype: torch.dtype, config: dict[str, Any], recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.triton.probe", lambda device: None)
    monkeypatch.setattr("engine.settings.available_memory", lambda *_: 8 << 30)
    model = build_tiny().to(dtype)
    facts = dataclasses.replace(model_facts(model), device_type="cuda")
    found = build.settle(model, facts, ContinuousBatchingConfig(**config), None)
    assert found.graphs == (recorded, recorded) and found.async_batching is recorded
