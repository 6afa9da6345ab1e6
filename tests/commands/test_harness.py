"""Tests `deltatune eval --tasks`: a model with an adapter answers as lm-eval asks it.

A small stand-in for lm-eval asks, so that the tests need neither the package nor a network; the last test asks through
the package where it is installed.
"""

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from added_ends import FIRST, with_first_token
from deltatune.answering.session import Session
from deltatune.commands.generate import GenerateOptions, generate
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora, load_adapters, save_adapters
from deltatune.models.load import load
from deltatune.options.config import LoraConfig

HARNESS = "deltatune.answering.harness"
INSTALLED = importlib.util.find_spec("lm_eval") is not None
PAIRS = [("the quick brown", " fox jumps"), ("a dog", " a lazy dog over the fox"), ("", "jumps over"), ("one ", "fox")]


class TemplateLM:
    """lm-eval's class, as far as the tests ask: it splits a pair into tokens."""

    @property
    def prefix_token_id(self):
        return self.eot_token_id

    def loglikelihood(self, requests):
        found = []
        for context, continuation in (request.args for request in requests):
            spaces = len(context) - len(context.rstrip())
            context, continuation = context.rstrip(), context[len(context) - spaces :] + continuation
            before = self.tok_encode(context) if context else [self.prefix_token_id]
            whole = self.tok_encode(context + continuation)
            found.append((None, before, whole[len(before) if context else 0 :]))
        return self._loglikelihood_tokens(found)


class TaskManager:
    all_tasks = ("dogs", "foxes")

    def __init__(self, include_path=None):
        pass

    def match_tasks(self, names):
        return [task for task in self.all_tasks if task in names]


def windows(token_list, prefix_token, max_seq_len, context_len):
    """Each window has the last token before it, and only that."""
    whole = [prefix_token, *token_list]
    for start in range(0, len(token_list), max_seq_len):
        window = token_list[start : start + max_seq_len]
        yield whole[start : start + len(window)], window


def request(*args):
    return SimpleNamespace(args=args)


def simple_evaluate(model, tasks, task_manager, num_fewshot, limit, apply_chat_template):
    scores = model.loglikelihood([request(*pair) for pair in PAIRS[:limit]])
    return {"results": {task: {"scores": scores, "chat": apply_chat_template} for task in tasks}}


@pytest.fixture
def stubbed(monkeypatch):
    """The stand-in for lm-eval; `stubbed.evaluator` may be replaced."""
    content = {
        "lm_eval": {"simple_evaluate": lambda **options: stub.evaluator(**options)},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.utils": {
            "get_rolling_token_windows": windows,
            "make_disjoint_window": lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]),
            "make_table": lambda found: f"table of {', '.join(found['results'])}",
        },
    }
    stub = SimpleNamespace(evaluator=simple_evaluate)
    for name, members in content.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    yield stub
    sys.modules.pop(HARNESS, None)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint("qwen3_5", num_hidden_layers=2, full_attention_interval=2)


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    model = load(checkpoint).model
    mx.random.seed(0)
    convert_to_lora(model, LoraConfig(rank=2, scale=5.0))
    model.update(nn.utils.tree_map(lambda leaf: 0.3 * mx.random.normal(leaf.shape), model.trainable_parameters()))
    save_adapters(model, folder, {"lora_parameters": {"rank": 2, "scale": 5.0}, "num_layers": -1})
    return folder


@pytest.fixture
def asked(stubbed, checkpoint, adapter):
    from deltatune.answering.harness import HarnessModel

    loaded = load(checkpoint)
    load_adapters(loaded.model, adapter)
    return HarnessModel(Session(loaded, chat=False), 3, 64)


def expected(model, context, continuation):
    """The log-likelihood of the continuation's tokens, from the logits of one row."""
    logits = model(mx.array([context + continuation]))[0, len(context) - 1 : -1].astype(mx.float32)
    scores = nn.log_softmax(logits)[mx.arange(len(continuation)), mx.array(continuation)]
    return scores.sum().item(), (logits.argmax(-1) == mx.array(continuation)).all().item()


