"""Answers come from mlx-lm under the patches, or are sampled from a policy while its weights change."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from deltatune.errors import UserError
from deltatune.lora import convert_to_lora
from deltatune.models import batch_decoder, generate
from deltatune.models.batch_decoder import AnswerGenerator, BatchDecoder, can_be_joined
from deltatune.models.generate import EXCLUDED, SampledPolicy
from deltatune.models.load import load
from deltatune.ops.decoding.row_caches import AttentionRows
from deltatune.ops.recomputation import small_cases
from deltatune.ops.tracing import trace
from deltatune.ops.tracing.trace import Factors
from deltatune.options.config import LoraConfig
from deltatune.patches import patch, patched
from saved_adapters import moved


@pytest.fixture
def loaded(tiny_checkpoint):
    return load(tiny_checkpoint("qwen3_5_moe", num_hidden_layers=2, full_attention_interval=2))


PROMPTS = [[5, 6, 7], [8, 9], [3] * 40]


def one_by_one(loaded):
    pieces = [generate.stream(loaded, prompt, 6, generate.Sampling()) for prompt in PROMPTS]
    return ["".join(piece.text for piece in each) for each in pieces]


def at_once(loaded):
    tokens = batch_decoder.answer_all(loaded.model, loaded.tokenizer, PROMPTS, max_tokens=6)
    return [loaded.tokenizer.decode(each) for each in tokens]


def test_many_answers_are_those_of_one_at_a_time(loaded, monkeypatch):
    """By BatchDecoder, and by mlx-lm where a model is not covered."""
    found = at_once(loaded)
    assert found == one_by_one(loaded)
    assert all(found)
    monkeypatch.setattr(batch_decoder, "is_covered", lambda _: False)
    monkeypatch.setattr(batch_decoder, "BatchDecoder", None)
    assert at_once(loaded) == found


@pytest.mark.parametrize("covered", [True, False])
def test_a_sampler_is_asked(loaded, covered, monkeypatch):
    monkeypatch.setattr(batch_decoder, "is_covered", lambda _: covered)
    token = loaded.tokenizer.encode("fox")[0]
    answers = batch_decoder.answer_all(
        loaded.model,
        loaded.tokenizer,
        PROMPTS,
        max_tokens=3,
        sampler=lambda logprobs: mx.full(logprobs.shape[0], token),
    )
    assert answers == [[token] * 3] * len(PROMPTS)


WAYS = [(at_once, batch_decoder, "BatchGenerator"), (one_by_one, generate, "stream_generate")]


@pytest.mark.parametrize(("answers", "module", "name"), WAYS)
def test_answers_are_given_under_the_patches(loaded, answers, module, name, monkeypatch):
    found, upstreams = [], getattr(module, name)
    monkeypatch.setattr(batch_decoder, "is_covered", lambda _: False)

    def upstream(*arguments, **options):
        found.append(patch.in_force("mlx_lm.models.gated_delta.gated_delta_update"))
        return upstreams(*arguments, **options)

    monkeypatch.setattr(module, name, upstream)
    answers(loaded)
    assert found
    assert all(found)
    assert patch.in_force("mlx_lm.models.gated_delta.gated_delta_update") is None


def by_definition(logits, temperature, top_k, top_p, min_p):
    """The probabilities of one row in float64: of equal logits, all are kept."""
    logits = np.asarray(logits, np.float64) / temperature
    kept = np.ones(len(logits), bool)
    if top_k:
        kept &= logits >= np.sort(logits)[-top_k]
    p = np.where(kept, np.exp(logits - logits.max()), 0)
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order] / p.sum()) - p[order] / p.sum()
    if top_p < 1:
        kept[order[before >= top_p]] = False
    p = np.where(kept, p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (9, 0.9, 0.05)])
def test_the_policy_is_that_of_its_definition(temperature, top_k, top_p, min_p):
    logits = 3 * np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    policy = SampledPolicy(temperature, top_p, top_k, min_p)
    ours = np.array(mx.softmax(policy.logits(mx.array(logits)), axis=-1))
    expected = np.stack([by_definition(row, temperature, top_k, top_p, min_p) for row in logits])
    np.testing.assert_allclose(ours, expected, atol=2e-6)
    assert ((ours == 0) == (expected == 0)).all()


def adapted(tiny_model, kind="lora"):
    model = tiny_model("qwen3_5", num_hidden_layers=2, full_attention_interval=2).eval()
    convert_to_lora(model, LoraConfig(rank=2, scale=10.0), fine_tune_type=kind, num_layers=-1)
    return model


def log_probabilities(model, policy, answer, tokens):
    """Those of an answer's tokens by one forward pass over prompt and answer, and the model's logits [N, V]."""
    logits = model(mx.array([[*answer.prompt, *tokens][:-1]]))[0, len(answer.prompt) - 1 :]
    log_p = mx.log(mx.softmax(policy.logits(logits), axis=-1))
    return np.array(mx.take_along_axis(log_p, mx.array(tokens)[:, None], axis=-1)[:, 0]), logits


@pytest.mark.parametrize(
    ("serving", "kind"), [(contextlib.nullcontext, "lora"), (small_cases, "lora"), (small_cases, "dora")]
)
def test_an_engine_follows_updates_without_a_new_trace(tiny_model, monkeypatch, serving, kind):
    """With small_cases, layers join their matrices and adapters for one token of each row, as on an NVIDIA GPU.

    The step then reads no trainable weight of LoRA besides, but those of DoRA.
    """
    model = adapted(tiny_model, kind)
    traces = []
    plain = batch_decoder.logits_of
    monkeypatch.setattr(batch_decoder, "logits_of", lambda *a, **o: (traces.append(a[1].shape[1]), plain(*a, **o))[1])
    prompts = [[3, 5, 8], [1, 9, 2]]
    found = []
    with patched(), serving():
        engine = BatchDecoder(model, 2, (), 6, trains=True)
        for seed in range(3):
            moved(model, 0.3, seed)
            found.append((engine.run(prompts), BatchDecoder(model, 2, (), 6).run(prompts)))
    assert all(ours == fresh for ours, fresh in found)
    assert len({str(ours) for ours, _ in found}) == 3
    # Each fresh engine traces its step once, and this one did so twice in all: for its layers' factors, and to decode.
    assert traces.count(1) == 5
    with patched(), serving(), trace.having(next_tokens=True, factors=(factors := Factors())):
        plain(model, mx.array([[3]]), cache=make_prompt_cache(model))
    assert bool(factors.noted) == (kind == "lora")


def test_keys_and_values_may_be_written_in_place(tiny_model, monkeypatch):
    """As the kernel of attention for one token of each row does on a GPU."""

    class InPlace(AttentionRows):
        def update_and_fetch(self, keys, values):
            before = self.handed
            found = super().update_and_fetch(keys, values)
            self.handed = before
            return found

    monkeypatch.setattr(batch_decoder, "AttentionRows", InPlace)
    with patched():
        assert len(BatchDecoder(tiny_model("qwen3_5").eval(), 1, (), 3).run([[3, 5, 8]])[0]) == 3


def check_figures(model, policy, answers, most):
    """Compare with a whole forward pass over prompt and answer, at a temperature of 0.7."""
    for answer in answers:
        tokens = [*answer.tokens, *([] if answer.end is None else [answer.end])]
        assert (answer.end is None) == (len(answer.tokens) == most)
        log_p, logits = log_probabilities(model, policy, answer, tokens)
        p = np.array(mx.softmax(logits / 0.7, axis=-1), np.float64)
        figures = np.stack(answer.figures)
        np.testing.assert_allclose(figures[:, 0], log_p, atol=2e-4)
        np.testing.assert_allclose(figures[:, 1], -(p * np.log(p)).sum(-1), atol=2e-4)


def test_log_probabilities_and_entropies_are_those_of_the_policy(tiny_model):
    """A prompt of a group is read once."""
    model = moved(adapted(tiny_model), 0.3)
    policy = SampledPolicy(0.7, top_k=9)
    prompts = [[3, 5, 8, 1]] * 5 + [[7, 2]] * 5
    with patched():
        answers, again = (
            BatchDecoder(model, 10, (4, 9), 12).answers(prompts, policy.sampler(mx.random.key(3))) for _ in range(2)
        )
        assert [a.tokens for a in answers] == [a.tokens for a in again]
        assert len({str(a.tokens) for a in answers}) > 5
        check_figures(model, policy, answers, 12)
    assert EXCLUDED < -1e20


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "cohere", "jamba", "nemotron_h", "rwkv7"])
def test_models_without_gated_delta_layers_are_sampled_too(family, other_model):
    model = other_model(family).eval()
    assert batch_decoder.has_row_caches(model)
    assert not batch_decoder.is_covered(model)
    policy = SampledPolicy()
    prompts = [[3, 5, 8, 9, 1], [7, 2], [7, 2], [11] * 7]
    with patched():
        for answer in BatchDecoder(model, 4, (), 6).answers(prompts, policy.sampler(mx.random.key(0))):
            log_p, _ = log_probabilities(model, policy, answer, answer.tokens)
            np.testing.assert_allclose(np.stack(answer.figures)[:, 0], log_p, atol=2e-4)


@pytest.mark.bad_input("a model whose layers ask for mlx-lm's own caches, of which answers cannot be sampled")
def test_a_layer_that_leaves_its_state_unwritten_is_named(other_model):
    with patched(), pytest.raises(UserError, match=r"mlx_lm.models.mamba: a layer writes its state to caches"):
        BatchDecoder(other_model("mamba").eval(), 1, (), 3).run([[3, 5]])


@pytest.mark.parametrize("family", ["recurrent_gemma", "kimi_linear"])
def test_models_with_other_caches_are_sampled_by_mlx_lm(family, other_model, tiny_model):
    """Attention of a window, or of latent keys; rows end at different times, and more prompts wait than rows are."""
    model = (tiny_model(family) if family == "kimi_linear" else other_model(family)).eval()
    assert not batch_decoder.has_row_caches(model)
    assert can_be_joined(model)
    policy = SampledPolicy(0.7, top_k=9)
    prompts = [[3, 5, 8, 9, 1], [7, 2], [7], [11] * 7]
    with patched():
        engine = AnswerGenerator(model, 3, (4, 9, 20), 6, policy.figures)
        answers, again = (engine.answers(prompts, policy.sampler(mx.random.key(0))) for _ in range(2))
        assert [a.tokens for a in again] == [a.tokens for a in answers]
        check_figures(model, policy, answers, 6)
        stopped = engine.answers(prompts, policy.sampler(mx.random.key(0)), stops=lambda tokens: tokens[-1] % 2 == 0)
        for answer in stopped:
            assert [token % 2 for token in answer.tokens[:-1]] == [1] * (len(answer.tokens) - 1)
            assert answer.stopped == (answer.end is None and answer.tokens[-1] % 2 == 0)
            assert answer.ended or len(answer.tokens) == 6
        assert any(answer.stopped for answer in stopped)
