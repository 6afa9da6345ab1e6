"""The random input of the commands: options, YAML, rows of data, chat templates, and damage done to files."""

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.options.values import fields_of

# No slash: a name with one would be looked for on the hub.
_LETTERS = st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"])
TEXT = st.text(_LETTERS, max_size=12)
NUMBERS = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**31, 2**63, 2**64, 10**30]), st.floats(), st.sampled_from([1e-5, 0.5, 1.0])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)

_OPTIONS = sorted(fields_of(TrainConfig))
# These decide what is read and written, and the tests set them.
_SET_BY_TESTS = {"model", "data", "adapter_path", "hf_dataset", "report_to", "resume_adapter_file", "resume"}
_WORDS = st.sampled_from([
    "adam", "adamw", "sgd", "muon", "adafactor", "lora", "dora", "full", "dense", "active", "truncate", "skip",
    "language", "vision", "*", "*.q_proj", "delta", "attention", "cosine_decay", "linear_schedule",
])  # fmt: skip
_LORA = st.dictionaries(
    st.sampled_from(sorted(fields_of(LoraConfig))) | TEXT, JSON | _WORDS | st.lists(_WORDS), max_size=4
)
_SCHEDULE = st.fixed_dictionaries(
    {}, optional={"name": _WORDS, "arguments": st.lists(NUMBERS, max_size=4), "warmup": NUMBERS, "warmup_init": NUMBERS}
)
_OPTIMIZER = st.dictionaries(
    _WORDS, st.dictionaries(st.sampled_from(["betas", "eps", "weight_decay", "momentum"]), JSON)
)
_VALUES = st.one_of(JSON, _WORDS, NUMBERS)


@st.composite
def options(draw: Any, known: bool = False) -> dict[str, Any]:
    """Random options, few of them right; with `known` alone, none that the tests set and no unknown one."""
    names = st.sampled_from([name for name in _OPTIONS if name not in _SET_BY_TESTS])
    if not known:
        names = names | TEXT
    special = {"lora_parameters": _LORA, "lr_schedule": _SCHEDULE, "optimizer_config": _OPTIMIZER}
    chosen = draw(st.lists(names, max_size=6, unique=True))
    return {name: draw(special.get(name, _VALUES) | _VALUES) for name in chosen}


def small(values: dict[str, Any]) -> dict[str, Any]:
    """The options with those that only cost time replaced: two iterations of short rows."""
    replaced = {"iters": 2, "batch_size": 2, "max_seq_length": 64, "epochs": None, "val_batches": 1, "test_batches": 1}
    replaced |= {"grad_accumulation_steps": 1, "early_stopping": None}
    return values | replaced


@st.composite
def yaml_files(draw: Any) -> bytes:
    signs = st.text(st.sampled_from("abi: \n-[]{}&*!|>%@`'\"#,?0123.e+~\t\ufeff"), max_size=80)
    written = draw(st.one_of(st.binary(max_size=60), signs.map(str.encode), options().map(_as_json)))
    return written + draw(st.sampled_from([b"", b"\n", b"\niters: 3\niters: 4\n", b"\niters: !!int x\n"]))


def _as_json(values: Any) -> bytes:
    return json.dumps(values).encode()


_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | TEXT},
    optional={"content": TEXT | JSON, "weight": NUMBERS, "tool_calls": JSON, "reasoning_content": TEXT | JSON},
)
_GOOD = st.sampled_from([
    {"prompt": "the quick brown fox", "completion": "jumps"},
    {"text": "the quick brown fox jumps over"},
    {"messages": [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "jumps"}]},
])  # fmt: skip
_SHAREGPT = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "system"]) | TEXT, "value": JSON})
_ROW = st.one_of(
    _GOOD,
    st.fixed_dictionaries({"messages": st.lists(_MESSAGE, max_size=4)}, optional={"tools": JSON}),
    st.fixed_dictionaries({"prompt": JSON, "completion": JSON}),
    st.fixed_dictionaries({"text": JSON}),
    st.fixed_dictionaries({"instruction": JSON, "output": JSON}, optional={"input": JSON}),
    st.fixed_dictionaries({"conversations": st.lists(_SHAREGPT, max_size=3)}),
    JSON,
)


@st.composite
def data_files(draw: Any) -> bytes:
    rows = draw(st.lists(_ROW.map(_as_json) | st.binary(max_size=20), min_size=0, max_size=4))
    good = [_as_json(row) for row in draw(st.lists(_GOOD, max_size=2))]
    return draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"])).join(draw(st.permutations([*rows, *good])))


_PIECES = st.sampled_from([
    "{{ message.content }}", "{{ message['content'] }}", "{{ messages[0].content }}", "<|im_start|>", "<|im_end|>\n",
    "{{ message.role }}", "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "{{ bos_token }}",
    "{% generation %}{{ message.content }}{% endgeneration %}", "{{ raise_exception('refused') }}", "{{ 1 / 0 }}",
    "{{ tools | tojson }}", "{{ message.content | length }}", "{{ message.nothing.more }}", "{{ 'a' * 20 }}",
    "{{ messages[9].content }}", "{% set x = namespace(n=0) %}", "{{ strftime_now('%Y') }}", "{{ ''.__class__ }}",
    "{% include 'x' %}", "{% for i in range(3) %}x{% endfor %}", "{{ message.content.split('x')[5] }}", "{% endfor %}",
    "{{ 'x' | int + 'y' }}", "{{ messages | map(attribute='content') | join }}", "{", "}}", "{%", "{{ self }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% for i in range(10 ** 12) %}{% endfor %}",
])  # fmt: skip


@st.composite
def templates(draw: Any) -> str:
    """A chat template made of pieces, most often inside the loop that all templates have."""
    inside = "".join(draw(st.lists(_PIECES, max_size=5)))
    before, behind = ("".join(draw(st.lists(_PIECES, max_size=2))) for _ in range(2))
    loop = "{% for message in messages %}" + inside + "{% endfor %}"
    return draw(st.sampled_from([before + loop + behind, inside]))


KINDS = ("cut", "flip", "empty", "noise", "gone", "folder", "json", "json", "json")


def damage(path: Path, kind: str, seed: int) -> None:
    """Damage a file: cut it, flip a bit, empty it, fill it with noise, remove it, or change values of its JSON."""
    chance = random.Random(seed)
    content = path.read_bytes()
    if kind == "gone" or kind == "folder":
        path.unlink()
        if kind == "folder":
            path.mkdir()
    elif kind == "cut":
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == "flip" and content:
        place = chance.randrange(min(len(content), 4000)) if chance.random() < 0.7 else chance.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])
    elif kind == "noise":
        path.write_bytes(chance.randbytes(chance.randrange(200)))
    elif kind == "json" and path.suffix == ".json":
        path.write_text(json.dumps(_changed(json.loads(content), chance)))
    else:
        path.write_bytes(b"")


def _changed(value: Any, chance: random.Random) -> Any:
    others = [None, True, -1, 0, 1, 3, 0.5, "", "x", [], {}, [1], {"x": 1}]
    if isinstance(value, dict) and value and chance.random() < 0.95:
        name = chance.choice(sorted(value))
        if chance.random() < 0.2:
            return {other: each for other, each in value.items() if other != name}
        return value | {name: _changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    return chance.choice(others)
