"""Which ops serve which attention implementation, what is logged about it, and that the user's model stays itself."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import allocate
from engine.model.shadow import attention_of, make_shadow
from engine.ops import ATTENTIONS, make_ops
from engine.ops.cpu import library
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.eager_ops import EagerOps
from engine.ops.torch_ops import TorchOps
from tests.architectures import ARCHITECTURES
from tests.harness import collect, running
from tests.models import build_tiny, ref

PLAIN = {"sdpa": TorchOps, "eager": EagerOps, "paged|eager": EagerOps}
FLASH = ("flash_attention_2", "flash_attention_3")


def chosen(
    caplog: pytest.LogCaptureFixture, attention: str, auto_switch: bool, dtype: torch.dtype = torch.float32
) -> tuple[type, list[logging.LogRecord]]:
    """The class of the ops, and what was logged."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="engine"):
        ops = make_ops(allocate(1, 4, 1, 4, 8, dtype), attention=attention, auto_switch=auto_switch)
    return type(ops), list(caplog.records)


@pytest.mark.parametrize("attention", PLAIN)
def test_without_auto_switch_the_backend_is_the_one_asked_for(caplog: pytest.LogCaptureFixture, attention: str) -> None:
    assert chosen(caplog, attention, auto_switch=False) == (PLAIN[attention], [])


@pytest.mark.parametrize("attention", PLAIN)
def test_auto_switch_takes_the_faster_kernel_and_says_so(caplog: pytest.LogCaptureFixture, attention: str) -> None:
    kind, (record,) = chosen(caplog, attention, auto_switch=True)
    assert kind is CpuOps
    assert f"{attention} -> the engine's compiled CPU kernel" in record.getMessage()


@pytest.mark.parametrize("attention", PLAIN)
def test_auto_switch_leaves_the_backend_when_nothing_is_faster(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attention: str
) -> None:
    kind, (record,) = chosen(caplog, attention, True, torch.float16)  # the kernel knows no float16
    assert kind is PLAIN[attention] and record.levelno == logging.INFO
    assert f"{attention}, unchanged" in record.getMessage() and "float16" in record.getMessage()
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "_library", library._library.__wrapped__)  # not the one that is loaded already
    kind, (record,) = chosen(caplog, attention, True)
    assert kind is PLAIN[attention] and record.levelno == logging.WARNING
    assert f"{attention}, unchanged" in record.getMessage() and "no C++ compiler" in record.getMessage()


@pytest.mark.parametrize("attention", FLASH)
@pytest.mark.parametrize("auto_switch", [False, True])
def test_flash_falls_to_the_best_of_the_device(
    caplog: pytest.LogCaptureFixture, attention: str, auto_switch: bool
) -> None:
    kind, (record,) = chosen(caplog, attention, auto_switch)
    assert kind is CpuOps and f"{attention} -> the engine's compiled CPU kernel" in record.getMessage()
    kind, (record,) = chosen(caplog, attention, auto_switch, torch.float16)
    assert kind is TorchOps and f"{attention} -> sdpa" in record.getMessage()


def test_a_device_without_kernels_keeps_plain_torch(caplog: pytest.LogCaptureFixture) -> None:
    kv = allocate(1, 4, 1, 4, 8, torch.float32, "meta")
    with caplog.at_level(logging.INFO, logger="engine"):
        assert type(make_ops(kv)) is TorchOps
    (record,) = caplog.records
    assert "sdpa, unchanged" in record.getMessage() and "Triton" in record.getMessage()


@pytest.mark.parametrize("attention", ["flex_attention", "paged|sdpa", "SDPA", ""])
def test_other_names_are_refused_and_the_known_ones_listed(attention: str) -> None:
    with pytest.raises(ValueError, match="sdpa, eager, paged|eager, flash_attention_2, flash_attention_3") as error:
        make_ops(allocate(1, 4, 1, 4, 8, torch.float32), attention=attention)
    assert repr(attention) in str(error.value)
    assert set(ATTENTIONS) == {*PLAIN, *FLASH}


@pytest.mark.parametrize("auto_switch", [False, True])
def test_groups_reach_the_ops(auto_switch: bool) -> None:
    groups = [LayerGroup((0,)), LayerGroup((1,), 4)]
    for attention in ATTENTIONS:
        kv = allocate(1, 4, 1, 4, 8, torch.float32)
        ops = make_ops(kv, groups, attention=attention, auto_switch=auto_switch)
        assert [ops.window(layer) for layer in (0, 1)] == [None, 4]


@pytest.mark.parametrize("attention", PLAIN)
def test_attention_of_a_model_and_of_its_shadow(attention: str) -> None:
    model = build_tiny()
    model.set_attn_implementation(attention)
    shadow = make_shadow(model)
    assert attention_of(model) == attention_of(shadow) == attention_of(make_shadow(shadow)) == attention  # type: ignore[arg-type]


def padded_logits(model: PreTrainedModel) -> torch.Tensor:
    """Of a left-padded batch, without the padding."""
    ids = torch.arange(18).view(2, 9) * 7 % model.config.vocab_size
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]


@pytest.mark.parametrize("attention", PLAIN)
def test_the_users_model_is_itself_while_a_manager_runs(attention: str) -> None:
    """Its implementation, its config and a plain forward of a padded batch are what they are without an engine."""
    model = build_tiny()
    expected, tokens = padded_logits(model), ref(model, [1, 2, 3], 5)
    model.set_attn_implementation(attention)
    alone, config = padded_logits(model), copy.deepcopy(model.config.to_dict())
    if attention != "paged|eager":  # with which transformers itself does not mask a plain forward
        torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4)
    with running(model) as manager:
        ids = manager.add_requests([[1, 2, 3]], max_new_tokens=5)
        assert torch.equal(padded_logits(model), alone)
        (output,) = collect(manager, ids)
        assert list(output.generated_tokens) == tokens
        assert torch.equal(padded_logits(model), alone)
        assert model.config._attn_implementation == attention and model.config.to_dict() == config
    assert torch.equal(padded_logits(model), alone)


def test_the_shadow_of_a_model_with_windows_leaves_it_alone() -> None:
    model = ARCHITECTURES["gemma2"]()
    alone, implementation = padded_logits(model), model.config._attn_implementation
    make_shadow(model)
    assert torch.equal(padded_logits(model), alone) and model.config._attn_implementation == implementation
