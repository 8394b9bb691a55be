"""Memory of a CUDA device: what a step takes, the cache that is sized by it, running out of it, and copies to the host.

Elsewhere only copies to the host are checked; a device with memory of its own is needed for the rest.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from engine.cache.host_tier import BlockCopies
from engine.execution.kv_tensors import HostKV, allocate
from engine.memory import CudaMemory
from tests.gpu.device import DEVICE, on_device
from tests.harness import collect, core_of, running, tokens
from tests.models import build_tiny, reference

pytestmark = on_device
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")

BLOCKS = 64


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_tiny().to(DEVICE)


def test_blocks_come_back_whatever_the_device_does_meanwhile() -> None:
    """Places are overwritten as soon as the copies are launched, and large products run in between."""
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    kv = allocate(4, BLOCKS, 2, 16, 64, dtype, DEVICE, trash=True)
    host, generator = HostKV(kv, 200), random.Random(0)
    tensors = [*kv.keys, *kv.values]
    for tensor in tensors:
        tensor.normal_()
    noise = torch.randn(512, 512, device=DEVICE)
    for _ in range(20):
        away = generator.sample(range(1, BLOCKS + 1), generator.randrange(1, 40))
        slots = generator.sample(range(200), len(away))
        expected = [tensor[away].clone() for tensor in tensors]
        noise = (noise @ noise).clamp(-1, 1)
        host.run(BlockCopies(to_host=list(zip(away, slots, strict=True))))
        for tensor in tensors:
            tensor[away] = 7.0
        back = generator.sample(range(1, BLOCKS + 1), len(away))
        host.run(BlockCopies(from_host=list(zip(slots, back, strict=True))))
        for tensor, before in zip(tensors, expected, strict=True):
            assert torch.equal(tensor[back], before)


@needs_cuda
def test_the_device_has_room_for_what_was_planned(model: PreTrainedModel) -> None:
    """The largest steps run beside the cache, within the share that was allowed."""
    torch.cuda.empty_cache()
    free = CudaMemory(DEVICE.index).available()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with running(
        model, num_blocks=None, page_size=256, max_batch_tokens=4096, max_requests_per_batch=256, max_memory_percent=0.2
    ) as manager:
        settings = manager.settings
        ids = [manager.add_request(tokens(i, 100), max_new_tokens=8) for i in range(256)]
        collect(manager, ids, 120)
        taken = torch.cuda.max_memory_allocated() - before
        cache = settings.num_blocks * settings.kv_bytes_per_block
    assert 0.1 * free < cache < taken <= 0.2 * free


@needs_cuda
def test_decode_only_steps_are_recorded_unasked(model: PreTrainedModel) -> None:
    prompts = [tokens(i, 20) for i in range(3)]
    with running(model) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=8) for prompt in prompts]
        outputs = collect(manager, ids, 120)
        decode = core_of(manager).runner._decode  # type: ignore[attr-defined]
        assert manager.settings.graphs[1] and manager.settings.async_batching
        assert decode is not None and decode._graphs.num_recordings > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert len(output.generated_tokens) == len(reference(model, prompt, 8).token_ids)


@needs_cuda
def test_a_step_that_does_not_fit_says_what_to_lower() -> None:
    """A vocabulary so large that the logits of its rows take more than there is."""
    large = build_tiny(vocab_size=200_000).to(DEVICE)
    free, total = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - (4 << 30)), dtype=torch.uint8, device=DEVICE)
    with (
        pytest.raises(MemoryError, match="lower"),
        running(large, num_blocks=None, max_batch_tokens=8192, max_requests_per_batch=8192, max_memory_percent=1.0),
    ):
        pass
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - total // 100


@needs_cuda
def test_requests_go_on_when_the_device_is_full(model: PreTrainedModel) -> None:
    prompts = [tokens(i, 100) for i in range(8)]
    with running(model, max_batch_tokens=1024) as manager:
        first = manager.add_request(prompts[0], max_new_tokens=8)
        collect(manager, [str(first)], 120)  # libraries take what they keep for a thread
        free, _ = torch.cuda.mem_get_info()
        held = [torch.empty(max(0, free - (64 << 20)), dtype=torch.uint8, device=DEVICE)]
        ids = [manager.add_request(prompt, max_new_tokens=8) for prompt in prompts]
        ended = collect(manager, ids, 120)
        held.clear()
        assert len(ended) == 8 and manager.fatal_error is None
        for output in ended:
            assert output.error is None or "lower max_batch_tokens" in output.error
