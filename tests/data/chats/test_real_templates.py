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
ROW = {"messages": CHAT, "tools": json.dumps([TOOL])}
SPECIAL = {
    "qwen3": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "\n\n"],
    "qwen3_5": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "\n\n"],
    "qwen3_8": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "\n\n"],
    "kimi_k2_thinking": [
        "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>", "</think>",
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ],
    "olmo3": ["<function_calls>", "</function_calls>", "<functions>", "</functions>"],
    "deepseek_v3_1": [
        "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>",
    ],
    "glm_4_5": [
        "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ],
}  # fmt: skip
# The tokens at which generation stops, where they are others than these.
ENDS = {"deepseek_v3_1": ["<｜end▁of▁sentence｜>"], "glm_4_5": ["<|endoftext|>", "<|user|>", "<|observation|>"]}
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
QWEN_3_5_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'
)
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Rome", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
GLM_CALL = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
# For each template, the rows, and in each row the texts that count.
COUNTED = {
    "qwen3": [
        [
            f"<think>\nI look it up.\n</think>\n\n{QWEN_CALL}<|im_end|>\n",
            "<think>\nThe tool says so.\n</think>\n\nSun.<|im_end|>\n",
        ],
        ["<think>\nTwo days were asked.\n</think>\n\nThe same.<|im_end|>\n"],
        ["<think>\n\n</think>\n\nGladly.<|im_end|>\n"],
    ],
    # The prompt of Qwen3.5 opens the reasoning; where there is none, it closes it as well.
    "qwen3_5": [
        [
            f"I look it up.\n</think>\n\n{QWEN_3_5_CALL}<|im_end|>\n",
            "The tool says so.\n</think>\n\nSun.<|im_end|>\n",
        ],
        ["Two days were asked.\n</think>\n\nThe same.<|im_end|>\n"],
        ["Gladly.<|im_end|>\n"],
    ],
    # Qwen3.8 asks for reasoning in the system message, so an answer without it has a row that does not.
    "qwen3_8": [
        [
            f"I look it up.\n</think>\n\n{QWEN_3_5_CALL}<|im_end|>\n",
            "The tool says so.\n</think>\n\nSun.<|im_end|>\n",
            "Two days were asked.\n</think>\n\nThe same.<|im_end|>\n",
        ],
        ["Gladly.<|im_end|>\n"],
    ],
    # Kimi K2 Thinking's writes the reasoning of a call until an answer follows, and that of an answer never.
    "kimi_k2_thinking": [
        [f"<think>I look it up.</think>{KIMI_CALL}<|im_end|>", "<think></think>Sun.<|im_end|>"],
        ["<think></think>The same.<|im_end|>", "<think></think>Gladly.<|im_end|>"],
    ],
    # The last answer ends with another token than those before it; generation stops at both.
    "olmo3": [
        [
            '<function_calls>weather(city="Rome", days=2)</function_calls><|im_end|>',
            "Sun.<|im_end|>",
            "The same.<|im_end|>",
            "Gladly.<|endoftext|>",
        ]
    ],
    # DeepSeek V3.1's joins the text of the arguments. Behind the result of a tool nothing opens the answer.
    "deepseek_v3_1": [
        [
            f"{DEEPSEEK_CALL}<｜end▁of▁sentence｜>",
            "Sun.<｜end▁of▁sentence｜>",
            "The same.<｜end▁of▁sentence｜>",
            "Gladly.<｜end▁of▁sentence｜>",
        ]
    ],
    # A turn of GLM-4.5 ends with the marker of the next role, at which generation stops.
    "glm_4_5": [
        [
            f"\n<think>I look it up.</think>\n{GLM_CALL}<|observation|>",
            "\n<think>The tool says so.</think>\nSun.<|user|>",
        ],
        ["\n<think>Two days were asked.</think>\nThe same.<|user|>"],
        ["\n<think></think>\nGladly.<|user|>"],
    ],
}
UNWRITTEN = {
    "qwen3": 0,
    "qwen3_8": 0,
    "qwen3_5": 0,
    "kimi_k2_thinking": 2,
    "olmo3": 3,
    "deepseek_v3_1": 3,
    "glm_4_5": 0,
}


@pytest.fixture
def tokenizer(request, tokenizers, tmp_path):
    folder = tmp_path / "tokenizer"
    tokenizers("plain")._tokenizer.save_pretrained(folder)
    inner = AutoTokenizer.from_pretrained(folder)
    inner.add_tokens(SPECIAL[request.param])
    inner.chat_template = (Path(__file__).parents[1] / "templates" / f"{request.param}.jinja").read_text(
        encoding="utf-8"
    )
    inner.save_pretrained(folder)
    names = ENDS.get(request.param, ["<|im_end|>", "<|endoftext|>"])
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


@pytest.mark.parametrize(("tokenizer", "name"), [(name, name) for name in COUNTED], indirect=["tokenizer"])
def test_the_counted_tokens_are_the_answers_as_generated(tokenizer, folder, name):
    config = folder(train=[ROW])
    splits = load_datasets(config, tokenizer)
    assert [re.findall(r"⟦(.*?)⟧", text, re.S) for text in shown(splits.train, tokenizer)] == COUNTED[name]
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
    assert [f"{UNWRITTEN[name]} answers have" in note for note in reasoning] == [True] * bool(UNWRITTEN[name])
    assert any("1 of 1 conversations take several rows" in note for note in splits.notes) == (len(COUNTED[name]) > 1)


@pytest.mark.parametrize(("tokenizer", "name"), [(name, name) for name in COUNTED], indirect=["tokenizer"])
def test_the_last_turn_alone(tokenizer, folder, name):
    (example,) = load_datasets(folder(train=[ROW], chat_turns="last"), tokenizer).train
    (text,) = shown([example], tokenizer)
    assert re.findall(r"⟦(.*?)⟧", text, re.S) == COUNTED[name][-1][-1:]
    end = tokenizer.convert_tokens_to_ids(["<|user|>"] if name == "glm_4_5" else [])
    whole = tokenizer.apply_chat_template(meant(name), tools=[TOOL], enable_thinking=name != "qwen3_8")
    assert example.tokens.tolist() == whole + end


@pytest.mark.parametrize(
    ("tokenizer", "name"), [(name, name) for name in COUNTED if name != "qwen3_8"], indirect=["tokenizer"]
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
@pytest.mark.parametrize(("tokenizer", "name"), [(name, name) for name in COUNTED], indirect=["tokenizer"])
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
