"""`eval --tasks` gives the numbers of lm-eval's own class for transformers, method by method. Live."""

from types import SimpleNamespace

import pytest

from added_ends import with_first_token
from conftest import write_tokenizer
from deltatune.models.load import load

pytestmark = pytest.mark.oracle

LENGTH = 64
TEXTS = ["the quick brown fox jumps over the lazy dog " * count for count in (1, 5)]
PAIRS = [("the quick brown", " fox jumps"), ("", "jumps over"), ("one ", "fox")]
ANSWERS = [
    {"until": [], "max_gen_toks": 12},
    {"until": [" "], "max_new_tokens": 12, "do_sample": False},
    {"until": ["o"], "max_tokens": 24, "temperature": 0.0},
]


def request(*arguments):
    return SimpleNamespace(args=arguments, task_name="task")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Llama as transformers saves it, with logits that differ much from token to token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=512, num_key_value_heads=2, initializer_range=0.5, eos_token_id=2, bos_token_id=None, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, 512)
    return folder


@pytest.mark.parametrize("kind", ["no first token", "first token", "first token added"])
def test_every_method_gives_the_numbers_of_lm_eval(checkpoint, tmp_path, kind):
    HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM

    from deltatune.answering.harness import HarnessModel
    from deltatune.answering.session import Session

    folder = checkpoint
    if kind != "no first token":
        folder = with_first_token(checkpoint, tmp_path / "model", before=kind == "first token added")
    options = {"device": "cpu", "max_length": LENGTH, "batch_size": 3, "dtype": "float32"}
    theirs, ours = HFLM(pretrained=str(folder), **options), HarnessModel(Session(load(folder), chat=False), 3, LENGTH)
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id
    assert ours.tokenizer_name == theirs.tokenizer_name
    chat = [{"role": "user", "content": "why"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    for text in [*TEXTS, theirs.apply_chat_template(chat)]:
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    pairs = [request(*pair) for pair in PAIRS]
    for one, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True), strict=True):
        assert one == (pytest.approx(other[0], rel=1e-5), other[1])
    # lm-eval itself scores a first token that the tokenizer adds, as a word behind another one.
    plain = HFLM(pretrained=str(folder), add_bos_token=False, **options)
    texts = [request(text) for text in [*TEXTS, ""]]
    expected = plain.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-5)
    prompts = [request("the quick", options) for options in ANSWERS]
    assert ours.generate_until(prompts) == theirs.generate_until(prompts, disable_tqdm=True)
