"""A chat data set with thinking, calls of tools and several turns, on the templates of four families.

The templates are in templates/, written anew after the rules of the models' own. The counted tokens are those that each
answer is generated as: everything after the prompt that the template writes for it.
"""

import io
import json
import re
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import load
from rich.console import Console
from transformers import AutoTokenizer

from deltatune.data import BatchOrder, load_datasets, show_batch

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
    "kimi_k2_thinking": [
        "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>", "</think>",
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ],
    "olmo3": ["<function_calls>", "</function_calls>", "<functions>", "</functions>"],
}  # fmt: skip
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
QWEN_3_5_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'
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
}
UNWRITTEN = {"qwen3": 0, "qwen3_5": 0, "kimi_k2_thinking": 2, "olmo3": 3}


@pytest.fixture
def tokenizer(request, tokenizers, tmp_path):
    """A tokenizer with the template and the special tokens of a family."""
    folder = tmp_path / "tokenizer"
    tokenizers("plain")._tokenizer.save_pretrained(folder)
    inner = AutoTokenizer.from_pretrained(folder)
    inner.add_tokens(SPECIAL[request.param])
    inner.chat_template = (Path(__file__).parent / "templates" / f"{request.param}.jinja").read_text(encoding="utf-8")
    inner.save_pretrained(folder)
    ends = [inner.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    return load(folder, eos_token_ids=ends)


def shown(examples, tokenizer) -> list[str]:
    """Return what --show-batch prints of each example."""
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
                meant()[:turn], tools=[TOOL], add_generation_prompt=True, enable_thinking=thinks
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
    assert example.tokens.tolist() == tokenizer.apply_chat_template(meant(), tools=[TOOL])


def meant():
    """Return the messages as the template gets them: texts, and arguments that are mappings."""
    messages = json.loads(json.dumps(CHAT))
    messages[1]["content"] = "weather in Rome?"
    messages[2]["tool_calls"][0]["function"]["arguments"] = {"city": "Rome", "days": 2}
    return messages
