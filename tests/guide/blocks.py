"""The guide's code blocks: read from snippets.md, fitted to small models on CPU, run in either spelling.

`GUIDE` is the spelling of the guide, which `engine.install()` makes run here: methods of the model, and the classes
of transformers. `OURS` calls our functions with our classes: imports and `model.f(...)` are rewritten, nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import engine
from engine import ContinuousBatchingManager, GenerationOutput, RequestStatus
from tests.models import reference

GUIDE, OURS = SPELLINGS = ("guide", "ours")
TIE = 2e-3  # closer logits than this may change places; float32 noise is ~1e-4

_BLOCK = re.compile(r"^## (\w+)\n\n```\w+\n(.*?)^```", re.M | re.S)
BLOCKS: dict[str, str] = dict(_BLOCK.findall((Path(__file__).parent / "snippets.md").read_text()))


@dataclass(frozen=True)
class Substitution:
    """A change to the blocks' text that is not spelling.

    Attributes:
        old, new: text; every occurrence is replaced.
        why: it is needed.
        block: the only one that it is for; None means all.
    """

    old: str
    new: str
    why: str
    block: str | None = None


HERE = "a small local model stands for the hub's"
SHORT = "fewer tokens show the same"
SUBSTITUTIONS = (
    Substitution('"Qwen/Qwen3-4B"', "TINY", HERE),
    Substitution('"Qwen/Qwen3-32B"', "TINY", HERE),
    Substitution('"google/gemma-2-2b"', "GEMMA", HERE),
    Substitution('"sdpa"', '"eager"', "transformers refuses to load Gemma-2 with sdpa", "sliding_window"),
    Substitution('"flash_attention_2"', '"sdpa"', "transformers refuses to load it without flash-attn"),
    Substitution("dtype=torch.bfloat16", "dtype=torch.float32", "tokens are compared exactly"),
    Substitution("max_new_tokens=64", "max_new_tokens=8", SHORT),
    Substitution("max_new_tokens=512", "max_new_tokens=24", SHORT),
    Substitution("max_new_tokens=32", "max_new_tokens=6", SHORT),
    Substitution("sliding_window = 4096", "sliding_window = 16", "short outputs must cross it"),
    Substitution(
        "cpu_offload_space=8.0",
        "cpu_offload_space=8.0, page_size=16, num_blocks=12",
        "with the default number of blocks nothing has to leave the device",
    ),
    Substitution(
        "per_request_processors=True", "per_request_processors=True, seed=0", "the streams of two runs must be the same"
    ),
    Substitution(
        "# each request gets its own sampling parameters",
        "manager = model.init_continuous_batching(\n"
        "    generation_config=generation_config, continuous_batching_config=cb_config\n"
        ")\n"
        "manager.start()",
        "the block leaves out how the config gets to the manager",
    ),
    Substitution(
        "# generate_batch()",
        "outputs = model.generate_batch(\n"
        "    inputs=inputs, generation_config=generation_config, continuous_batching_config=cb_config\n"
        ")",
        "the block leaves out the call",
    ),
    Substitution("tp_size=4", "tp_size=2", "two processes for two cores"),
    Substitution("--nproc-per-node 4", "--nproc-per-node 2", "two processes for two cores"),
    Substitution("torchrun", "torchrun --standalone", "a free port, since others may run beside the test"),
)

_IMPORT = re.compile(r"^from (transformers\.\S+) import (.+)$", re.M)
_CALL = re.compile(r"\bmodel\.(generate_batch|init_continuous_batching|continuous_batching_context_manager)\(")
_PRELUDES = {
    GUIDE: "from transformers.generation import ContinuousBatchingConfig, GenerationConfig\n",
    OURS: "from transformers.generation import GenerationConfig\n"
    "from engine import (ContinuousBatchingConfig, continuous_batching_context_manager, generate_batch,\n"
    "    init_continuous_batching)\n",
}


def fitted(block: str) -> str:
    """The block with the substitutions that apply to it."""
    code = BLOCKS[block]
    for each in SUBSTITUTIONS:
        if each.block in (None, block):
            code = code.replace(each.old, each.new)
    return code


def spelled(code: str, spelling: str) -> str:
    """Code of the guide's spelling in this one."""
    if spelling == GUIDE:
        return code
    return _CALL.sub(r"\1(model, ", _IMPORT.sub(_our_import, code))


