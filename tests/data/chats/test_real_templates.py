"""A chat data set with thinking, calls of tools and several turns, on the templates of seven families.

The templates are in templates/, written anew after the rules of the models' own, but for Qwen3.8's, which is the
model's own (Apache 2.0). The counted tokens are those that each
answer is generated as: everything after the prompt that the template writes for it.
"""

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from jinja2.exceptions import UndefinedError
from mlx_lm.tokenizer_utils import load
from mlx_lm.tuner.datasets import ChatDataset
from rich.console import Console
from transformers import AutoTokenizer

from deltatune.data import BatchOrder, load_datasets, show_batch
from deltatune.data.rows.row_formats import Features
from deltatune.data.text import TextEncoder

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {
    "id": "functions.weather:0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
}
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "weather in "}, {"type": "text", "text": "Rome?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "I look it up.", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun", "tool_call_id": "functions.weather:0"},
    {"role": "assistant", "content": "Sun.", "reasoning_content": "The tool says so."},
    {"role": "user", "content": "and tomorrow?"},
    {"role": "assistant", "content": "The same.", "reasoning_content": "Two days were asked."},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "Gladly."},
]
THOUGHT = {"reasoning_content": "a thought"}
ROW = {"messages": CHAT, "tools": json.dumps([TOOL])}
TEMPLATES = Path(__file__).parents[1] / "templates"
EXPECTED = yaml.safe_load((TEMPLATES / "expected.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def tokenizer(request, tokenizers, tmp_path):
    folder = tmp_path / "tokenizer"
    tokenizers("plain")._tokenizer.save_pretrained(folder)
    inner = AutoTokenizer.from_pretrained(folder)
    expected = EXPECTED[request.param]
    inner.add_tokens(expected["special"])
    inner.chat_template = (TEMPLATES / f"{request.param}.jinja").read_text(encoding="utf-8")
    inner.save_pretrained(folder)
    names = expected["ends"]
    inner = AutoTokenizer.from_pretrained(folder, eos_token=names[0])
    inner.save_pretrained(folder)
    return load(folder, eos_token_ids=inner.convert_tokens_to_ids(names))


def shown(examples, tokenizer) -> list[str]:
    texts = []
    for example in examples:
        console = Console(file=io.StringIO(), width=200)
        show_batch(next(BatchOrder([example], 1, 2048)), tokenizer, console)
        texts.append(console.file.getvalue().split("\n", 2)[2].replace("\\n\n", "\n").replace("⟧⟦", ""))
    return texts


@pytest.mark.parametrize(("tokenizer", "name"), [(name, name) for name in EXPECTED], indirect=["tokenizer"])
def test_the_counted_tokens_are_the_answers_as_generated(tokenizer, folder, name):
    config = folder(train=[ROW])
    splits = load_datasets(config, tokenizer)
    assert [re.findall(r"⟦(.*?)⟧", text, re.S) for text in shown(splits.train, tokenizer)] == EXPECTED[name]["counted"]
    for example in splits.train:
        # What stands before each counted part is the prompt that the template writes for that answer.
        tokens, counted = example.tokens.tolist(), example.targets.tolist()
        starts = [at for at in range(1, len(tokens)) if counted[at] and not counted[at - 1]]
        prompts = [
            tokenizer.apply_chat_template(
                meant(name)[:turn], tools=[TOOL], add_generation_prompt=True, enable_thinking=thinks
            )
            for turn in range(2, len(CHAT))
            for thinks in (True, False)
        ]
        assert all(tokens[:start] in prompts for start in starts)
    reasoning = [note for note in splits.notes if "does not write" in note]
    assert [re.match(rf".*: {EXPECTED[name]['unwritten']} answers? ha", note) is not None for note in reasoning] == [
        True
    ] * bool(EXPECTED[name]["unwritten"])
    assert any("1 of 1 conversations takes several rows" in note for note in splits.notes) == (
        len(EXPECTED[name]["counted"]) > 1
    )


@pytest.mark.parametrize(("tokenizer", "name"), [(name, name) for name in EXPECTED], indirect=["tokenizer"])
def test_the_last_turn_alone(tokenizer, folder, name):
    (example,) = load_datasets(folder(train=[ROW], chat_turns="last"), tokenizer).train
    (text,) = shown([example], tokenizer)
    assert re.findall(r"⟦(.*?)⟧", text, re.S) == EXPECTED[name]["counted"][-1][-1:]
    end = tokenizer.convert_tokens_to_ids(["<|user|>"] if name == "glm_4_5" else [])
    whole = tokenizer.apply_chat_template(meant(name), tools=[TOOL], enable_thinking=name != "qwen3_8")
    assert example.tokens.tolist() == whole + end


@pytest.mark.parametrize("tokenizer", ["qwen3_8"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"chat_template_config": {"enable_thinking": False}}, {"mask_prompt": False}])
def test_a_row_has_the_thinking_of_the_prompt_that_begins_it(tokenizer, folder, options):
    """Qwen3.8's prompt with reasoning begins no answer without, and its system message differs."""
    plain, reasoned = ([*CHAT[1:2], {"role": "assistant", "content": "Sun.", **more}] for more in ({}, THOUGHT))
    examples = load_datasets(folder(train=[{"messages": plain}, {"messages": reasoned}], **options), tokenizer).train
    texts = [tokenizer.decode(example.tokens) for example in examples]
    assert ["Reasoning effort" in text for text in texts] == [False, True]
    counted = [tokenizer.decode(example.tokens[example.targets]) for example in examples]
    assert options.get("mask_prompt") is False or [text[:4] for text in counted] == ["Sun.", "a th"]


@pytest.mark.parametrize(
    ("tokenizer", "name"), [(name, name) for name in EXPECTED if name != "qwen3_8"], indirect=["tokenizer"]
)
def test_rows_have_the_tokens_of_mlx_lm_lora(tokenizer, name):
    """All but the end that GLM-4.5's leaves to the next turn, and arguments that mlx_lm.lora writes as text in text.

    mlx_lm.lora asks for reasoning also where there is none, which Qwen3.8's writes into the system message.
    """
    encode, compared = TextEncoder(tokenizer, Features(), None), 0
    for arguments in ({"city": "Rome"}, '{"city": "Rome"}', '{"city":"Rome"}'):
        function = {"name": "weather", "arguments": arguments}
        called = {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": function}]}
        for count in (2, 4, 5, 7):
            row = {"messages": [*meant(name)[:2], called, *meant(name)[3:]][1 : count + 1], "tools": [TOOL]}
            if row["messages"][-1]["role"] != "assistant":
                continue
            ours = encode(row, "file:1")[-1].tokens.tolist()
            try:
                theirs, _ = ChatDataset([row], tokenizer).process(row)
            except (TypeError, UndefinedError):
                continue
            compared += 1
            added = ours[len(theirs) :]
            assert ours[: len(theirs)] == theirs
            assert tokenizer.decode(added) == (
                "" if name != "glm_4_5" else "<|observation|>" if count == 2 else "<|user|>"
            )
    assert compared >= 2


VALUES = {"city": "", "days": 0, "now": True, "late": False, "note": None, "stops": [], "more": {}, "far": 0.0}


@pytest.mark.parametrize("as_text", [False, True], ids=["mapping", "text"])
@pytest.mark.parametrize(("tokenizer", "name"), [(name, name) for name in EXPECTED], indirect=["tokenizer"])
def test_arguments_that_are_empty_or_zero_keep_their_values(tokenizer, folder, name, as_text):
    """The tokens are those of transformers for the same arguments; none is left out as an empty field."""
    arguments = json.dumps(VALUES) if as_text else VALUES
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALL | {"function": {"name": "w", "arguments": arguments}}],
        },
    ]
    (example,) = load_datasets(folder(train=[{"messages": messages, "tools": [TOOL]}]), tokenizer).train
    whole = json.loads(json.dumps(messages))
    whole[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(VALUES) if name == "deepseek_v3_1" else VALUES
    texts = {
        tokenizer.apply_chat_template(whole, tools=[TOOL], enable_thinking=thinks, tokenize=False)
        for thinks in (True, False)
    }
    end = "<|observation|>" if name == "glm_4_5" else ""
    text = tokenizer.decode(example.tokens.tolist())
    assert text in {f"{one}{end}" for one in texts}
    assert all(key in text for key in VALUES)


def meant(name: str = ""):
    """Return the messages as a template gets them: texts, and arguments that are a mapping unless it joins texts."""
    messages = json.loads(json.dumps(CHAT))
    messages[1]["content"] = "weather in Rome?"
    if name != "deepseek_v3_1":
        messages[2]["tool_calls"][0]["function"]["arguments"] = {"city": "Rome", "days": 2}
    return messages
