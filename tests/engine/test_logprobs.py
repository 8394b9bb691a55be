"""Log-probabilities of the chosen tokens: one a token, equal to the model's own, under chunking and preemption."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.harness import Stepper, collect, running, tokens
from tests.models import ref


@pytest.mark.parametrize("num_blocks", [64, 8])
def test_logprobs_are_the_models_own(tiny: PreTrainedModel, num_blocks: int) -> None:
    stepper = Stepper(tiny, return_logprobs=True, num_blocks=num_blocks, max_batch_tokens=24, safety_margin=0.0)
    requests = [stepper.add(tokens(i, 30), 30) for i in range(4)]
    stepper.drain()
    if num_blocks == 8:
        assert stepper.core.scheduler.num_preemptions > 0
    for request in requests:
        output = stepper.results()[request.request_id]
        with torch.inference_mode():
            logits = tiny(torch.tensor([request.token_ids])).logits[0].log_softmax(-1)
        wanted = [logits[29 + i, token].item() for i, token in enumerate(output.generated_tokens)]
        assert output.logprobs == pytest.approx(wanted, abs=1e-4)


def test_logprobs_are_off_unless_asked_for(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        plain, asked = collect(
            manager,
            [
                str(manager.add_request(tokens(0, 8), max_new_tokens=5)),
                str(manager.add_request(tokens(0, 8), max_new_tokens=5, logprobs=True)),
            ],
        )
        assert plain.logprobs == [] and len(asked.logprobs) == 5
        assert plain.generated_tokens == asked.generated_tokens == ref(tiny, tokens(0, 8), 5)