def test_continuations_are_scored_as_the_whole_logits_say(asked):
    found = asked.loglikelihood([request(*pair) for pair in PAIRS])
    encode = asked.tok_encode
    model = asked._session.model
    rows = [(encode(context), encode(context + more)) for context, more in PAIRS[:2]]
    model.eval()
    for (context, whole), score in zip(rows, found, strict=False):
        reference = expected(model, context, whole[len(context) :])
        assert score == (pytest.approx(reference[0], abs=1e-3), reference[1])
    # What the model would say itself is greedy, and no other continuation is.
    prompt = encode("the quick")
    answer: list[int] = []
    for _ in range(3):
        answer.append(model(mx.array([prompt + answer]))[0, -1].argmax().item())
    other = [*answer[:-1], (answer[-1] + 1) % 100]
    first, second = asked._loglikelihood_tokens([(None, prompt, answer), (None, prompt, other)])
    assert (first[1], second[1]) == (True, False)
    assert first[0] > second[0]


def test_long_context_is_cut_at_its_beginning(asked):
    asked.max_length = 8
    context, continuation = list(range(5, 25)), [30, 31, 32]
    ((score, _),) = asked._loglikelihood_tokens([(None, context, continuation)])
    asked._session.model.eval()
    assert score == pytest.approx(expected(asked._session.model, context[-6:], continuation)[0], abs=1e-3)


@pytest.mark.bad_input("`eval --tasks` with --max-seq-length below the length of an answer to score, or to give")
def test_an_answer_that_does_not_fit_is_refused(asked):
    asked.max_length = 8
    with pytest.raises(UserError, match="an answer to score has 20 tokens, more than --max-seq-length 8; raise it"):
        asked._loglikelihood_tokens([(None, [3], list(range(5, 25)))])
    with pytest.raises(UserError, match="answers of 8 tokens, which leaves no room for a prompt in --max-seq-length 8"):
        asked.generate_until([request("the quick", {"max_new_tokens": 8})])


@pytest.mark.parametrize("added", [{}, {"before": True}, {"before": True, "behind": True}], ids=str)
def test_a_text_stands_behind_its_first_token_once(stubbed, checkpoint, tmp_path, added):
    from deltatune.answering.harness import HarnessModel

    model = HarnessModel(Session(load(with_first_token(checkpoint, tmp_path / "model", **added)), chat=False), 3, 64)
    first, plain = model.tokenizer.bos_token_id, model.tokenizer.encode("a dog jumps", add_special_tokens=False)
    assert model.prefix_token_id == first
    before = [first] if added else []
    assert model.tok_encode("a dog jumps") == [*before, *plain]
    assert model.tok_encode(f"{FIRST}a dog jumps") == [first, *plain]
    (score,) = model.loglikelihood_rolling([request("a dog jumps")])
    model._session.model.eval()
    assert score == pytest.approx(expected(model._session.model, [first], plain)[0], rel=1e-4)


def test_whole_texts_are_scored_window_by_window(asked):
    text = "the quick brown fox jumps over the lazy dog " * 3
    tokens = asked.tok_encode(text)
    asked.max_length = len(tokens)
    (whole,) = asked.loglikelihood_rolling([request(text)])
    asked._session.model.eval()
    assert whole == pytest.approx(expected(asked._session.model, [asked.eot_token_id], tokens)[0], rel=1e-4)
    asked.max_length = 7
    (parts,) = asked.loglikelihood_rolling([request(text)])
    before = [asked.eot_token_id, *tokens]
    cuts = range(0, len(tokens), 7)
    assert parts == pytest.approx(
        sum(expected(asked._session.model, [before[cut]], tokens[cut : cut + 7])[0] for cut in cuts), rel=1e-4
    )


