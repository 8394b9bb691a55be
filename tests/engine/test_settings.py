"""Settings: defaults by device, memory sizing with its numbers, reading of free memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.groups import LayerGroup
from engine.cache.kv_cache import KVCache
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.facts import ModelFacts
from engine.memory import available_memory
from engine.settings import Settings, describe, resolve
from engine.sizing import RESERVED_BLOCKS, STAGINGS, staging_blocks

GIB = 1 << 30
SMALL = ModelFacts(30, 3, 9, 64, 2, 8192, 49152, "cpu", (None,) * 30)
ON_CUDA = dataclasses.replace(SMALL, device_type="cuda")


def settings(
    facts: ModelFacts = SMALL, hints: WorkloadHints | None = None, memory: int = 16 * GIB, **config: Any
) -> Settings:
    return resolve(ContinuousBatchingConfig(**config), facts, hints, memory=memory)


def test_defaults_on_cpu() -> None:
    found = settings()
    assert (found.page_size, found.max_batch_tokens, found.max_requests) == (32, 512, 512)
    assert (found.safety_margin, found.sharing, found.scheduler_type) == (0.15, True, "fifo")
    assert (found.context_length, found.vocab_size, found.device_type) == (8192, 49152, "cpu")
    assert found.kv_bytes_per_block == 32 * 2 * 30 * 3 * 64 * 2
    used = (found.num_blocks + 2) * found.kv_bytes_per_block
    assert 0.5 * 16 * GIB < used <= 0.6 * 16 * GIB


def test_defaults_on_cuda_are_those_of_the_guide() -> None:
    found = settings(ON_CUDA, memory=80 * GIB)
    assert (found.page_size, found.max_batch_tokens, found.max_requests) == (256, 8192, 1024)
    assert 0.85 * 80 * GIB < found.num_blocks * found.kv_bytes_per_block <= 0.9 * 80 * GIB


def test_batch_tokens_are_bounded_by_memory_but_never_below_256() -> None:
    wide = dataclasses.replace(ON_CUDA, num_heads=64, head_dim=128, num_kv_heads=1, vocab_size=1000)
    assert settings(wide, memory=80 * GIB).max_batch_tokens == 8192
    assert 256 < settings(wide, memory=8 * GIB).max_batch_tokens < 8192
    assert settings(wide, memory=GIB // 2).max_batch_tokens == 256
    assert settings(wide, memory=8 * GIB, max_batch_tokens=9000).max_batch_tokens == 9000
    assert settings(max_batch_tokens=8).max_batch_tokens == 8


def test_request_cap() -> None:
    assert settings(hints=WorkloadHints(num_requests=7)).max_requests == 7
    assert settings(ON_CUDA, WorkloadHints(num_requests=5000), 80 * GIB).max_requests == 1024
    assert settings(max_requests_per_batch=9, hints=WorkloadHints(num_requests=7)).max_requests == 9
    assert settings(max_requests_per_batch=300, max_batch_tokens=100).max_requests == 100
    assert settings(max_requests_per_batch=300, num_blocks=4).max_requests == 4


def test_logits_of_a_large_vocabulary_lower_the_default_request_cap_only() -> None:
    large = dataclasses.replace(SMALL, vocab_size=256_000)
    assert settings(large, memory=2 * GIB).max_requests < 100
    assert settings(large, memory=16 * GIB, max_requests_per_batch=512).max_requests == 512


def test_explicit_blocks_are_kept_or_refused_with_numbers() -> None:
    assert settings(num_blocks=5).num_blocks == 5
    with pytest.raises(
        MemoryError, match=r"30000 blocks of 32 tokens .*0\.34 GiB for the buffers.*budget of 9\.60 GiB"
    ):
        settings(num_blocks=30_000)
    most = settings().num_blocks
    assert settings(num_blocks=most).num_blocks == most
    with pytest.raises(MemoryError):
        settings(num_blocks=most + 1)


def test_nothing_fits() -> None:
    with pytest.raises(MemoryError, match="max_memory_percent"):
        settings(memory=GIB // 100)
    with pytest.raises(MemoryError, match="max_batch_tokens"):
        settings(max_batch_tokens=10_000_000)


def test_block_count_of_a_small_model_on_cpu_is_capped() -> None:
    tiny = ModelFacts(4, 2, 4, 16, 4, 256, 512, "cpu", (None,) * 4)
    assert settings(tiny).num_blocks == 1024 * 256 // 32
    assert settings(dataclasses.replace(tiny, context_length=None)).num_blocks == 65536
    assert settings(dataclasses.replace(tiny, context_length=10**6)).num_blocks == 65536
    assert settings(tiny, num_blocks=100_000).num_blocks == 100_000


def test_context_length_defaults_to_the_cache() -> None:
    unknown = dataclasses.replace(SMALL, context_length=None)
    assert settings(unknown, num_blocks=10).context_length == 320
    assert settings(num_blocks=10).context_length == 8192


def test_seed() -> None:
    assert settings(seed=7).seed == 7
    assert settings(seed=-1).seed == 2**64 - 1
    assert settings(seed=2**70 + 5).seed == 5
    assert settings().seed != settings().seed


def test_margin_depends_on_the_scheduler() -> None:
    assert settings().safety_margin == 0.15
    assert settings(scheduler_type="prefill_first").safety_margin == 0.0
    assert settings(scheduler_type="prefill_first", safety_margin=0.3).safety_margin == 0.3
    assert settings(safety_margin=0).safety_margin == 0


class TestOffloading:
    """Blocks on the host: GiB asked for, cut by a share of what is free there."""

    BLOCK = 256 * 2 * 30 * 3 * 64 * 2

    def slots(self, host: int | None, facts: ModelFacts = ON_CUDA, **config: Any) -> int:
        return resolve(
            ContinuousBatchingConfig(**config), facts, memory=20 * GIB, host_memory=host and host * GIB
        ).host_slots

    def test_off_by_default(self) -> None:
        assert self.slots(100) == 0

    def test_as_asked(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.slots(100, cpu_offload_space=8.0) == 8 * GIB // self.BLOCK
        assert not caplog.text

    def test_threshold_clamps_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.slots(5, cpu_offload_space=8.0) == 4 * GIB // self.BLOCK
        assert "cut from 8.00 to 4.00 GiB, 0.8 of the 5.00 GiB" in caplog.text
        assert self.slots(5, cpu_offload_space=8, cpu_offload_space_safety_threshold=0.5) == 5 * GIB // 2 // self.BLOCK
        assert self.slots(8, cpu_offload_space=8, cpu_offload_space_safety_threshold=1.0) == 8 * GIB // self.BLOCK

    def test_none_is_sized_by_the_threshold(self) -> None:
        assert self.slots(5, cpu_offload_space=None) == 4 * GIB // self.BLOCK
        share = self.slots(5, cpu_offload_space=None, cpu_offload_space_safety_threshold=0.4)
        assert share == 2 * GIB // self.BLOCK

    def test_a_threshold_of_0_switches_it_off(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.slots(100, cpu_offload_space=8.0, cpu_offload_space_safety_threshold=0) == 0
        assert "cpu_offload_space=8.0 has no effect" in caplog.text
        assert self.slots(100, cpu_offload_space=None, cpu_offload_space_safety_threshold=0) == 0

    def test_without_sharing_there_is_no_way_back(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.slots(100, cpu_offload_space=8.0, allow_block_sharing=False) == 0
        assert "cpu_offload_space=8.0 has no effect" in caplog.text

    def test_a_model_on_the_host_leaves_less(self) -> None:
        found = resolve(ContinuousBatchingConfig(num_blocks=1000, cpu_offload_space=None), SMALL, memory=20 * GIB)
        taken = 1000 * found.kv_bytes_per_block
        assert 0.8 * (20 * GIB - taken) * 0.95 < found.host_slots * found.kv_bytes_per_block < 0.8 * (20 * GIB - taken)

    @pytest.mark.parametrize("memory", [GIB, 20 * GIB, 80 * GIB])
    def test_the_device_has_room_for_copies(self, memory: int) -> None:
        """Beside the cache, which is smaller by so much; blocks that were asked for are checked with it."""

        def blocks(**config: Any) -> int:
            return resolve(ContinuousBatchingConfig(**config), ON_CUDA, memory=memory, host_memory=100 * GIB).num_blocks

        plain, most = blocks(), blocks(cpu_offload_space=8.0)
        taken = STAGINGS * staging_blocks(most + RESERVED_BLOCKS, 10**6)
        assert most + taken <= plain <= most + plain // 64 + 2
        assert blocks(cpu_offload_space=8.0, num_blocks=most) == most
        with pytest.raises(MemoryError):
            blocks(cpu_offload_space=8.0, num_blocks=plain)

    def test_less_than_a_block(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.slots(100, cpu_offload_space=1e-6) == 0
        assert "nothing is offloaded" in caplog.text

    def test_unknown_host_memory(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr("engine.settings.available_memory", lambda *_: None)
        assert self.slots(None, cpu_offload_space=1.0) == GIB // self.BLOCK
        assert "not checked" in caplog.text
        with pytest.raises(ValueError, match="set cpu_offload_space"):
            self.slots(None, cpu_offload_space=None)


class TestGroups:
    """Layers in groups share the memory of a block, which is as large as the largest group."""

    @pytest.fixture
    def found(self, monkeypatch: pytest.MonkeyPatch) -> Settings:
        groups = (LayerGroup(tuple(range(10)), None), LayerGroup(tuple(range(10, 30)), 100))
        monkeypatch.setattr("engine.settings.plan_groups", lambda windows: groups)
        facts = dataclasses.replace(SMALL, windows=(None,) * 10 + (100,) * 20)
        return settings(facts, num_blocks=64, max_batch_tokens=256, max_requests_per_batch=60)

    def test_bytes_of_a_block(self, found: Settings) -> None:
        assert found.kv_bytes_per_block == 20 * 32 * 2 * 3 * 64 * 2

    def test_every_running_request_needs_a_block_in_each_group(self, found: Settings) -> None:
        assert found.max_requests == 32

    def test_longest_request(self, found: Settings) -> None:
        cache = KVCache(64, 32, found.groups, max_step_tokens=256)
        assert 0 < found.cache_tokens == cache.max_tokens < 64 * 32
        assert dataclasses.replace(found, num_blocks=1).cache_tokens == 0

    def test_windows_alone_bound_no_request(self, found: Settings) -> None:
        windowed = dataclasses.replace(found, groups=found.groups[1:])
        assert windowed.cache_tokens > 2**40
        assert "2,048 tokens, 64 blocks" in "\n".join(describe(windowed))

    def test_describe(self, found: Settings) -> None:
        text = "\n".join(describe(dataclasses.replace(found, context_length=1024)))
        assert "64 blocks of 32 for 2 groups of layers" in text
        assert f"{64 / (32 + 13):.2f} requests of 1,024 tokens" in text


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        settings(num_blocks=64)
    assert "no effect" not in caplog.text
    with caplog.at_level("INFO"):
        settings(
            kv_padding_interval_size=64,
            cpu_group_timeout=None,
            disable_nccl_graph_mixing=False,
            cpu_offload_space_safety_threshold=0.5,
        )
    for name in (
        "kv_padding_interval_size=64", "cpu_group_timeout=None",
        "disable_nccl_graph_mixing=False", "cpu_offload_space_safety_threshold=0.5",
    ):  # fmt: skip
        assert f"{name} has no effect" in caplog.text


@given(
    memory=st.integers(2 * GIB, 200 * GIB),
    page_size=st.integers(4, 512),
    tokens=st.one_of(st.none(), st.integers(1, 20_000)),
    requests=st.one_of(st.none(), st.integers(1, 1000)),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_never_over_budget(memory: int, page_size: int, tokens: int | None, requests: int | None, device: str) -> None:
    facts = dataclasses.replace(SMALL, device_type=device)
    found = settings(
        facts, memory=memory, page_size=page_size, max_batch_tokens=tokens, max_requests_per_batch=requests
    )
    assert (found.num_blocks + 2) * found.kv_bytes_per_block <= memory * 0.9
    assert 1 <= found.max_requests <= min(found.max_batch_tokens, found.num_blocks)
    assert tokens is not None or found.max_batch_tokens >= 256


def test_describe() -> None:
    text = "\n".join(describe(settings(num_blocks=1024, seed=5)))
    assert "32,768 tokens, 1,024 blocks of 32, 0.70 GiB" in text
    assert "4.00 requests of 8,192 tokens" in text
    assert "512 tokens and 512 requests, fifo, safety margin 0.15" in text
    assert "prefix caching: on; seed 5" in text
    assert "decode fast path" not in text
    assert "offloading" not in text and "compiled" not in text


def test_describe_what_is_on() -> None:
    found = resolve(
        ContinuousBatchingConfig(use_cuda_graph=True, default_compile_level=3, cpu_offload_space=2.0, num_blocks=64),
        ON_CUDA,
        memory=80 * GIB,
        host_memory=80 * GIB,
    )
    text = "\n".join(describe(found))
    assert "decode fast path: 32 blocks; CUDA graphs: mixed on, decode on; async batching: on" in text
    assert "offloading: 364 blocks on the host, 2.00 GiB" in text
    assert "decode-only steps are compiled: mode max-autotune-no-cudagraphs, dynamic False" in text


def test_replayed_steps_take_memory() -> None:
    plain, graphs, overlapping = (
        settings(ON_CUDA, memory=8 * GIB, **fields).num_blocks
        for fields in ({}, {"use_cuda_graph": True, "use_async_batching": False}, {"use_cuda_graph": True})
    )
    assert plain > graphs == overlapping


def test_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.settings.available_memory", lambda *_: None)
    assert resolve(ContinuousBatchingConfig(num_blocks=9), SMALL).num_blocks == 9
    with pytest.raises(ValueError, match="set num_blocks"):
        resolve(ContinuousBatchingConfig(), SMALL)


class TestAvailableMemory:
    """Reading of fake /proc and /sys files."""

    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path) -> None:
        self.root = tmp_path
        (tmp_path / "meminfo").write_text("MemTotal: 100000 kB\nMemFree: 5 kB\nMemAvailable:   20000 kB\n")
        (tmp_path / "cgroup").write_text("")
        (tmp_path / "sys").mkdir()

    def read(self) -> int | None:
        return available_memory(
            meminfo=str(self.root / "meminfo"),
            cgroup_root=str(self.root / "sys"),
            own_cgroup=str(self.root / "cgroup"),
        )

    def group(self, path: str, **values: str | int) -> None:
        folder = self.root / "sys" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")

    def test_no_limits(self) -> None:
        assert self.read() == 20000 * 1024
        (self.root / "cgroup").unlink()
        assert self.read() == 20000 * 1024

    def test_v2(self) -> None:
        (self.root / "cgroup").write_text("0::/a/b\n")
        self.group("a/b", memory__max="max", memory__current=5_000_000)
        assert self.read() == 20000 * 1024
        self.group("a/b", memory__max=9_000_000)
        assert self.read() == 4_000_000
        self.group("a/b", memory__stat="anon 4000000\ninactive_file 600000\nactive_file 1")
        assert self.read() == 4_600_000

    def test_v2_limit_of_a_parent(self) -> None:
        (self.root / "cgroup").write_text("0::/a/b\n")
        self.group("a/b", memory__max=9_000_000, memory__current=1_000_000)
        self.group("a", memory__max=7_000_000, memory__current=6_500_000)
        assert self.read() == 500_000

    def test_v2_own_group_is_the_root(self) -> None:
        (self.root / "cgroup").write_text("0::/outside/of/the/container\n")
        self.group("", memory__max=3_000_000, memory__current=1_000_000)
        assert self.read() == 2_000_000

    def test_v1(self) -> None:
        (self.root / "cgroup").write_text("5:cpu:/x\n4:memory,hugetlb:/a\n0::/\n")
        self.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
        assert self.read() == 20000 * 1024
        self.group("memory/a", memory__limit_in_bytes=6_000_000, memory__usage_in_bytes=2_000_000)
        assert self.read() == 4_000_000
        self.group("memory/a", memory__stat="inactive_file 9\ntotal_inactive_file 50000")
        assert self.read() == 4_050_000

    def test_over_the_limit(self) -> None:
        (self.root / "cgroup").write_text("0::/\n")
        self.group("", memory__max=1_000_000, memory__current=1_500_000)
        assert self.read() == 0

    def test_limit_above_what_the_system_has(self) -> None:
        (self.root / "cgroup").write_text("0::/\n")
        self.group("", memory__max=10**12, memory__current=0)
        assert self.read() == 20000 * 1024

    def test_system_without_meminfo(self) -> None:
        (self.root / "meminfo").unlink()
        found = self.read()
        assert found is not None
        assert found > 0


def test_this_machine() -> None:
    found = available_memory()
    assert found is not None
    assert 1 << 20 < found < 1 << 50


def test_a_cache_that_holds_no_token_is_refused() -> None:
    facts = dataclasses.replace(SMALL, windows=(None,) * 10 + (100,) * 20)
    with pytest.raises(ValueError, match="shared by . groups of layers, holds not a single token"):
        resolve(ContinuousBatchingConfig(num_blocks=1, page_size=16), facts, memory=1 << 30)
