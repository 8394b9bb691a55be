"""Which flash kernel is taken, and what is said of those that are not. Packages are fakes that run on CPU."""

from __future__ import annotations

import dataclasses
import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from engine import ContinuousBatchingConfig
from engine.build import settle
from engine.execution.kv_tensors import allocate
from engine.facts import ModelFacts
from engine.model.shadow import attention_needs, model_facts
from engine.ops import make_ops
from engine.ops.flash import loading
from engine.ops.flash.choice import choose_flash
from engine.ops.flash.kernels import AttentionNeeds, NotUsableError
from engine.ops.flash.ops import FlashOps
from engine.settings import Settings
from tests.architectures import ARCHITECTURES
from tests.engine import fake_flash
from tests.models import build_tiny

NEEDS = AttentionNeeds(torch.device("cpu"), torch.bfloat16, 4, 2, 16)
FA2, FA3, VARLEN = fake_flash.flash_attn, fake_flash.flash_attn_interface, fake_flash.torch_varlen
BUILD = fake_flash.flash_attn_config  # what a build of version 3 leaves out
SLIDING, CAPPED = frozenset({"window"}), frozenset({"window", "softcap"})
WITH_SINKS = frozenset({"window", "sinks"})
HALF, SINGLE = torch.float16, torch.float32


