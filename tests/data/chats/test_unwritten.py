"""Each part of a conversation is in its tokens, or counted by its kind and noted."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from transformers import AutoTokenizer

from deltatune.data.chats.unwritten import note
from deltatune.data.datasets import load_datasets
from deltatune.data.rows.row_formats import Features
from deltatune.data.text import TextEncoder
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.models.load import load
from spoken_rows import checked_kinds

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
CALL = '{"name": {{ call.function.name | tojson }}, "parameters": {{ call.function.arguments | tojson }}}'
TEMPLATES = {
    # As Llama 3.1's, without its refusal of several calls.
    "the call alone": "{% for message in messages %}{% if message.tool_calls %}{% set call = message.tool_calls[0] %}"
    f"<|im_start|>assistant\n{CALL}<|im_end|>\n{{% else %}}{TURN}{{% endif %}}{{% endfor %}}{PROMPT}",
    # As Cohere2's: one system message, wherever it stands.
    "one system message": "{% set found = namespace(text='') %}{% for message in messages %}"
    "{% if message.role == 'system' and not found.text %}{% set found.text = message.content %}{% endif %}{% endfor %}"
    "{{ found.text }}<|im_end|>\n{% for message in messages %}{% if message.role in ('user', 'assistant') %}"
    f"{TURN}{{% for call in message.tool_calls or [] %}}{CALL}{{% endfor %}}{{% endif %}}{{% endfor %}}{PROMPT}",
    # Upper case, a name for each message, and tools without their parameters.
    "names and tools": "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description | upper }}"
    "{% endfor %}{% for message in messages %}{{ message.name or '' }} "
    f"{TURN}{{% for call in message.tool_calls or [] %}}{CALL}{{% endfor %}}{{% endfor %}}{PROMPT}",
    # Arguments whose values are texts, and the id in place of a tool's name.
    "ids": "{% for message in messages %}"
    f"{TURN}{{% for call in message.tool_calls or [] %}}{{{{ call.id }}}}"
    "{% for key, value in call.function.arguments.items() if value is string %}{{ key }}={{ value }}{% endfor %}"
    f"{{% endfor %}}{{% endfor %}}{PROMPT}",
    "no texts": "{% for message in messages %}"
    f"{TURN}{{% for call in message.tool_calls or [] %}}{{{{ call.function.name }}}}{{% for key, value in "
    "call.function.arguments.items() %} {{ key }} {{ '' if value is string else value }}{% endfor %}"
    f"{{% endfor %}}{{% endfor %}}{PROMPT}",
    # The names of parameters and arguments alone, or their descriptions and values.
    **{
        kind: "{% for tool in tools or [] %}{{ tool.function.name }} {{ tool.function.description }} "
        f"{{{{ tool.function.parameters.properties{end} | join(' ') }}}}{{% endfor %}}{{% for message in messages %}}"
        f"{TURN}{{% for call in message.tool_calls or [] %}}{{{{ call.function.name }}}} "
        f"{{{{ call.function.arguments{end} | join(' ') }}}}{{% endfor %}}{{% endfor %}}{PROMPT}"
        for kind, end in (("keys", ""), ("values", ".values()"))
    },
}


@pytest.fixture
def with_template(tokenizers, tmp_path):
    def factory(template):
        folder = tmp_path / "tokenizer"
        tokenizers("plain")._tokenizer.save_pretrained(folder)
        inner = AutoTokenizer.from_pretrained(folder)
        inner.chat_template = template
        shutil.rmtree(folder)
        inner.save_pretrained(folder)
        return load_tokenizer(folder)

    return factory


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_part_is_in_the_tokens_or_counted(with_template, name):
    kinds, read = checked_kinds(with_template(TEMPLATES[name]), rows=60, seed=0)
    assert read > 40
    expected = {
        "the call alone": {"tools", "names", "text beside a call", "calls after the first", "reasoning"},
        "one system message": {"tools", "names", "tool messages", "developer messages", "system messages"},
        "names and tools": {"reasoning", "tool parameters"},
        "ids": {"tools", "names", "names of called tools", "arguments of calls", "reasoning"},
        "no texts": {"tools", "arguments of calls"},
        "keys": {"tool parameters", "arguments of calls"},
        "values": {"tool parameters", "arguments of calls"},
    }
    assert kinds >= expected[name]


ASKED = [{"role": "user", "content": "e"}]
TEXT = {"role": "assistant", "content": "a"}


def counted(tokenizer, row, **options):
    encode = TextEncoder(tokenizer, Features(), None, **options)
    encode(row, "file:1")
    return dict(encode.unwritten)


def test_a_lost_text_that_stands_elsewhere_is_counted(with_template):
    tokenizer = with_template(TEMPLATES["one system message"])
    spoken = [{"role": "developer", "content": "e"}, *ASKED, {"role": "assistant", "content": "e"}]
    assert counted(tokenizer, {"messages": spoken}) == {"developer messages": 1}
    assert counted(tokenizer, {"messages": [spoken[0] | {"content": " "}, *spoken[1:]]}) == {}
    assert note("developer messages", 1).endswith("template does not write it; use the role 'system'.")
    assert note("text beside a call", 1).endswith("put the text into a message of its own before the call.")


def test_a_written_text_that_the_template_changes_is_not_counted(with_template):
    tokenizer = with_template(TEMPLATES["names and tools"])
    function = {"name": "f", "description": 'of\n"words"'}
    arguments = {"quote": 'a "b"\n', "none": None, "empty": "", "no": False, "deep": {"list": [1.5, "x"]}}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    spoken = [*ASKED, {"role": "assistant", "content": " padded \n", "tool_calls": [call]}]
    row = {"messages": spoken, "tools": [{"type": "function", "function": function}]}
    assert counted(tokenizer, row) == {}
    call["function"]["arguments"] = json.dumps(arguments)
    assert counted(tokenizer, row) == {}


def test_reasoning_is_looked_for_in_answers_that_count(tokenizers):
    spoken = [*ASKED, {"role": "assistant", "content": "a", "reasoning_content": "so", "thinking": "so"}]
    whole = {"messages": [*spoken, *spoken]}
    within = [*ASKED, {"role": "assistant", "content": "<think>so</think>a"}]
    assert counted(tokenizers("plain"), {"messages": within}) == {}
    assert counted(tokenizers("plain"), whole) == {"reasoning": 2}
    assert counted(tokenizers("plain"), whole, last_turn=True) == {"reasoning": 1}
    assert counted(tokenizers("thinking"), whole) == {}


def test_texts_under_other_keys_are_looked_for(with_template):
    answer = TEXT | {"thoughts": "so it is", "created": "2025-11-29", "id": "m1"}
    tokenizer = with_template(TEMPLATES["names and tools"])
    assert counted(tokenizer, {"messages": [*ASKED, answer]}) == {"'thoughts'": 1}
    assert note("'thoughts'", 2).startswith("2 messages have 'thoughts', which the model's chat template does not")


@pytest.mark.bad_input("an answer of which the chat template writes nothing")
def test_an_answer_of_which_nothing_is_written_is_refused(tokenizers):
    silent = [*ASKED, {"role": "assistant", "content": "", "reasoning_content": "so"}]
    with pytest.raises(UserError, match="file:1: message 2: the model's chat template writes nothing of this answer"):
        counted(tokenizers("plain"), {"messages": silent})
    assert counted(tokenizers("plain"), {"messages": [*silent[:1], silent[1] | {"weight": 0}, *ASKED, TEXT]}) == {}


def test_a_row_that_only_its_copy_has_refused_is_read(with_template):
    """A template may look at a text itself; then the row's own texts are looked for."""
    choosy = "{% if messages[0].content != 'known' %}{{ raise_exception('unknown') }}{% endif %}"
    tokenizer = with_template(choosy + TEMPLATES["one system message"])
    spoken = [{"role": "system", "content": "known"}, {"role": "developer", "content": "quiet"}, *ASKED, TEXT]
    assert counted(tokenizer, {"messages": spoken}) == {"developer messages": 1}


