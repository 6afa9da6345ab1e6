"""Answers and their templates as transformers has them with public chat templates: reasoning, ends, Modelfiles."""

import json
import shutil
from pathlib import Path

import pytest

import deltatune
from console import called
from deltatune.data.chats.answers import AnswerParser
from deltatune.data.prompts import conversation_text
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.export.modelfile import turns

trl = pytest.importorskip("trl")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FILES = sorted(TEMPLATES.glob("*.jinja"))
NAMES = [
    path.stem for path in FILES if not path.stem.endswith("_training") and "think" in path.read_text(encoding="utf-8")
]
THOUGHT, CONTENT = "I count:\n\n1, 2.", "Two.\n\n    two()"
QUESTION = {"role": "user", "content": "how many?"}
# Gemma 4's template writes no reasoning of an answer that calls no tool; this is as the model writes it.
GEMMA_4 = f"<|channel>thought\n{THOUGHT}\n<channel|>{CONTENT}"
KEYS = ("reasoning_content", "thinking")


def answered(tokenizer, thinking):
    """Every message with reasoning that the template writes behind its prompt, and how it is generated."""
    for key in KEYS:
        message = {"role": "assistant", key: THOUGHT, "content": CONTENT}
        options = {"tokenize": False, "enable_thinking": thinking}
        whole = tokenizer.apply_chat_template([QUESTION, message], **options)
        prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, **options)
        if THOUGHT in whole and whole.startswith(prompt):
            yield key, whole[len(prompt) : whole.index(CONTENT) + len(CONTENT)]


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_and_content_are_told_apart(tokenizer, name):
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    parser = AnswerParser(tokenizer, {"enable_thinking": True})
    found = dict(answered(tokenizer, True))
    if name.startswith("gemma4") and name != "gemma4_v2":
        found = {"reasoning_content": GEMMA_4}
    families = ("qwen3_5", "qwen3_6", "qwen3_8", "nemotron", "lfm2_2", "glm4", "gptoss", "muse_glimmer")
    assert found or not (name.startswith(families) or name == "qwen3")
    for answer in found.values():
        told = parser.message(answer)
        assert [told.pop(key) for key in KEYS if key in told] == [THOUGHT]
        assert told == {"role": "assistant", "content": CONTENT}
    told = parser.message(CONTENT)
    assert CONTENT in (told.get("reasoning_content"), told["content"].partition("<think>\n")[2], told["content"])


def test_reasoning_in_several_messages_of_gpt_oss_is_not_refused(tokenizer):
    tokenizer.chat_template = (TEMPLATES / "gptoss.jinja").read_text(encoding="utf-8")
    said = "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    told = AnswerParser(tokenizer).message(f"{said}<|start|>assistant<|channel|>final<|message|>2")
    assert (told["content"], set(told.values()) - {"assistant", "2"}) == ("2", {"One.\n\nTwo."})
    history = [QUESTION, told, QUESTION]
    assert "<|channel|>final<|message|>2<|end|>" in tokenizer.apply_chat_template(history, tokenize=False)


def test_transformers_stops_where_a_merged_model_stops(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 1024}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": 2, "tie_word_embeddings": False}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    # Without anything before the head, the model writes token 0, which its tokenizer alone takes for an end.
    model.model.norm.weight.data.zero_()
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    model.save_pretrained(base)
    shutil.copyfile(MODEL / "tokenizer.json", base / "tokenizer.json")
    content = json.loads((MODEL / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(content))
    (tmp_path / "train.jsonl").write_text('{"text": "two teas please"}\n' * 2)
    flags = ["--model", base, "--adapter-path", adapter]
    assert called("train", *flags, "--data", tmp_path, "--iters", 1, "--batch-size", 1).returncode == 0
    assert called("merge", *flags, "--save-path", merged).returncode == 0
    prompt = torch.tensor([[5, 6, 7]])
    answers = [AutoModelForCausalLM.from_pretrained(path).generate(prompt, max_new_tokens=8) for path in (base, merged)]
    assert [answer[0, 3:].tolist() for answer in answers] == [[0] * 8, [0]]
    assert deltatune.generate(deltatune.load(merged), "two teas") == ""
    peft = called("export", "--to", "peft", *flags, "--save-path", tmp_path / "peft")
    assert "give transformers' generate eos_token_id=[0, 2]" in " ".join(peft.stdout.split())


CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "open_at", "arguments": {"day": "Monday"}}}
ASKED = [{"role": "user", "content": "When?"}]
ANSWERS = [
    [{"role": "assistant", "content": "<think>\nIt is 8.\n</think>\n\nAt 8."}],
    [{"role": "assistant", "content": " At 8.\n\n"}],
    [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "8", "name": "open_at"}],
    [{"role": "assistant", "content": "At 8."}, {"role": "user", "content": "\n And now? "}],
]


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_every_history_is_written_as_transformers_writes_it(tokenizer, name):
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    wording, differing = turns(tokenizer)
    assert (wording is None) == bool(differing)
    assert differing or not name.startswith(("qwen3", "deepseekv3"))
    for answer in ANSWERS if wording else []:
        for last in ([], ASKED):
            messages = [*ASKED, *answer, *last]
            try:
                expected = conversation_text(tokenizer, messages, "")
            except UserError:
                continue
            assert wording.text(messages) == expected.removeprefix(tokenizer.bos_token or "")
