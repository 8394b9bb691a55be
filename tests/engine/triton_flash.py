"""Flash kernels beside the Triton kernels, in the interpreter's process: fakes attend, Triton does all else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.execution.forward import FusedForward
from engine.execution.kv_tensors import KVTensors, allocate
from engine.ops.flash.fused import FlashTritonOps
from engine.ops.flash.kernels import FlashAttention2, FlashAttention3, FlashKernel, TorchVarlen
from tests.architectures import WINDOW, build
from tests.engine import fake_flash, test_attention_contract, test_flash_engine
from tests.engine.fixed_ops import FakeGraphs
from tests.engine.rows import Rows, expected, make_runner
from tests.engine.test_attention_contract import Backend
from tests.harness import Stepper
from tests.models import build_tiny

PAGES = {"flash-attn": 256, "flash-attn-3": 16, "torch": 256}


def make_kernel(package: str) -> FlashKernel:
    if package == "flash-attn":
        return FlashAttention2(fake_flash.flash_attn(), package, "FlashAttention 2")
    if package == "flash-attn-3":
        return FlashAttention3(fake_flash.flash_attn_interface(lacks=()), package, "FlashAttention 3")
    return TorchVarlen(fake_flash.torch_varlen(), package, "varlen_attn")


@contextmanager
def only(package: str) -> Iterator[None]:
    """The only flash package that there is."""
    module: Any = {
        "flash-attn": fake_flash.flash_attn,
        "flash-attn-3": fake_flash.flash_attn_interface,
        "torch": fake_flash.torch_varlen,
    }[package]()
    with pytest.MonkeyPatch.context() as patch:
        fake_flash.install(patch, module)
        yield


def contract(name: str, package: str, *arguments: Any) -> None:
    """A test of test_attention_contract.py, on caches that are NaN where nothing was written."""
    kernel, cases = make_kernel(package), test_attention_contract
    features = ("softcap", "sinks") if package == "flash-attn-3" else ("softcap",)
    small = (256,) if "padded" in name else (7, 16)
    pages = {"flash-attn": (256,), "flash-attn-3": small, "torch": (512,)}[package]

    def make(kv: KVTensors, groups: Any) -> FlashTritonOps:
        return FlashTritonOps(kernel, kv, groups)

    backend = Backend(make, pages, (torch.float16,), features)
    known = "varlen_attn" if package == "torch" else package
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases.BACKENDS, known, backend)
        by_name: dict[str, Any] = {"padded_mixed": (), "padded_decode": (known,)}
        own = next((given for part, given in by_name.items() if part in name), (backend,))
        getattr(cases, name)(*own, *arguments)


MODELS: dict[str, Any] = {
    "llama": lambda: build_tiny(max_position_embeddings=2048, num_hidden_layers=2),
    "softcaps": lambda: build(
        "gemma2",
        seed=4,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        head_dim=16,
        max_position_embeddings=2048,
        num_hidden_layers=2,
    ),
    "windows": lambda: build(
        "qwen2",
        seed=4,
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=1,
        max_position_embeddings=2048,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def generated(package: str, name: str, lengths: list[int], **fields: Any) -> None:
    """The tokens of generate(), by a model that runs fused, with prompts that begin alike."""
    model: PreTrainedModel = MODELS[name]().half()
    prompts = test_flash_engine.clear_prompts(model, lengths)
    with only(package):
        pages: dict[str, Any] = {"page_size": PAGES[package], "num_blocks": 40, "max_batch_tokens": 60}
        stepper: Stepper = test_flash_engine.check_tokens(model, prompts, **(pages | fields))
    runner: Any = stepper.core.runner
    assert type(runner._ops) is FlashTritonOps and isinstance(runner._mixed._forward, FusedForward)


def replayed_steps(package: str, mixed: bool) -> tuple[int, float]:
    """Recordings that were replayed, and the largest error of their logits.

    The recorder refuses whatever launches anything else when it is replayed, or on other memory.
    """
    model, backend, kernel = build_tiny(num_hidden_layers=2).half(), FakeGraphs(), make_kernel(package)

    def ops(kv: KVTensors) -> FlashTritonOps:
        for tensor in (*kv.keys, *kv.values):
            tensor[1:-1] = float("nan")
        return FlashTritonOps(kernel, kv)

    runner = make_runner(
        model,
        ops=ops,
        graph_backend=backend,
        graphs=(mixed, True),
        max_blocks_per_request=4,
        max_requests=4,
        q_padding=8,
        kv_padding=64,
        page_size=PAGES[package] if package != "flash-attn-3" else 8,
    )
    rows, error = Rows(runner, 512, [7, 9, 3]), 0.0
    steps = [{0: 7, 1: 2}, {1: 7, 0: 1}, {1: 1, 0: 1, 2: 3}, {0: 1, 1: 1}, {1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1}]
    for counts in steps:
        for request_id, logits in rows.step(counts).items():
            request = rows.requests[int(request_id)]
            difference = logits - expected(model, request, request.computed)
            error = max(error, difference.abs().nan_to_num(torch.inf).max().item())
    assert isinstance(runner._mixed._forward, FusedForward)
    return sum(graph.replays > 1 for graph in backend.graphs), error


def cleared(device: torch.device | str = "cpu") -> None:
    """Blocks that are named, whole, in every tensor; the numbers behind the count mean nothing."""
    from engine.ops.triton.clear import BlockClearer

    kv = allocate(2, 5, 3, 32, 48, torch.float16, device)
    tensors = [*kv.keys, *kv.values]
    for tensor in tensors:
        tensor.fill_(float("nan"))
    BlockClearer(tensors)(torch.tensor([2, 5, 3, 1, 0], dtype=torch.int32, device=device))
    for tensor in tensors:
        assert not tensor[[3, 5]].any() and tensor[[0, 1, 2, 4]].isnan().all()