def test_answers_are_those_of_generate_up_to_a_stop(asked, checkpoint, adapter, capsys):
    options = {"adapter_path": str(adapter), "ignore_chat_template": True, "verbose": False}
    answer = generate(GenerateOptions(str(checkpoint), "the quick", max_tokens=12, **options))
    capsys.readouterr()
    stop = answer[len(answer) // 2 :][:3]
    found = asked.generate_until(
        [
            request("the quick", {"until": ["never", stop], "max_gen_toks": 12}),
            request("the quick", {"until": [], "max_gen_toks": 12, "do_sample": False}),
            request("the quick", {"max_gen_toks": 3}),
        ]
    )
    assert found[:2] == [answer.split(stop)[0], answer]
    assert answer.startswith(found[2])
    assert len(found[2]) < len(answer)


@pytest.mark.parametrize("question", ["loglikelihood", "generate_until"])
def test_damaged_weights_are_asked_nothing(asked, question):
    asked._session.model.layers[1].post_attention_layernorm.weight[0] = float("nan")
    arguments = PAIRS[0] if question == "loglikelihood" else ("the quick", {"max_gen_toks": 3})
    with pytest.raises(UserError, match=r"post_attention_layernorm\.weight: its checkpoint is damaged"):
        getattr(asked, question)([request(*arguments)])


def test_chats_are_written_by_the_template(asked):
    chat = [{"role": "user", "content": "why"}]
    template = asked.tokenizer.apply_chat_template
    assert asked.apply_chat_template(chat) == template(chat, tokenize=False, add_generation_prompt=True)
    begun = [*chat, {"role": "assistant", "content": "be"}]
    assert asked.apply_chat_template(begun, add_generation_prompt=False).endswith("be")
    assert asked.tokenizer_name


def test_one_command_asks_the_model_with_its_adapter(stubbed, run, checkpoint, adapter):
    seen = []
    shots = []

    def evaluator(**options):
        shots.append(options["num_fewshot"])
        seen.append(simple_evaluate(**options))
        return seen[-1]

    stubbed.evaluator = evaluator
    for more in (["--adapter-path", adapter, "--num-fewshot", 3], []):
        code, out, err = run("eval", "--model", checkpoint, "--tasks", "dogs, foxes", "--limit", 2, *more)
        assert (code, out.splitlines()[-1]) == (0, "table of dogs, foxes"), err
    assert shots == [3, None]
    tuned, base = (found["results"]["dogs"]["scores"] for found in seen)
    assert len(tuned) == 2
    assert tuned != base


WRONG = {
    "an unknown task": (["--tasks", "dog"], r"--tasks: 'dog' is no task of lm-eval \(did you mean 'dogs'\?\)"),
    "a limit of 0": (["--tasks", "dogs", "--limit", "0"], "--limit: expected a whole number of 1 or more, got 0."),
}


@pytest.mark.bad_input("`eval`: {what}")
@pytest.mark.parametrize("what", WRONG)
def test_tasks_that_cannot_be_put(stubbed, complaint, checkpoint, what):
    given, message = WRONG[what]
    err = complaint("eval", "--model", checkpoint, *given)
    with pytest.raises(UserError, match=message):
        raise UserError(err)


@pytest.mark.bad_input("`eval --tasks` without lm-eval")
def test_a_missing_package_is_named_with_its_extra(run, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    code, out, err = run("eval", "--model", checkpoint, "--tasks", "dogs")
    assert (code, out) == (2, "")
    assert "pip install 'deltatune[lm-eval]'" in err


@pytest.mark.bad_input("`eval --tasks`: data of a task that cannot be loaded, and a task that draws its answers")
def test_task_that_cannot_run_is_refused(stubbed, asked, complaint, checkpoint):
    def offline(**_):
        raise ConnectionError("no network")

    stubbed.evaluator = offline
    err = complaint("eval", "--model", checkpoint, "--tasks", "dogs")
    assert "the data of a task cannot be loaded: no network" in err
    with pytest.raises(UserError, match="draws its answers at random"):
        asked.generate_until([request("x", {"do_sample": True, "temperature": 0.7})])
    with pytest.raises(UserError, match="draws its answers at random"):
        asked.generate_until([request("x", {"temperature": 0.7})])


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not INSTALLED, reason="lm-eval is not installed")
def test_lm_eval_itself_asks(run, checkpoint, adapter, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"the quick {n}", "choices": [" fox", " dog"], "answer": n % 2} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\ntest_split: test\n"
    )
    choice = (
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    )
    (tmp_path / "choice.yaml").write_text(f"task: own_choice\n{shared}{choice}metric_list: [{{metric: acc}}]\n")
    answer = "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: ' fox'\n"
    stop = "generation_kwargs: {until: ['.'], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]\n"
    (tmp_path / "answer.yaml").write_text(f"task: own_answer\n{shared}{answer}{stop}")
    text = "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{question}}'\n"
    (tmp_path / "text.yaml").write_text(f"task: own_text\n{shared}{text}metric_list: [{{metric: word_perplexity}}]\n")
    model = ["eval", "--model", checkpoint, "--adapter-path", adapter, "--include-path", tmp_path]
    code, out, err = run(*model, "--tasks", "own_*")
    assert code == 0, err
    for figure in ("own_choice", "acc", "own_answer", "exact_match", "own_text", "word_perplexity"):
        assert figure in out
    assert run(*model, "--tasks", "own_choice", "--apply-chat-template", "--limit", 2)[0] == 0
