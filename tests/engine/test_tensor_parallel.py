"""Two processes with half of the model each: the same tokens as one process, and one fate.

All that needs two processes runs in one launch, whose findings the tests look at; tensor_parallel_worker.py holds what
the processes do. tests/guide starts them with torchrun.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine import init_continuous_batching
from engine.distributed.coordinator import Alone, Turn
from engine.distributed.nccl import disable_graph_mixing
from engine.distributed.sharding import local_kv_heads, rebind_forwards, tensor_parallel_mesh
from engine.distributed.tensor_parallel import coordinator_for
from engine.request import Request
from engine.sampling.params import SamplingParams
from tests.conftest import wait_limit
from tests.harness import NO_EOS, config, tokens
from tests.models import build_random, build_tiny, ref
from tests.serving import ROOT, wait_until

LIMIT_S = 230
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
WORKER = "tests.engine.tensor_parallel_worker"
PROMPTS = [tokens(seed, 14 * seed) for seed in range(1, 6)]
GREEDY = tokens(9, 20)
SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@pytest.fixture(scope="module")
def experts() -> PreTrainedModel:
    fields = {name: getattr(build_tiny().config, name) for name in SHARED_FIELDS}
    sizes = {"head_dim": 16, "num_hidden_layers": 2, "moe_intermediate_size": 32, "num_experts": 4}
    config = Qwen3MoeConfig(**fields, **sizes, num_experts_per_tok=2, tie_word_embeddings=True)
    return build_random(Qwen3MoeForCausalLM, config)


@pytest.fixture(scope="module")
def folder(tiny: PreTrainedModel, experts: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tiny.save_pretrained(folder / "tiny")
    experts.save_pretrained(folder / "experts")
    three = build_tiny(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=1)
    three.save_pretrained(folder / "three_kv_heads")
    return folder


@pytest.fixture(scope="module")
def findings(folder: Path) -> list[dict[str, Any]]:
    """What both processes found, by rank. The second one is killed when it says that it is ready for that."""
    command = [sys.executable, "-m", WORKER, str(folder), str(wait_limit(LIMIT_S))]
    with child(command, WORLD_SIZE="2", LOCAL_RANK="0") as process:
        victim = folder / "victim"
        wait_until(lambda: (victim.exists() and victim.read_text()) or process.poll() is not None, LIMIT_S)
        if process.poll() is None:
            os.kill(int(victim.read_text()), signal.SIGKILL)
        output, _ = process.communicate(timeout=wait_limit(LIMIT_S))
    assert process.returncode == 0, output
    print(output)
    return [json.loads((folder / f"findings-{rank}.json").read_text()) for rank in range(2)]


@contextmanager
def child(command: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive the block."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | LOOPBACK | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # the other one loses its peer then
            try:
                process.wait(wait_limit(20))
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


def test_heads_that_cannot_be_shared_are_refused_with_the_numbers(findings: list[dict[str, Any]]) -> None:
    for found in findings:
        assert "3 KV heads" in found["uneven_heads"] and "2 tensor parallel processes" in found["uneven_heads"]
        assert found["uneven_heads"].startswith("ValueError") and found["uneven_heads"].endswith("one of 1, 3")


def test_device_map_beside_a_distributed_config_is_refused(findings: list[dict[str, Any]]) -> None:
    for found in findings:
        assert found["device_map"].startswith("ValueError") and "device_map" in found["device_map"]


def test_shadow_shares_the_shards_and_calls_its_own_modules(findings: list[dict[str, Any]]) -> None:
    for found in findings:
        shadow = found["shadow"]
        assert shadow["kv_heads"] == 1 and shadow["shared"]
        assert shadow["wrapped"] > 0 and shadow["originals"] == 0


def test_one_call_gives_the_tokens_of_one_process(findings: list[dict[str, Any]], tiny: PreTrainedModel) -> None:
    expected = [ref(tiny, prompt, 8) for prompt in PROMPTS]
    assert [found["one_call"] for found in findings] == [expected, expected]


def test_experts_and_a_tied_head_give_the_tokens_of_one_process(
    findings: list[dict[str, Any]], experts: PreTrainedModel
) -> None:
    expected = [ref(experts, prompt, 4) for prompt in PROMPTS]
    assert [found["experts"] for found in findings] == [expected, expected]


def test_chunks_preemption_and_sampling_give_the_tokens_of_one_process(
    findings: list[dict[str, Any]], tiny: PreTrainedModel
) -> None:
    """The smaller cache and the driver's seed hold for both."""
    first, second = (found["few_blocks"] for found in findings)
    assert first == second
    assert first["preemptions"] > 0 and first["num_blocks"] == first["max_requests"] == 12 and first["seed"] == 5
    for prompt, generated in list(zip(PROMPTS, first["tokens"], strict=True))[::2]:
        assert generated == ref(tiny, prompt, 16)
    alone = init_continuous_batching(tiny, NO_EOS, config(per_request_processors=True, seed=5))
    for index, prompt in enumerate(PROMPTS):
        alone.add_request(prompt, f"request-{index}", max_new_tokens=16, do_sample=index % 2 == 1)
    alone.start()
    outputs = {output.request_id: output for output in alone}
    alone.destroy()
    assert first["tokens"] == [outputs[f"request-{index}"].generated_tokens for index in range(len(PROMPTS))]