@dataclasses.dataclass
class Chosen:
    """What was chosen and what was said."""

    package: str | None
    level: int | None = None
    text: str = ""


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Chooses among these modules, for these needs."""

    def run(*modules: ModuleType, asked: str = "sdpa", auto_switch: bool = True, **needs: Any) -> Chosen:
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="engine"):
            caplog.clear()
            fake_flash.install(patch, *modules)
            kernel = choose_flash(asked, auto_switch, dataclasses.replace(NEEDS, **needs))
        package = None if kernel is None else kernel.package
        if not caplog.records:
            return Chosen(package)
        (record,) = caplog.records
        return Chosen(package, record.levelno, record.getMessage())

    return run


# The guide's rules


@pytest.mark.parametrize("asked", ["sdpa", "eager"])
def test_switched_models_get_version_3_else_2_with_a_warning(choose: Any, asked: str) -> None:
    found = choose(FA3(), FA2(), VARLEN(), asked=asked)
    assert found == Chosen("flash-attn-3", logging.WARNING, f"attention: {asked} -> FlashAttention 3 (flash-attn-3)")
    found = choose(FA2(), VARLEN(), asked=asked)
    assert (found.package, found.level) == ("flash-attn", logging.WARNING)
    assert found.text.startswith(f"attention: {asked} -> FlashAttention 2 (flash-attn 2.8.3); not taken: ")
    assert "FlashAttention 3 (flash-attn-3) is not installed" in found.text
    found = choose(VARLEN(), asked=asked)
    assert (found.package, found.level) == ("torch", logging.WARNING)
    assert "flash-attn-3) is not installed" in found.text and "(flash-attn) is not installed" in found.text


def test_without_any_the_backend_is_unchanged_and_a_line_says_so(choose: Any) -> None:
    found = choose()
    assert (found.package, found.level) == (None, logging.INFO)
    assert found.text.count("is not installed") == 3


@pytest.mark.parametrize(("asked", "auto_switch"), [("sdpa", False), ("eager", False), ("paged|eager", True)])
def test_what_is_to_stay_is_not_switched(choose: Any, asked: str, auto_switch: bool) -> None:
    assert choose(FA3(), FA2(), asked=asked, auto_switch=auto_switch) == Chosen(None)


@pytest.mark.parametrize("auto_switch", [False, True])
def test_the_version_that_is_asked_for_comes_first(choose: Any, auto_switch: bool) -> None:
    for asked, package in (("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3")):
        found = choose(FA3(), FA2(), asked=asked, auto_switch=auto_switch)
        assert (found.package, found.level) == (package, logging.INFO)
        assert "not taken" not in found.text
    found = choose(FA3(), asked="flash_attention_2", auto_switch=auto_switch)
    assert (found.package, found.level) == ("flash-attn-3", logging.WARNING)
    assert "(flash-attn) is not installed" in found.text
    found = choose(asked="flash_attention_2", auto_switch=auto_switch)
    assert (found.package, found.level) == (None, logging.WARNING)


def test_a_class_of_model_that_does_not_support_it_is_not_switched(choose: Any) -> None:
    found = choose(FA3(), FA2(), supports_flash=False)
    assert (found.package, found.level) == (None, logging.INFO) and "does not support" in found.text
    assert choose(FA2(), asked="flash_attention_2", supports_flash=False).package == "flash-attn"


# What kernels can do


@pytest.mark.parametrize(
    ("modules", "needs", "package", "words"),
    [
        ([FA3(), FA2()], {"dtype": SINGLE}, None, "in float16 and bfloat16, and the model is in torch.float32"),
        ([FA3(), FA2()], {"head_dim": 20}, None, "needs heads of a multiple of 8 numbers, and the model's have 20"),
        ([FA3(), FA2()], {"head_dim": 264}, None, "has heads of 256 numbers at most, and the model's have 264"),
        ([FA3(), FA2()], {"page_size": 128}, "flash-attn-3", ""),
        ([FA2()], {"page_size": 128}, None, "of 256 tokens, and page_size is 128: set it to 256, or leave it out"),
        ([FA2()], {"page_size": 700}, None, "page_size is 700: set it to 512 or 768"),
        ([VARLEN()], {"page_size": 300}, None, "page_size is 300: set it to 256 or 512"),
        ([FA2()], {"page_size": 512}, "flash-attn", ""),
        ([FA3(), FA2()], {"features": WITH_SINKS}, None, "does not compute sinks, which the model needs"),
        ([FA3(lacks=()), FA2()], {"features": WITH_SINKS}, "flash-attn-3", ""),
        ([FA3(), FA2()], {"features": CAPPED}, "flash-attn-3", ""),
        ([FA3(), BUILD("SOFTCAP"), FA2()], {"features": CAPPED}, "flash-attn", "does not compute softcap"),
        ([FA3(), BUILD("LOCAL"), FA2()], {"features": SLIDING}, "flash-attn", "does not compute window"),
        ([FA3(), BUILD("PAGEDKV"), FA2()], {}, "flash-attn", "was built without PAGEDKV"),
        ([FA3(), BUILD("HDIM192", "HDIM256"), FA2()], {"head_dim": 136}, "flash-attn", "has heads of 128"),
        ([FA3(), BUILD("FP16"), FA2()], {"dtype": HALF}, "flash-attn", "does not compute float16"),
        ([FA2("2.5.6", ["softcap"]), VARLEN()], {"features": CAPPED}, None, "does not compute softcap"),
        ([FA2("2.4.0", ["block_table"])], {}, None, "too old: its flash_attn_varlen_func takes no block_table"),
        ([VARLEN(["block_table", "seqused_k"])], {}, None, "is too old: its varlen_attn takes no block_table"),
        ([FA2()], {"features": CAPPED, "dtype": HALF}, "flash-attn", ""),
    ],
)  # fmt: skip
def test_what_a_model_needs_and_a_kernel_cannot_makes_it_the_next_one(
    choose: Any, modules: list[ModuleType], needs: dict[str, Any], package: str | None, words: str
) -> None:
    found = choose(*modules, **needs)
    assert found.package == package
    assert words in found.text


def test_a_page_size_that_costs_the_kernel_is_a_warning(choose: Any) -> None:
    assert choose(FA2(), page_size=128).level == logging.WARNING


def test_a_kernel_that_fails_or_is_wrong_is_not_taken(choose: Any) -> None:
    """Whatever it raises, and if it aligns rows at their beginning, which old versions did."""
    broken, wrong = FA3(), FA2()

    def raises(*args: Any, cu_seqlens_q: Any = None, page_table: Any = None, **kwargs: Any) -> None:
        raise AssertionError("no kernel image is available\nsecond line")

    right = wrong.flash_attn_varlen_func

    def not_causal(q: Any, *args: Any, causal: bool = True, block_table: Any = None, **kwargs: Any) -> Any:
        return right(q, *args, causal=False, block_table=block_table, **kwargs)

    broken.flash_attn_with_kvcache = raises  # type: ignore[attr-defined]
    wrong.flash_attn_varlen_func = not_causal  # type: ignore[attr-defined]
    found = choose(broken, wrong, VARLEN())
    assert found.package == "torch"
    assert "failed when it was tried: no kernel image is available;" in found.text
    assert "was tried and gave other numbers than plain torch, by " in found.text


def test_devices_that_no_kernel_runs_on_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_run(name: str) -> ModuleType:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(loading, "import_module", must_not_run)
    for asked in ("sdpa", "flash_attention_2", "flash_attention_3"):
        assert choose_flash(asked, True, NEEDS) is None  # on CPU


def test_version_3_in_its_newer_place(choose: Any) -> None:
    place = {"prefix": "flash_attn_3."}
    assert choose(FA3(**place), BUILD(**place)).package == "flash-attn-3"
    assert "was built without VARLEN" in choose(FA3(**place), BUILD("VARLEN", **place)).text


# The hub's kernels


class Hub:
    """The package `kernels`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> None:
        self.asked: list[tuple[str, int]] = []
        self._module = module
        fake_flash.install(monkeypatch)
        package = ModuleType("kernels")
        package.get_kernel = self.get_kernel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kernels", package)

    def get_kernel(self, repo_id: str, *, revision: str | None = None, version: int | None = None) -> ModuleType:
        assert version is not None
        self.asked.append((repo_id, version))
        if self._module is None:
            raise OSError("no connection")
        return self._module


