import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from sits_trt.runtime.history import TokenCounts
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.runtime.sampler import NOT_FINITE, sample
from sits_trt.runtime.sampling import plan_sampling
from sits_trt.runtime.step import Advance, Step, StepResult
from sits_trt.runtime.uniforms import uniforms

VOCAB = 97


def advance(
    key: int,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    vocab: int = VOCAB,
    **sampling: object,
) -> Advance:
    params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    params.validate(vocab)
    plan = plan_sampling(Request("", prompt, params), vocab, eos)
    counts = TokenCounts(prompt, 100)
    for token in output:
        counts.add(token)
    return Advance(
        key,
        (1,),
        0,
        np.zeros(1, np.int32),
        plan,
        len(output),
        (prompt + output)[len(prompt + output) - plan.recent_tokens :],
        counts.snapshot() if plan.penalized else None,
    )


def run(advances: list[Advance], logits: torch.Tensor) -> StepResult:
    return sample(Step(0, tuple(advances)), logits)


def noise(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def slow(row: list[float], prompt: tuple[int, ...], output: tuple[int, ...], params: SamplingParams, draw: int) -> int:
    """The same by the book, token by token in Python floats, for a seeded request that ends with id 0."""
    seen, said = set(prompt) | set(output), Counter(output)
    for token in range(len(row)):
        if token in seen:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        if token in said:
            row[token] -= params.presence_penalty + params.frequency_penalty * said[token]
    history = prompt + output
    for word in params.bad_words:
        if len(word) == 1 or history[-len(word) + 1 :] == word[:-1]:
            row[word[-1]] = -math.inf
    if draw < params.min_tokens:
        row[0] = -math.inf
    if params.greedy:
        return row.index(max(row))
    top = max(row)
    weights = [math.exp((value - top) / params.temperature) for value in row]
    order = sorted(range(len(row)), key=lambda token: -weights[token])
    if 0 < params.top_k < len(row):
        order = order[: params.top_k]
    total, summed, kept = sum(weights[token] for token in order), 0.0, set()
    for token in order:
        kept.add(token)
        summed += weights[token]
        if summed >= params.top_p * total:
            break
    assert params.seed is not None
    point = uniforms([params.seed], [draw])[0] * sum(weights[token] for token in sorted(kept))
    for token in sorted(kept):
        point -= weights[token]
        if point < 0:
            return token
    return max(kept)


def test_equals_the_slow_twin_on_mixed_batches() -> None:
    rng = random.Random(5)
    differences = checked = 0
    for trial in range(40):
        rows = rng.randrange(1, 9)
        logits = noise(rows, seed=trial)
        advances, expected = [], []
        for row in range(rows):
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))
            output = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(0, 20)))
            sampling = {
                "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
                "top_k": rng.choice([0, 1, 5, 64, 65, VOCAB, 1000]),
                "top_p": rng.choice([0.0, 0.2, 0.9, 1.0]),
                "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
                "presence_penalty": rng.choice([0.0, 0.7]),
                "frequency_penalty": rng.choice([0.0, 0.4, -0.2]),
                "min_tokens": rng.choice([0, 10]),
                "bad_words": rng.choice([(), ((5,), (*(prompt + output)[-2:], 7), (3, 4, 5))]),
                "seed": rng.randrange(2**64),
            }
            advances.append(advance(row, prompt, output, (0,), **sampling))
            expected.append(slow(logits[row].tolist(), prompt, output, SamplingParams(100, **sampling), len(output)))
        got = run(advances, logits)
        assert not got.errors
        differences += sum(got.tokens[row] != expected[row] for row in range(rows))
        checked += rows
    # float32 logits against Python's floats: a draw may fall on the other side of a border once in some 10^5.
    assert checked > 100
    assert differences <= 1


