"""Random options, data, templates and damaged files at every command: each ends with exit code 0 or 2 and one message.

A short run of fixed examples is part of the tests; `make fuzz` throws fresh ones until its time is over.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_inputs import JSON, KINDS, TEXT, damage, data_files, options, small, templates, yaml_files
from hypothesis import given, settings
from hypothesis import strategies as st

QUICK = ["--iters", "2", "--batch-size", "2", "--max-seq-length", "64", "--val-batches", "1"]


@contextlib.contextmanager
def folder(**files: bytes) -> Iterator[Path]:
    """A folder with files, gone afterwards; an underscore in a name stands for its dot."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made).resolve()
        for name, content in files.items():
            (path / name.replace("_", ".")).write_bytes(content)
        yield path


def examples(share: float):
    """As many examples as the profile has, times a share: commands that load a model take longer."""
    return settings(max_examples=max(3, int(settings().max_examples * share)))


@given(values=options())
@examples(1)
def test_options_in_a_file(commands, values):
    """The model does not exist, so that nothing is trained where the options happen to be right."""
    with folder(run_yaml=json.dumps(values).encode()) as path:
        commands.must(path, "train", "-c", "run.yaml", "--model", "./none", output=path / "adapters")


@given(content=yaml_files())
@examples(1)
def test_files_that_may_be_yaml(commands, content):
    with folder(run_yaml=content) as path:
        commands.must(path, "plan", "-c", "run.yaml", "--model", "./none", "--data", ".", output=path / "adapters")


FLAGS = [
    "--iters", "--learning-rate", "--rank", "--seed", "--fps", "--parts", "--num-layers", "--pack", "--overlong",
    "--temp", "--top-p", "--max-tokens", "--adapter-path", "--save-path", "--epochs", "--report-to", "--resume",
    "--chat-template-config", "--image", "--test", "--verbose", "-c", "--output",
]  # fmt: skip


@given(
    command=st.sampled_from(["train", "plan", "eval", "generate", "merge", "doctor", "run", "selftest", "demo", "zz"]),
    words=st.lists(st.sampled_from(FLAGS) | TEXT | st.integers(-2, 3).map(str) | st.sampled_from(["nan", "1e400"])),
)
@examples(1)
def test_flags(commands, command, words):
    """A word that would start minutes of work, or another program, is not among them."""
    with folder() as path:
        must_fail = ["--no-such-flag"] if command in ("selftest", "demo", "doctor") else ["--model", "./none"]
        argv = ["run", "--", "zz", *words] if command == "run" else [command, *words, *must_fail]
        commands.must(path, *argv, output=path / "adapters")


@given(values=options(known=True))
@examples(0.2)
def test_options_that_may_train(commands, checkpoint, rows, values):
    with folder(train_jsonl=rows, valid_jsonl=rows, run_yaml=json.dumps(small(values)).encode()) as path:
        files = ["--model", checkpoint, "--data", ".", "--adapter-path", "out"]
        commands.must(path, "train", "-c", "run.yaml", *files, output=path / "out")


@given(content=data_files(), mask=st.sampled_from(["--mask-prompt", "--no-mask-prompt", "--pack"]))
@examples(1)
def test_rows_of_data(commands, checkpoint, content, mask):
    with folder(train_jsonl=content) as path:
        files = ["--model", checkpoint, "--data", ".", "--adapter-path", "out"]
        commands.must(path, "train", "--show-batch", *files, *QUICK, mask, output=path / "out")


@given(template=templates(), content=data_files(), variables=st.dictionaries(TEXT, JSON, max_size=2))
@examples(0.7)
def test_chat_templates(commands, checkpoint, rows, template, content, variables):
    with folder(train_jsonl=content + rows) as path:
        model = path / "model"
        shutil.copytree(checkpoint, model)
        config = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        files = ["--model", model, "--data", ".", "--adapter-path", "out"]
        commands.must(path, "train", "--show-batch", *files, *QUICK, output=path / "out")
        given = ["--chat-template-config", json.dumps(variables)]
        commands.must(path, "generate", "--model", model, "--prompt", "fox", "-m", "2", *given, output=path / "out")


@given(prompt=st.binary(max_size=12), template=JSON)
@examples(0.5)
def test_prompts(commands, checkpoint, prompt, template):
    argv = ["generate", "--model", checkpoint, "-m", "2", "--chat-template-config", json.dumps(template)]
    with folder() as path:
        commands.must(path, *argv, "--prompt", "-", output=path / "out", stdin=prompt)


@pytest.fixture(scope="module")
def trained(commands, checkpoint, rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained").resolve()
    shutil.copytree(checkpoint, path / "model")
    for name in ("train", "valid", "test"):
        (path / f"{name}.jsonl").write_bytes(rows)
    argv = ["train", "--model", "model", "--data", ".", "--adapter-path", "out", *QUICK]
    outcome = commands.must(path, *argv, output=path / "out")
    assert outcome.code == 0, outcome.err
    return path


DAMAGED = ("model/config.json", "model/model.safetensors", "model/tokenizer.json", "model/tokenizer_config.json",
           "out/adapters.safetensors", "out/adapter_config.json", "out/state/state.safetensors", "out/metrics.jsonl",
           "train.jsonl", "valid.jsonl")  # fmt: skip
RUN = ["--model", "model", "--data", ".", "--adapter-path", "out"]
ON_DAMAGED = (
    ["train", *RUN, *QUICK, "--resume", "--iters", "3"],
    ["train", *RUN, *QUICK],
    ["plan", *RUN, *QUICK],
    ["eval", *RUN, "--batch-size", "2"],
    ["generate", "--model", "model", "--adapter-path", "out", "--prompt", "fox", "-m", "2"],
    ["merge", "--model", "model", "--adapter-path", "out", "--save-path", "merged"],
    ["doctor", "--model", "model"],
)


@given(
    file=st.sampled_from(DAMAGED),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    argv=st.sampled_from(ON_DAMAGED),
)
@examples(1)
def test_damaged_files(commands, trained, file, kind, seed, argv):
    with folder() as path:
        shutil.copytree(trained, path, dirs_exist_ok=True)
        damage(path / file, kind, seed)
        commands.must(path, *argv, output=path / ("merged" if argv[0] == "merge" else "out"))
