import time

import numpy as np
import pytest

from sits_trt.runtime.runners.null import NullRunner, null_answer
from sits_trt.runtime.step import StepInputs
from tests.support.runtime import TILE, VOCAB, prompt


def run(runner: NullRunner, tokens: tuple[int, ...], context: int, table: list[int]) -> int:
    logits = runner.run(
        StepInputs(
            np.array(tokens, np.int32),
            np.array([table], np.int32),
            np.array([context], np.int32),
            np.array([0, len(tokens)], np.int32),
            np.array([len(tokens) - 1], np.int32),
        )
    )
    assert logits.shape == (1, runner.vocab_size)
    return int(logits.argmax())


@pytest.mark.parametrize("cuts", [[50], [1] * 50, [16, 16, 18], [7, 30, 13]])
def test_chunks_give_the_foretold_answer(cuts: list[int]) -> None:
    runner, ids, table = NullRunner(TILE, 8, VOCAB), prompt(50), [5, 0, 7, 2]
    at = 0
    for count in cuts:
        token = run(runner, ids[at : at + count], at, table)
        at += count
    answer = [token]
    while len(answer) < 10:
        answer.append(run(runner, (answer[-1],), at, table))
        at += 1
    assert answer == null_answer(ids, 10, VOCAB)


def test_every_token_and_every_tile_matters() -> None:
    ids = prompt(40)
    answer = null_answer(ids, 8, VOCAB)
    for place in (0, 15, 16, 39):
        changed = (*ids[:place], (ids[place] + 1) % VOCAB, *ids[place + 1 :])
        assert null_answer(changed, 8, VOCAB) != answer
    runner = NullRunner(TILE, 8, 10**6)
    run(runner, ids[:39], 0, [1, 2, 3])
    right = run(runner, ids[39:], 39, [1, 2, 3])
    assert [right] == null_answer(ids, 1, 10**6)
    assert run(runner, ids[39:], 39, [1, 2, 4]) != right


def test_a_step_takes_its_time() -> None:
    runner = NullRunner(TILE, 8, VOCAB, step_ms=30)
    began = time.monotonic()
    run(runner, (1,), 0, [0])
    assert time.monotonic() - began >= 0.03
