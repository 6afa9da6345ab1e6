"""A conversation is asked as training and generation ask, behind all that was said before."""

import itertools
from types import SimpleNamespace

import mlx.core as mx
import pytest

import deltatune
from deltatune.answering.dialogue import Dialogue
from deltatune.data.prompts import conversation_text
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora
from deltatune.lora.convert import can_be_without, without_adapters
from deltatune.models.generate import Sampling
from deltatune.models.load import load
from deltatune.options.config import LoraConfig
from deltatune.train.evaluation import inference
from deltatune.train.evaluation.inference import Inference
from deltatune.train.tree import leaves

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if date %}{{ date }}{% endif %}"
)


@pytest.fixture(scope="module")
def loaded():
    found = load(MODEL)
    found.tokenizer.chat_template = TEMPLATE
    return found


@pytest.fixture
def asked(monkeypatch):
    """The prompts of the model, as text; it answers with two pieces."""
    found = []

    def stream(loaded, prompt, max_tokens, sampling):
        found.append(loaded.tokenizer.decode(prompt))
        yield from (SimpleNamespace(text=text, logprobs=None) for text in ("one", " two"))

    monkeypatch.setattr(inference, "stream", stream)
    return found


def said(pieces):
    return "".join(piece.text for piece in pieces)


def test_a_question_is_asked_behind_the_conversation(loaded, asked):
    talk = Dialogue(Inference(loaded), system_prompt="be kind", template_options={"date": "today"})
    assert said(talk.ask("first")) == "one two"
    list(talk.ask("second"))
    talk.reset()
    list(talk.ask("third"))
    assert asked == [
        "<system>be kind<user>firsttoday",
        "<system>be kind<user>first<assistant>one two<user>secondtoday",
        "<system>be kind<user>thirdtoday",
    ]


def test_an_answer_that_is_cut_short_belongs_to_the_conversation(loaded, asked):
    talk = Dialogue(Inference(loaded))
    pieces = talk.ask("first")
    next(pieces)
    pieces.close()
    assert talk.messages == [{"role": "user", "content": "first"}, {"role": "assistant", "content": "one"}]


def test_a_question_that_the_template_refuses_does_not(loaded, asked):
    talk = Dialogue(Inference(loaded))
    list(talk.ask("first"))
    before = list(talk.messages)
    with pytest.raises(UserError, match=r"not that.*; r starts anew, or change"):
        list(talk.ask("no"))
    assert talk.messages == before
    assert len(asked) == 1


@pytest.mark.bad_input("`chat` with a model without a chat template")
def test_a_model_without_a_chat_template_is_refused(loaded):
    bare = load(MODEL)
    bare.tokenizer.chat_template = None
    bare.tokenizer.has_chat_template = False
    with pytest.raises(UserError, match="no chat template"):
        Dialogue(Inference(bare))


def test_the_public_generate_asks_as_a_conversation_does(monkeypatch):
    loaded = load(MODEL)
    question = "Two lattes please"
    answer = deltatune.generate(loaded, question, system_prompt="be kind", max_tokens=8)
    assert answer
    talk = Dialogue(Inference(loaded), system_prompt="be kind", max_tokens=8)
    assert said(talk.ask(question)) == answer
    # A model that trains answers without dropout, and trains on afterwards.
    modes, plain = [], inference.stream
    monkeypatch.setattr(
        inference, "stream", lambda found, *more: modes.append(found.model.training) or plain(found, *more)
    )
    loaded.model.train()
    assert deltatune.generate(loaded, question, system_prompt="be kind", max_tokens=8) == answer
    assert modes == [False]
    assert loaded.model.training
    loaded.tokenizer.has_chat_template = False
    with pytest.raises(UserError, match="no token is left"):
        deltatune.generate(loaded, "")


def test_adapters_can_be_taken_away_for_a_while():
    loaded = load(MODEL)
    text = conversation_text(loaded.tokenizer, [{"role": "user", "content": "hi"}], "")
    tokens = mx.array([loaded.tokenizer.encode(text, add_special_tokens=False)])
    assert not can_be_without(loaded.model)
    plain = loaded.model(tokens)
    convert_to_lora(loaded.model, LoraConfig(rank=2, scale=5.0))
    for module in loaded.model.modules():
        if "lora_b" in module:
            module["lora_b"] = mx.random.normal(module["lora_b"].shape)
    adapted = loaded.model(tokens)
    assert mx.abs(adapted - plain).max().item() > 0.01
    assert can_be_without(loaded.model)
    with without_adapters(loaded.model):
        assert mx.array_equal(loaded.model(tokens), plain)
    assert mx.array_equal(loaded.model(tokens), adapted)


def test_several_prompts_are_answered_as_each_by_itself():
    found = load(MODEL)
    prompts = ["6 mochas for Zelda, please.", "two teas", "hello"]
    expected = [deltatune.generate(found, prompt, max_tokens=8) for prompt in prompts]
    assert deltatune.generate(found, prompts, max_tokens=8) == expected
    assert deltatune.generate(found, [], max_tokens=8) == []


@pytest.mark.bad_input("`deltatune.generate` with max_tokens 0 or -1, of one prompt or several")
@pytest.mark.parametrize("prompt", ["hello", ["hello", "two teas"]], ids=["one", "several"])
def test_an_answer_of_no_tokens_is_refused(prompt):
    for most in (0, -1):
        with pytest.raises(UserError, match=f"max_tokens: expected a whole number of 1 or more, got {most}"):
            deltatune.generate(load(MODEL), prompt, max_tokens=most)


@pytest.mark.parametrize("first", [" dog", "  ", "dog"])
def test_one_prompt_and_several_keep_the_space_that_begins_an_answer(tiny_checkpoint, monkeypatch, first):
    found = load(tiny_checkpoint("qwen3_5"))
    tokens = [*found.tokenizer.encode(first), *found.tokenizer.encode(" fox")]

    def sampler(_):
        drawn = itertools.cycle(tokens)
        return lambda logprobs: mx.full(logprobs.shape[:1], next(drawn))

    monkeypatch.setattr(Sampling, "sampler", sampler)
    monkeypatch.setattr(Inference, "try_token", lambda *_: None)
    options = {"max_tokens": len(tokens), "temp": 1.0}
    text = f"{first} fox"
    assert deltatune.generate(found, "hello", **options) == text
    assert deltatune.generate(found, ["hello"], **options) == [text]


@pytest.mark.parametrize("prompt", ["hello", ["hello", "two teas"]], ids=["one", "several"])
def test_damaged_weights_answer_nothing(prompt):
    found = load(MODEL)
    _, weight = next((name, leaf) for name, leaf in leaves(found.model.parameters()) if "norm" in name)
    weight[0] = float("nan")
    with pytest.raises(UserError, match=r"hold NaN or infinity, the first .* checkpoint is damaged"):
        deltatune.generate(found, prompt, max_tokens=8)