def test_cancel_stop_and_start_reach_both(findings: list[dict[str, Any]], tiny: PreTrainedModel) -> None:
    first, second = (found["life"] for found in findings)
    assert (first.pop("returned"), second.pop("returned")) == ("long", None)
    assert first == second
    status, generated = first["cancelled"]
    assert status == "CANCELLED" and 0 < len(generated) < 200
    assert first["kept"] == first["again"] == ref(tiny, GREEDY, 4)
    assert first["stopped"]


def test_idle_and_paused_engines_outlast_the_time_limit(findings: list[dict[str, Any]], tiny: PreTrainedModel) -> None:
    for found in findings:
        waits = found["long_waits"]
        assert waits["used"] == ref(tiny, GREEDY, 1)[0]
        assert len(set(waits["steps"])) == found["rank"]  # none of the other process, the same twice of this one
        assert waits["paused"] == ref(tiny, GREEDY, 80) and waits["idle"] == ref(tiny, GREEDY, 4)


def test_what_a_request_causes_fails_it_alone(findings: list[dict[str, Any]], tiny: PreTrainedModel) -> None:
    for found in findings:
        assert found["failing_request"] == {"bad": "ValueError: poison", "good": ref(tiny, GREEDY, 4)}


def test_request_that_cannot_be_sent_on_is_refused(findings: list[dict[str, Any]], tiny: PreTrainedModel) -> None:
    first, second = (found["unsendable_request"] for found in findings)
    assert first["refused"].startswith("ValueError: the constraint of request")
    assert first["good"] == second["good"] == ref(tiny, GREEDY, 4)


def test_step_that_fails_on_one_process_ends_both(findings: list[dict[str, Any]]) -> None:
    for found in findings:
        failed = found["failing_process"]
        assert failed["status"] == "FAILED"
        for text in (failed["error"], failed["fatal"], failed["refused"]):
            assert "a step failed on one of them only" in text


def test_what_one_process_cannot_build_none_builds(findings: list[dict[str, Any]]) -> None:
    first, second = (found["failing_build"] for found in findings)
    assert first == "RuntimeError: tensor parallel process 1 of 2 failed: MemoryError: too little here"
    assert second == "MemoryError: too little here"


def test_engine_that_failed_tells_the_others_why(findings: list[dict[str, Any]]) -> None:
    for found in findings:
        assert "process 1 of 2 failed: OSError: disk on fire" in found["leaving"]


def test_process_that_does_not_come_is_waited_for_no_longer_than_the_limit(findings: list[dict[str, Any]]) -> None:
    assert findings[0]["late"].startswith("RuntimeError") and "cpu_group_timeout (0.5 s)" in findings[0]["late"]


def test_nccl_is_told_that_graphs_do_not_mix(findings: list[dict[str, Any]]) -> None:
    assert [found["nccl"] for found in findings] == ["0", "0"]


def test_killed_process_ends_the_other(findings: list[dict[str, Any]]) -> None:
    found = findings[0]["killed"]
    assert "killed" not in findings[1]
    assert found["fatal"].startswith("RuntimeError: another of the 2 tensor parallel processes is gone")
    assert all("tensor parallel processes is gone" in error for error in found["errors"])
    assert "tensor parallel processes is gone" in found["refused"]