@pytest.mark.bad_input("arguments of a call that are nested too deeply for the chat template")
def test_arguments_of_any_depth_are_read_or_refused(with_template):
    def row(depth):
        deep = 0
        for _ in range(depth):
            deep = [deep]
        call = {"type": "function", "function": {"name": "f", "arguments": {"deep": deep}}}
        return {"messages": [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    tokenizer = with_template(TEMPLATES["the call alone"])
    assert counted(tokenizer, row(200)) == {}
    with pytest.raises(UserError, match=r"file:1: .*nested too deeply"):
        counted(tokenizer, row(600))


def test_both_sides_of_a_pair_are_looked_at(with_template, folder):
    tokenizer = with_template(TEMPLATES["one system message"])
    prompt = [{"role": "developer", "content": "brief"}, *ASKED]
    pair = {"prompt": prompt, "chosen": [TEXT | {"thinking": "b"}], "rejected": [TEXT | {"content": "no", "name": "n"}]}
    config = folder(train=[pair] * 3, loss="dpo")
    notes = load_datasets(config, tokenizer).notes
    for kind in ("developer messages", "reasoning", "names"):
        assert f"{config.data}/train.jsonl: {note(kind, 3)}" in notes


REWARDED = {"loss": "grpo", "reward_funcs": ["exact"], "max_completion_length": 8}


def test_prompts_of_rewards_are_looked_at_and_may_be_json_in_a_cell(with_template, folder):
    choosy = "{% if messages[0].content == 'known' %}{{ raise_exception('known') }}{% endif %}"
    for template in ("", "{% if not add_generation_prompt %}{{ raise_exception('no answer') }}{% endif %}", choosy):
        tokenizer = with_template(template + TEMPLATES["one system message"])
        prompt = [{"role": "developer", "content": "brief"}, *ASKED]
        config = folder(train=[{"prompt": prompt}, {"prompt": json.dumps(prompt)}, {"prompt": "[1]"}], **REWARDED)
        splits = load_datasets(config, tokenizer)
        assert splits.notes[:1] == [f"{config.data}/train.jsonl: {note('developer messages', 2)}"], template
        one, other, text = splits.train
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (other.question, text.question) == (prompt, "[1]")


@pytest.mark.bad_input("a prompt for rewards with an unknown role, or with calls of tools that the template leaves out")
@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "User", "content": "e"}, r"message 1: unknown role 'User' \(did you mean 'user'\?\)"),
        (TEXT | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "does not write calls of tools"),
    ],
)
def test_prompts_of_rewards_are_checked_as_other_chats_are(tokenizers, folder, message, said):
    config = folder(train=[{"prompt": [message, *ASKED]}], **REWARDED)
    with pytest.raises(UserError, match=rf"train.jsonl:1: {said}" if "role" in said else said):
        load_datasets(config, tokenizers("plain"))