@pytest.mark.parametrize("vocab", [40, 64, 65, 1024, 1500, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_looking_at_few_tokens_first_changes_nothing(vocab: int, spread: float) -> None:
    """Flat rows need the wide looks, steep ones the narrow; values rounded to a grid give ties at every edge."""
    logits = (noise(6, vocab, seed=vocab, spread=spread) * 8).round() / 8
    cases = [(1.0, 0, 0.5), (1.0, 70, 1.0), (1.0, 64, 0.9), (1.0, 1200, 0.99), (0.7, 0, 0.999), (1.0, 3, 1.0)]
    for draw in range(5):
        advances = [
            advance(row, output=(0,) * draw, vocab=vocab, temperature=t, top_k=k, top_p=p, seed=row)
            for row, (t, k, p) in enumerate(cases)
        ]
        got = run(advances, logits)
        for row, (temperature, top_k, top_p) in enumerate(cases):
            probs = (logits[row] / temperature).softmax(-1).double()
            ordered = probs.sort(descending=True).values
            k = top_k if 0 < top_k < vocab else vocab
            mass = ordered[:k].sum()
            kept = ordered[:k]
            if top_p < 1:
                kept = ordered[: int((ordered[:k].cumsum(0) < top_p * mass).sum()) + 1]
            weights = torch.where(probs >= kept[-1], probs, 0.0)
            sums = weights.cumsum(0)
            point = uniforms([row], [draw])[0] * sums[-1]
            nearest = (sums - point).abs().min()
            expected = int((sums <= point).sum())
            assert got.tokens[row] == expected or nearest < 1e-6, (row, draw)


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))
    count = 4000
    plan = advance(0, vocab=4, temperature=1.0, seed=3).plan
    advances = [Advance(draw, (1,), 0, np.zeros(1, np.int32), plan, draw) for draw in range(count)]
    drawn = Counter(run(advances, logits.expand(count, 4)).tokens.values())
    for token, probability in enumerate((0.5, 0.25, 0.15, 0.1)):
        # Five standard deviations of a binomial count.
        assert abs(drawn[token] - count * probability) < 5 * math.sqrt(count * probability * (1 - probability))


def test_b43_a_seed_gives_the_same_tokens_alone_and_in_traffic() -> None:
    logits = noise(8)
    crowd = [
        advance(row, (1, 2), (3,) * row, temperature=1.0, seed=seed, top_k=top_k, top_p=top_p)
        for row, (seed, top_k, top_p) in enumerate(
            [
                (1, 0, 1.0),
                (1, 5, 1.0),
                (2, 0, 0.5),
                (2**63, 0, 1.0),
                (1, 0, 1.0),
                (9, 0, 0.9),
                (0, 80, 0.9),
                (7, 3, 0.3),
            ]
        )
    ]
    together = run(crowd, logits)
    for row, one in enumerate(crowd):
        assert run([one], logits[row : row + 1]).tokens[row] == together.tokens[row]


def test_b43_seeds_and_draws_matter_and_greedy_ignores_them() -> None:
    logits = torch.zeros(1, VOCAB)

    def answer(seed: int | None, **sampling: object) -> list[int]:
        plan = advance(0, temperature=1.0, seed=seed).plan if not sampling else advance(0, seed=seed, **sampling).plan
        steps = [Advance(0, (1,), 0, np.zeros(1, np.int32), plan, draw) for draw in range(12)]
        return [run([step], logits).tokens[0] for step in steps]

    assert answer(1) == answer(1)
    assert len({tuple(answer(seed)) for seed in (0, 1, 2, 2**63, 2**64 - 1)}) == 5
    assert answer(None) != answer(None), "requests without a seed get fresh entropy"
    assert len(set(answer(1))) > 3
    assert answer(1, temperature=0.0) == answer(2, temperature=1e-12) == [0] * 12


def test_the_end_can_be_drawn_right_after_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 9.0, 8.0
    for said, expected in ((0, 6), (2, 6), (3, 5), (4, 5)):
        early = advance(0, output=(1,) * said, eos=(5,), min_tokens=3)
        assert run([early], logits).tokens[0] == expected
    assert run([advance(0, eos=(5,), min_tokens=3, ignore_eos=True)], logits).tokens[0] == 5
    assert run([advance(0, stop_token_ids=(5,), min_tokens=3, ignore_eos=True)], logits).tokens[0] == 6