class Mesh:
    """As much of a DeviceMesh as is asked for."""

    def __init__(self, **sizes: int) -> None:
        self.mesh_dim_names = tuple(sizes)
        self._sizes = sizes

    def size(self) -> int:
        product = 1
        for size in self._sizes.values():
            product *= size
        return product

    def __getitem__(self, name: str) -> Mesh:
        return Mesh(**{name: self._sizes[name]})


def sharded(plan: dict[str, str] | None = None, config: object = None, **sizes: int) -> nn.Module:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(distributed_config=config)  # type: ignore[assignment]
    model._device_mesh, model.tp_plan = Mesh(**sizes), plan  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("name", ["fsdp", "pp", "dp_replicate"])
def test_other_ways_to_distribute_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}=2.*only tp_size"):
        tensor_parallel_mesh(sharded(**{name: 2, "tp": 2}))


def test_expert_parallelism_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="ep_size=2.*only tp_size"):
        tensor_parallel_mesh(sharded(config=SimpleNamespace(ep_size=2), tp=2))


def test_parameters_that_something_else_distributed_are_refused(fresh: PreTrainedModel) -> None:
    fresh.lm_head.weight.device_mesh = Mesh(dp=2)
    with pytest.raises(NotImplementedError, match="not by tensor parallelism"):
        tensor_parallel_mesh(fresh)


@pytest.fixture
def fresh() -> PreTrainedModel:
    return build_tiny()


def test_cache_is_shared_out_only_where_the_key_heads_are() -> None:
    assert local_kv_heads(sharded({"layers.*.self_attn.k_proj": "colwise"}, tp=2), 4) == 2
    assert local_kv_heads(sharded({"layers.*.self_attn.k_proj": "colwise_gather_output"}, tp=2), 3) == 3
    assert local_kv_heads(sharded({"layers.*.mlp.up_proj": "colwise"}, tp=2), 3) == 3
    assert local_kv_heads(nn.Linear(2, 2), 3) == 3


def test_one_process_has_nothing_to_agree_on(tiny: PreTrainedModel) -> None:
    coordinator = coordinator_for(tiny, 300.0)
    turn = Turn(["x"], 1)
    assert isinstance(coordinator, Alone) and coordinator.agree(turn) is turn


def test_forwards_set_on_a_module_move_with_its_copy() -> None:
    """Also a wrapper of a wrapper, with keyword arguments and attributes of its own."""
    import copy

    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    layer = model[0]
    inner = layer.forward

    def first(*args: Any, extra: nn.Module = layer) -> Any:
        assert layer is seen[-1]
        return inner(*args)

    def second(*args: Any) -> Any:
        return first(*args)

    seen: list[nn.Module] = []
    layer.forward = second
    layer.forward.mark = "kept"
    copies: dict[int, Any] = {}
    copied = copy.deepcopy(model, copies)
    rebind_forwards(copied, copies)
    seen.append(copied[0])
    copied(next(model.parameters()))
    assert copied[0].forward.mark == "kept"
    seen.append(layer)
    model(next(model.parameters()))


def test_graph_mixing_is_switched_off_only_among_processes_and_if_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NCCL_GRAPH_MIXING_SUPPORT"
    for world_size, before, after in [(None, None, None), ("1", None, None), ("2", None, "0"), ("2", "1", "1")]:
        for variable, value in (("WORLD_SIZE", world_size), (name, before)):
            monkeypatch.delenv(variable, raising=False)
            if value is not None:
                monkeypatch.setenv(variable, value)
        disable_graph_mixing()
        assert os.environ.get(name) == after
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(name)
    config(disable_nccl_graph_mixing=False)
    assert name not in os.environ
    config()
    assert os.environ[name] == "0"


def test_requests_survive_the_way_to_another_process() -> None:
    request = Request("x", [1, 2, 3], 2, SamplingParams(4, do_sample=True, seed=2**63), salt=b"s", logprobs=[-0.5])
    copied = pickle.loads(pickle.dumps(request))
    names = Request.__slots__
    assert [getattr(copied, name) for name in names] == [getattr(request, name) for name in names]
