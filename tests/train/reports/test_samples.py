"""Tests the answers that a run reports while it trains, and that they change nothing else of it."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from deltatune.commands.generate import GenerateOptions, generate
from deltatune.data import Splits
from deltatune.errors import UserError
from deltatune.models.load import load
from deltatune.options.config import TrainConfig
from deltatune.train import StoppedError
from deltatune.train.evaluation.samples import Samples, written
from deltatune.train.progress import Progress
from deltatune.train.reports.log import is_right
from deltatune.train.reports.report import Pictured, render, sample_tables
from deltatune.train.reports.report import read_metrics as read_records
from killed_runs import result

TEMPLATE = Path(__file__).parents[2] / "data" / "templates" / "qwen3_5.jinja"
PROMPT = "question 3 dog dog"


def sampled(folder):
    records, damaged = read_records(folder / "metrics.jsonl")
    assert damaged == 0
    return {record["iteration"]: record["samples"] for record in records if "samples" in record}


def test_a_run_with_samples_has_the_bits_of_one_without(make_trainer, tmp_path, checkpoint, screen_text):
    """The samples come before the step is compiled, inside accumulations, and beside dropout and checkpoints."""
    prompts = [PROMPT, "answer?"]
    row = {"prompt": prompts[1], "tools": [{"type": "function", "function": {"name": "open"}}]}
    (tmp_path / "asked.jsonl").write_text(json.dumps(row))
    samples = {"sample_prompts": [PROMPT, str(tmp_path / "asked.jsonl")]}
    shared = {
        "grad_checkpoint": True,
        "iters": 4,
        "steps_per_eval": 1,
        "lr_schedule": "constant",
        "learning_rate": 0.05,
    }
    for name, options in (("plain", {}), ("sampled", samples)):
        make_trainer(adapter_path=str(tmp_path / name), **shared, **options).run()
    plain, with_samples = result(tmp_path / "plain"), result(tmp_path / "sampled")
    with_samples["metrics"] = [record for record in with_samples["metrics"] if "samples" not in record]
    assert plain == with_samples
    found = sampled(tmp_path / "sampled")
    assert sorted(found) == [0, 1, 2, 3, 4]
    # The last answers are those of the adapter that was written.
    for prompt, sample in zip(prompts, found[4], strict=True):
        asked = {"adapter_path": str(tmp_path / "sampled"), "max_tokens": 100, "verbose": False}
        assert sample == {"prompt": prompt, "answer": generate(GenerateOptions(str(checkpoint), prompt, **asked))}
    assert found[0] != found[4]
    said = " ".join(screen_text.text().split())
    assert f"Iter 4, sample 1: {PROMPT} -> " in said
    # The template loses a part of a prompt as it would of a row of training.
    assert "asked.jsonl: 1 row has 'tools', which the model's chat template leaves out" in said
    page = (tmp_path / "sampled" / "report.html").read_text()
    assert "All 10 answers" in page
    assert PROMPT in page


def test_a_stopped_run_has_the_samples_of_one_that_was_not(make_trainer, run_with, tmp_path, read_metrics):
    options = {"sample_prompts": [PROMPT], "steps_per_eval": 1, "iters": 2}
    make_trainer(adapter_path=str(tmp_path / "straight"), **options).run()
    trainer, runs = make_trainer(**options), []
    samples = trainer.parts.samples
    answer = samples.answers

    def stopping(ended):
        if trainer.progress.iteration == 1:
            runs[0].ending.stop.asked = True
        return answer(ended)

    samples.answers = stopping
    with pytest.raises(StoppedError):
        run_with(trainer, lambda iterations, batch: runs.append(iterations))
    assert sorted(sampled(tmp_path / "out")) == [0]
    make_trainer(resume=True, **options).run()
    assert read_metrics(tmp_path / "out") == read_metrics(tmp_path / "straight")


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load(checkpoint)


@pytest.fixture
def samples(loaded):
    """samples(*prompts, plain_text=..., **options) reads the prompts."""

    def make(*prompts, plain_text=False, tokenizer=loaded.tokenizer, **options):
        config = TrainConfig(sample_prompts=list(map(str, prompts)), **options)
        return Samples(dataclasses.replace(loaded, tokenizer=tokenizer), config, plain_text=plain_text)

    return make


def test_prompts_are_asked_as_the_training_data_are(samples, loaded, tmp_path):
    tokenizer = loaded.tokenizer
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]

    def rendered(messages):
        return tokenizer.encode(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )

    (asked,) = samples("why").prompts
    assert asked.tokens == rendered(chat[1:])
    (continued,) = samples("why", plain_text=True).prompts
    assert continued.tokens == tokenizer.encode("why")
    file = tmp_path / "prompts.jsonl"
    answer = {"role": "assistant", "content": "so"}
    rows = [{"prompt": "why"}, {"messages": [*chat, answer]}, {"prompt": chat}, {"text": "why"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = samples(file).prompts
    assert [prompt.tokens for prompt in read] == [
        asked.tokens, rendered(chat), rendered(chat), continued.tokens,
    ]  # fmt: skip
    assert [prompt.text for prompt in read] == ["why", *["system: be brief\nuser: why"] * 2, "why"]


@pytest.fixture(scope="module")
def with_tools(tiny_checkpoint):
    return load(tiny_checkpoint("qwen3", chat_template=TEMPLATE.read_text(encoding="utf-8")))


def test_the_answer_of_a_row_is_expected_as_training_teaches_it(with_tools, tmp_path):
    """Of a call of a tool, too; the tools of the row stand in its prompt."""
    called = {"function": {"name": "open", "arguments": {"day": "Monday"}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [called]}
    asks = {"role": "user", "content": "when?"}
    tools = [{"type": "function", "function": {"name": "open", "parameters": {"type": "object", "properties": {}}}}]
    rows = [
        {"prompt": "why", "completion": " so "},
        {"messages": [asks, {"role": "assistant", "content": "no"}, asks, {"role": "assistant", "content": "at 9"}]},
        {"messages": [asks, calls], "tools": tools},
        {"prompt": "why"},
    ]
    file, tokenizer = tmp_path / "valid.jsonl", with_tools.tokenizer
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(sample_prompts=[str(file)], chat_template_config={"enable_thinking": False})
    prompts = Samples(with_tools, config).prompts
    call = "<tool_call>\n<function=open>\n<parameter=day>\nMonday\n</parameter>\n</function>\n</tool_call>"
    assert [prompt.expected for prompt in prompts] == ["so", "at 9", call, None]
    assert "# Tools" in tokenizer.decode(prompts[2].tokens)
    assert all("# Tools" not in tokenizer.decode(prompt.tokens) for prompt in (*prompts[:2], prompts[3]))


@pytest.mark.parametrize("arguments", [{"day": "Monday"}, '{"day": "Monday"}'])
def test_a_call_is_shown_as_its_function_and_arguments(arguments):
    call = {"type": "function", "function": {"name": "open", "arguments": arguments}}
    assert written([{"role": "assistant", "content": "", "tool_calls": [call]}]) == 'open {"day": "Monday"}'


def test_an_answer_is_right_where_it_is_the_expected_one_but_for_space(screen_text):
    answers = {"so": " so\n", "at 9": "at 8", "call": "call", "none": "none"}
    samples = [{"prompt": f"ask {text}", "answer": answer, "expected": text} for text, answer in answers.items()]
    assert [is_right(sample) for sample in samples] == [True, False, True, True]
    assert is_right({"prompt": "ask", "answer": "so"}) is None
    screen_text.screen.report({"iteration": 4, "samples": samples})
    assert screen_text.text().splitlines() == [
        "Iter 4, sample 1: ask so -> so (right)",
        "Iter 4, sample 2: ask at 9 -> at 8 (expected at 9)",
        "Iter 4, sample 3: ask call -> call (right)",
        "Iter 4, samples: 3 of 4 right; 1 more in the report.",
    ]
    (table,) = sample_tables([{"iteration": 4, "samples": samples}], [["data:image/jpeg;base64,A"]])
    assert (table.title, table.columns) == ("Samples: 3 of 4 right", ["prompt", "answer at 4", "expected", "right"])
    assert list(table.rows[1][1:]) == ["at 8", "at 9", False]
    page = render("samples", {}, tables=[table])
    assert '<td data-name="prompt"><img alt="" src="data:image/jpeg;base64,A">ask so</td>' in page


def test_samples_are_due_at_their_interval_and_at_the_end(samples):
    every = samples("x", steps_per_eval=3)
    due = [n for n in range(9) if every.are_due(Progress(iteration=n), last=n == 8)]
    assert due == [0, 3, 6, 8]
    assert not every.are_due(Progress(iteration=3, sampled=3), last=True)
    assert not samples().are_due(Progress(iteration=0), last=True)


WRONG = {
    "a file that is missing": ("none.jsonl", {}, "none.jsonl: cannot be read"),
    "a file without a row": ("empty.jsonl", {}, "no row in it; expected a prompt in each row"),
    "a file with a row of no known format": ("odd.jsonl", {}, r"odd.jsonl:1: no known format"),
    "a chat with a mistyped role": ("role.jsonl", {}, r"role.jsonl:1: message 1: unknown role 'usr'"),
    "a question that is null": ("null.jsonl", {}, r"null.jsonl:1: message 1: \"content\" is missing or null"),
    "a chat of an answer alone": ("answer.jsonl", {}, r"answer.jsonl:1: no message before the answer"),
    "a prompt longer than max_seq_length": ("dog " * 40, {"max_seq_length": 16}, r"prompt 1: it has \d+ tokens, and"),
}


@pytest.mark.bad_input("`sample_prompts`: {what}")
@pytest.mark.parametrize("what", WRONG)
def test_prompts_that_cannot_be_asked(samples, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    spoken = {"answer": ("assistant", "x"), "role": ("usr", "x"), "null": ("user", None)}
    rows = {name: {"messages": [{"role": role, "content": text}]} for name, (role, text) in spoken.items()}
    for name, row in ({"odd": {"promt": "x"}} | rows).items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    (tmp_path / "empty.jsonl").write_text("\n")
    prompt, options, message = WRONG[what]
    with pytest.raises(UserError, match=message):
        samples(prompt, **options)


@pytest.mark.bad_input("`sample_prompts`: a chat for a tokenizer without a chat template")
def test_chats_need_a_template(samples, loaded, tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "x"}))
    bare = SimpleNamespace(
        has_chat_template=False, has_thinking=False, bos_token=None, encode=loaded.tokenizer.encode,
        _tokenizer=loaded.tokenizer._tokenizer,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"chat.jsonl:1: the model's tokenizer has no chat template"):
        samples(tmp_path / "chat.jsonl", tokenizer=bare)
    (prompt,) = samples("why", tokenizer=bare).prompts
    assert prompt.tokens == loaded.tokenizer.encode("why")


def test_no_random_number_is_drawn_and_the_modes_stay(samples, loaded):
    asked = samples("why")
    loaded.model.train()
    mx.random.seed(3)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(3)
    asked.answers(lambda: False)
    assert mx.random.uniform(shape=(4,)).tolist() == expected
    assert all(module.training for module in loaded.model.modules())
    assert asked.answers(lambda: True) is None


def test_tables_show_the_first_and_the_last_answer():
    def records(count):
        return [{"iteration": n, "samples": [{"prompt": "p", "answer": f"a{n}"}]} for n in range(count)]

    (two,) = sample_tables(records(2))
    assert (two.columns, two.rows) == (["prompt", "answer at 0", "answer at 1"], [[Pictured("p", ()), "a0", "a1"]])
    ends, every = sample_tables([{"iteration": 0, "train_loss": 1.0}, *records(3)])
    assert (ends.rows[0][1:], every.folded, every.rows) == (["a0", "a2"], True, [(1, n, f"a{n}") for n in range(3)])
    assert sample_tables([]) == []


def test_plain_text_is_noticed(loaded, tmp_path):
    from deltatune.data.datasets import load_datasets

    for rows, plain in (([{"text": "a dog"}], True), ([{"text": "a dog"}, {"prompt": "x", "completion": "y"}], False)):
        for name in ("train", "valid"):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        splits = load_datasets(TrainConfig(data=str(tmp_path), batch_size=1), loaded.tokenizer)
        assert splits.plain_text is plain
    assert Splits().plain_text is False