# scripts/make_env installs TRL without what it requires, so it is not imported.
PLACE = importlib.util.find_spec("trl")
FOLDER = Path(PLACE.submodule_search_locations[0] if PLACE else "trl") / "chat_templates"
# Templates as models have them, those for TRL's training are its own; and those of the families in this folder.
PATHS = [path for path in sorted(FOLDER.glob("*.jinja")) if not path.stem.endswith("_training")]
PATHS += sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))
# What templates are known to lose, and so must be counted for some row.
SEEN = {
    "qwen3": {"developer messages"},
    "qwen2_5": {"developer messages"},
    "glm4moe": {"developer messages"},
    "phi3": {"developer messages", "tools"},
    "cohere2": {"developer messages"},
    "gptoss": {"system messages", "calls after the first"},
    "llama3_1": {"text beside a call"},
}
# Templates whose prompt begins no answer, that take lists of parts alone, or that want a BOS token.
REFUSED = {"deepseek_r1_distill", "idefics3", "llama3", "llava_next", "smolvlm"}
# The others are weekly: these lose each kind of part, call tools in each way, or are refused.
QUICK = {path for path in PATHS if path.parent.name == "templates" or path.stem in {*SEEN, "gemma4_v5", "llama3"}}


@pytest.fixture(scope="module")
def public_tokenizer():
    return load(MODEL).tokenizer


def test_thirty_templates_are_read():
    assert sum(path.stem not in REFUSED for path in PATHS) >= 30


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path in QUICK else [pytest.mark.weekly], id=f"{path.parent.name}-{path.stem}")
        for path in PATHS
    ],
)
def test_each_part_is_in_the_tokens_of_public_templates_or_counted(public_tokenizer, path):
    public_tokenizer.chat_template = path.read_text(encoding="utf-8")
    kinds, read = checked_kinds(public_tokenizer, rows=12, seed=1)
    assert read or path.stem in REFUSED
    assert kinds >= SEEN.get(path.stem, set())
