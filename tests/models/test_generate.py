"""Answers come from mlx-lm while the patches are applied, and the patches are reverted afterwards."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from deltatune.errors import NotFiniteError
from deltatune.models import batch_decoder as answer
from deltatune.models import generate
from deltatune.models.load import load
from deltatune.patches import patch
from deltatune.patches.tables.mlx_lm import UPDATE


@pytest.fixture
def loaded(tiny_checkpoint):
    return load(tiny_checkpoint("qwen3_5_moe"))


PROMPTS = [[5, 6, 7], [8, 9], [3] * 40]


def one_by_one(loaded):
    pieces = [generate.stream(loaded, prompt, 6, generate.Sampling()) for prompt in PROMPTS]
    return ["".join(piece.text for piece in each) for each in pieces]


def at_once(loaded):
    tokens = answer.answer_all(loaded.model, loaded.tokenizer, PROMPTS, max_tokens=6)
    return [loaded.tokenizer.decode(each) for each in tokens]


def test_many_answers_are_those_of_one_at_a_time(loaded):
    found = at_once(loaded)
    assert found == one_by_one(loaded)
    assert all(found)


def test_a_model_that_is_not_covered_answers_by_mlx_lm(loaded, monkeypatch):
    expected = at_once(loaded)
    monkeypatch.setattr(answer, "is_covered", lambda _: False)
    monkeypatch.setattr(answer, "BatchDecoder", None)
    assert at_once(loaded) == expected


@pytest.mark.parametrize("covered", [True, False])
def test_a_sampler_is_asked(loaded, covered, monkeypatch):
    monkeypatch.setattr(answer, "is_covered", lambda _: covered)
    token = loaded.tokenizer.encode("fox")[0]
    answers = answer.answer_all(
        loaded.model,
        loaded.tokenizer,
        PROMPTS,
        max_tokens=3,
        sampler=lambda logprobs: mx.full(logprobs.shape[0], token),
    )
    assert answers == [[token] * 3] * len(PROMPTS)


@pytest.mark.parametrize("covered", [True, False])
def test_probabilities_that_are_not_finite_are_no_answer(loaded, covered, monkeypatch):
    monkeypatch.setattr(answer, "is_covered", lambda _: covered)
    loaded.model.language_model.model.norm.weight *= mx.nan
    with pytest.raises(NotFiniteError):
        at_once(loaded)


@pytest.mark.parametrize(("answers", "name"), [(at_once, "batch_generate"), (one_by_one, "stream_generate")])
def test_answers_are_given_under_the_patches(loaded, answers, name, monkeypatch):
    module, found = {"batch_generate": answer, "stream_generate": generate}[name], []
    monkeypatch.setattr(answer, "is_covered", lambda _: False)

    def upstream(*arguments, **options):
        found.append(patch.in_force(UPDATE))
        return SimpleNamespace(token_ids=[]) if module is answer else iter(())

    monkeypatch.setattr(module, name, upstream)
    answers(loaded)
    assert found
    assert all(found)
    assert patch.in_force(UPDATE) is None
