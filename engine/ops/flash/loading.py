"""Where flash kernels come from: installed packages, the `kernels` package, torch itself.

Called by `choice.py`, and by the runner for the kernel that settings name. Nothing is imported before its device is
there, and nothing is downloaded unless a model asks for that implementation by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from engine.ops.flash.kernels import FlashAttention2, FlashAttention3, FlashKernel, NotUsableError, TorchVarlen


@dataclass(frozen=True)
class Source:
    """One place where a kernel may be.

    Attributes:
        package: what is to be installed, or downloaded; names the source.
        implementation: the name that transformers has for the kernel; None where it has none.
        title: of the kernel in the log.
        devices: types of devices that it runs on.
        capabilities: of CUDA devices, from the first one to before the second one.
        make: takes the package's name and a title, and raises ImportError, OSError or NotUsableError.
        downloads: files may have to be fetched.
    """

    package: str
    implementation: str | None
    title: str
    devices: tuple[str, ...]
    capabilities: tuple[tuple[int, int], tuple[int, int]]
    make: Callable[[str, str], FlashKernel]
    downloads: bool = False

    def load(self) -> FlashKernel:
        """The kernel; NotUsableError where it cannot be had."""
        try:
            return self.make(self.package, f"{self.title} ({self.package})")
        except ModuleNotFoundError as error:
            raise NotUsableError(f"is not installed ({error})") from None
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # a build for another torch; no connection
            raise NotUsableError(f"cannot be loaded: {first_line(error)}") from error


def _flash_attn(package: str, title: str) -> FlashKernel:
    module = import_module("flash_attn")
    return FlashAttention2(module, package, _with_version(title, module))


def _flash_attn_3(package: str, title: str) -> FlashKernel:
    try:
        prefix, module = "", import_module("flash_attn_interface")
    except ModuleNotFoundError:
        prefix = "flash_attn_3."  # where newer versions have it
        module = import_module(f"{prefix}flash_attn_interface")
    try:
        flags = import_module(f"{prefix}flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):  # versions that do not tell
        flags = None
    return FlashAttention3(module, package, title, flags)


def _flash_attn_of_hub(package: str, title: str) -> FlashKernel:
    return FlashAttention2(_from_hub(package, 4), package, title)


def _flash_attn_3_of_hub(package: str, title: str) -> FlashKernel:
    return FlashAttention3(_from_hub(package, 1), package, title)


def _torch_varlen(package: str, title: str) -> FlashKernel:
    return TorchVarlen(import_module("torch.nn.attention.varlen"), package, title)


_FROM_AMPERE, _TO_HOPPER = ((8, 0), (99, 0)), ((8, 0), (10, 0))
# The best one first. Which kernels the hub's builds are for is told by what they do when they are tried.
SOURCES = (
    Source("flash-attn-3", "flash_attention_3", "FlashAttention 3", ("cuda",), _TO_HOPPER, _flash_attn_3),
    Source(
        "kernels-community/vllm-flash-attn3",
        "flash_attention_3",
        "FlashAttention 3",
        ("cuda",),
        _TO_HOPPER,
        _flash_attn_3_of_hub,
        downloads=True,
    ),
    Source("flash-attn", "flash_attention_2", "FlashAttention 2", ("cuda",), _FROM_AMPERE, _flash_attn),
    Source(
        "kernels-community/flash-attn2",
        "flash_attention_2",
        "FlashAttention 2",
        ("cuda", "xpu"),
        _FROM_AMPERE,
        _flash_attn_of_hub,
        downloads=True,
    ),
    Source("torch", None, "varlen_attn", ("cuda",), _FROM_AMPERE, _torch_varlen),
)


def load(package: str) -> FlashKernel:
    """The kernel that a source's name stands for.

    Raises:
        NotUsableError: it cannot be had in this process.
    """
    return next(source for source in SOURCES if source.package == package).load()


def first_line(error: BaseException) -> str:
    """Of an error's text, or its class where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _from_hub(repository: str, version: int) -> ModuleType:
    """What the `kernels` package has in its cache, or downloads."""
    get_kernel: Callable[..., Any] = import_module("kernels").get_kernel
    takes_version = "version" in inspect.signature(get_kernel).parameters
    module: ModuleType = get_kernel(repository, **({"version": version} if takes_version else {}))
    return module


def _with_version(title: str, module: ModuleType) -> str:
    version = getattr(module, "__version__", None)
    return f"{title[:-1]} {version})" if version else title