@pytest.mark.parametrize(
    ("asked", "module", "repository"),
    [
        ("flash_attention_2", FA2(), ("kernels-community/flash-attn2", 4)),
        ("flash_attention_3", FA3(lacks=()), ("kernels-community/vllm-flash-attn3", 1)),
    ],
)
def test_kernels_are_fetched_for_models_that_ask_for_them_by_name(
    monkeypatch: pytest.MonkeyPatch, asked: str, module: ModuleType, repository: tuple[str, int]
) -> None:
    hub = Hub(monkeypatch, module)
    assert choose_flash("sdpa", True, NEEDS) is None and not hub.asked
    kernel = choose_flash(asked, False, NEEDS)
    assert kernel is not None and kernel.package == repository[0] and hub.asked == [repository]


def test_a_device_with_the_hubs_kernels_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As XPU is: nothing to say where nothing is asked for."""
    hub = Hub(monkeypatch, FA2())
    monkeypatch.setattr(loading, "SOURCES", tuple(source for source in loading.SOURCES if "xpu" in source.devices))
    with caplog.at_level(logging.INFO, logger="engine"):
        assert choose_flash("sdpa", True, NEEDS) is None and not hub.asked and not caplog.text
    kernel = choose_flash("flash_attention_2", True, NEEDS)
    assert kernel is not None and kernel.package == "kernels-community/flash-attn2"


def test_installed_packages_need_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, FA2())
    monkeypatch.setitem(sys.modules, "flash_attn", FA2())
    kernel = choose_flash("flash_attention_2", True, NEEDS)
    assert kernel is not None and kernel.package == "flash-attn" and not hub.asked


def test_no_connection_is_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Hub(monkeypatch, None)
    assert choose_flash("flash_attention_2", True, NEEDS) is None
    assert "(kernels-community/flash-attn2) cannot be loaded: no connection" in caplog.text


# From a model to its operations


def settled(model: Any, **fields: Any) -> Settings:
    return settle(model, model_facts(model), ContinuousBatchingConfig(num_blocks=8, **fields), None)


def test_settings_follow_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages, and the path for decode-only steps, which reads block tables."""
    fake_flash.install(monkeypatch, FA2())
    model = build_tiny(max_position_embeddings=256).bfloat16()
    settings = settled(model)
    assert (settings.flash_package, settings.page_size, settings.max_blocks_per_request) == ("flash-attn", 256, 1)
    plain = settled(model, auto_switch_to_flash=False)
    assert (plain.flash_package, plain.page_size, plain.max_blocks_per_request) == (None, 32, 0)
    small = settled(model, page_size=64)
    assert (small.flash_package, small.page_size) == (None, 64)
    fake_flash.install(monkeypatch, FA3())
    settings = settled(model)
    assert (settings.flash_package, settings.page_size) == ("flash-attn-3", 32)


def test_operations_are_those_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine")
    fake_flash.install(monkeypatch, FA2())
    kv = allocate(1, 4, 1, 256, 8, torch.bfloat16)
    ops = make_ops(kv, flash_package="flash-attn")
    assert type(ops) is FlashOps
    title = "FlashAttention 2 (flash-attn 2.8.3)"
    assert ops.why_plain == f"it runs in {title} beside plain torch, since Triton has no kernels for CPU"
    assert f"attention: {title} beside plain torch: Triton has no kernels for CPU" in caplog.text
    fake_flash.install(monkeypatch)
    with pytest.raises(NotUsableError, match="is not installed"):
        make_ops(kv, flash_package="flash-attn")


@pytest.mark.parametrize(
    ("name", "features"),
    [("llama", set()), ("mistral", {"window"}), ("gemma2", {"window", "softcap"}), ("gpt_oss", {"window", "sinks"})],
)
def test_what_models_need(name: str, features: set[str]) -> None:
    model = ARCHITECTURES[name]()
    facts: ModelFacts = model_facts(model)
    needs = attention_needs(model, facts, 64)
    assert needs == AttentionNeeds(
        torch.device("cpu"), torch.float32, 4, 2, facts.head_dim, frozenset(features), 64, needs.supports_flash
    )