def script(block: str, spelling: str) -> str:
    """The block as lines of a program, which has its names but for the models' from here."""
    return _PRELUDES[spelling] + spelled(fitted(block), spelling)


def _our_import(match: re.Match[str]) -> str:
    """One line a name: ours come from the engine, the others from where they were."""
    homes = ((name, "engine" if name in engine.__all__ else match[1]) for name in match[2].split(", "))
    return "\n".join(f"from {home} import {name}" for name, home in homes)


class Reader:
    """Someone who runs blocks of the guide one after the other: what one defines, the next can use.

    Args:
        spelling: of all that is run.
        original: the model that blocks load copies of; plain transformers is asked for its tokens.
        names: what is defined at the start.
    """

    def __init__(self, spelling: str, original: PreTrainedModel, **names: Any) -> None:
        self.spelling, self.original = spelling, original
        self.names: dict[str, Any] = {}
        exec(_PRELUDES[spelling], self.names)
        self.names.update(names)

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def define(self, **names: Any) -> None:
        self.names.update(names)

    def run(self, block: str) -> None:
        """Run a block of the guide."""
        exec(compile(spelled(fitted(block), self.spelling), f"<block {block}>", "exec"), self.names)

    def do(self, code: str) -> None:
        """Run a line of our own, in the guide's spelling, as if it stood there."""
        exec(spelled(code, self.spelling), self.names)

    def generate(self) -> dict[str, GenerationOutput]:
        """`generate_batch` with the `cb_config` of the block before."""
        self.do(
            "outputs = model.generate_batch(inputs=inputs, generation_config=generation_config,"
            " continuous_batching_config=cb_config)"
        )
        outputs: dict[str, GenerationOutput] = self["outputs"]
        return outputs

    def start(self, **fields: Any) -> ContinuousBatchingManager:
        """A started manager whose config has these fields."""
        self.define(fields=fields)
        self.do(
            "manager = model.init_continuous_batching(generation_config=generation_config,"
            " continuous_batching_config=ContinuousBatchingConfig(**fields))"
        )
        self["manager"].start()
        manager: ContinuousBatchingManager = self["manager"]
        return manager

    def settings(self) -> Any:
        """What `cb_config` comes to for this model."""
        self.do("probe = model.init_continuous_batching(continuous_batching_config=cb_config)")
        return self["probe"].settings

    def text(self, tokens: list[int]) -> str:
        text: str = self["tokenizer"].decode(tokens, skip_special_tokens=True)
        return text

    def expected(self, prompt: list[int], n: int) -> list[int]:
        """What plain transformers generates of at most `n` tokens, up to the EOS."""
        wanted = reference(self.original, prompt, n).token_ids
        eos = self["tokenizer"].eos_token_id
        return wanted[: wanted.index(eos) + 1] if eos in wanted else wanted

    def check(self, output: GenerationOutput | None, prompt: list[int], n: int) -> None:
        """Finished with the tokens of plain transformers, as far as these have no near tie."""
        assert output is not None and output.error is None and output.status == RequestStatus.FINISHED
        self.check_tokens(output.generated_tokens, prompt, n)

    def check_tokens(self, generated: list[int], prompt: list[int], n: int) -> None:
        wanted = self.expected(prompt, n)
        gaps = reference(self.original, prompt, n).gaps
        tie = next((i for i, gap in enumerate(gaps[: len(wanted)]) if gap < TIE), len(wanted))
        assert generated[:tie] == wanted[:tie]
        assert tie < len(wanted) or len(generated) == len(wanted)

    def check_all(self, n: int = 8) -> None:
        """The same of all `outputs`, which are those of `inputs`."""
        outputs, inputs = self["outputs"], self["inputs"]
        assert list(outputs) == [f"req_{index}" for index in range(len(inputs))]
        for output, prompt in zip(outputs.values(), inputs, strict=True):
            self.check(output, prompt, n)