def test_b31_extreme_values_stay_finite() -> None:
    logits = torch.full((4, VOCAB), -30.0)
    logits[:, 11] = 60000.0
    sampling = [
        {"temperature": 1e-4, "seed": 1},
        {"temperature": 1e-12, "seed": 1},
        {"temperature": 1.0, "top_k": 100000, "seed": 1},
        {"temperature": 1e-5, "top_p": 0.9, "seed": 1},
    ]
    got = run([advance(row, **values) for row, values in enumerate(sampling)], logits)
    assert got.tokens == dict.fromkeys(range(4), 11)
    assert not got.errors


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_fails_alone(spoiled: float, temperature: float) -> None:
    logits = noise(3)
    logits[1, 50] = spoiled
    advances = [advance(row, temperature=temperature, top_p=0.9, seed=row, logprobs=True) for row in range(3)]
    got = run(advances, logits)
    assert got.errors == {1: NOT_FINITE}
    assert set(got.tokens) == set(got.logprobs) == {0, 2}
    for row in (0, 2):
        assert got.tokens[row] == run([advances[row]], logits[row : row + 1]).tokens[row]


def test_a_row_with_everything_banned_fails_alone() -> None:
    every = tuple((token,) for token in range(VOCAB))
    got = run([advance(0, bad_words=every), advance(1)], noise(2))
    assert set(got.errors) == {0}
    assert set(got.tokens) == {1}


def test_logprobs_are_those_of_the_model_itself() -> None:
    logits = noise(2)
    before = logits.clone()
    advances = [
        advance(0, (1,), (2, 3), temperature=0.5, repetition_penalty=2.0, seed=1, logprobs=True),
        advance(1, logprobs=False),
    ]
    got = run(advances, logits)
    expected = logits[0].log_softmax(-1)[got.tokens[0]].item()
    assert got.logprobs == {0: pytest.approx(expected, abs=1e-5)}
    assert torch.equal(logits, before), "the runner's logits are not written to"


def test_half_precision_and_empty_steps_are_taken() -> None:
    logits = noise(2).half()
    assert run([advance(0), advance(1, temperature=1.0, seed=1)], logits).tokens[0] == int(logits[0].argmax())
    assert run([], torch.zeros(0, VOCAB)).tokens == {}


def test_logits_made_in_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        logits = noise(2)
    sampling = {"repetition_penalty": 1.5, "bad_words": ((3,),)}
    assert len(run([advance(0, **sampling), advance(1)], logits).tokens) == 2


def test_another_draw_gets_the_shaped_logits_and_every_rows_settings() -> None:
    logits = noise(4)
    advances = [
        advance(0, temperature=0.5, top_k=7, top_p=0.25, seed=3),
        advance(1, output=(4,), temperature=2.0, top_k=VOCAB, seed=3),
        advance(2, temperature=1e-6, top_k=5, seed=3),
        advance(3, bad_words=((9,),)),
    ]
    seen = []

    def draw(shaped: torch.Tensor, settings: np.ndarray) -> torch.Tensor:
        seen.append((shaped, settings.tolist()))
        return torch.tensor([11, 12, -1, 14])

    got = sample(Step(0, tuple(advances)), logits, draw)
    assert got.tokens == {0: 11, 1: 12, 3: 14}
    assert got.errors == {2: NOT_FINITE}
    ((shaped, settings),) = seen
    banned = logits.clone()
    banned[3, 9] = -math.inf
    assert torch.equal(shaped, banned)
    first, second = uniforms([3, 3], [0, 1]).tolist()
    off = [0.0, 0.0, 1.0, 0.0]
    assert settings == [[0.5, 7.0, 0.25, first], [2.0, 0.0, 1.0, second], off, off]
