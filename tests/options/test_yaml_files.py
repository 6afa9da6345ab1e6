"""The contents of a YAML file, and the one message for others."""

import pytest

from deltatune.errors import UserError
from deltatune.options.yaml_files import read_yaml


@pytest.mark.parametrize("number", ["1e-5", "1E-5", "1.5e-5", "2e4", "-3e-2", ".5e1", "1.e-3"])
def test_exponents_are_numbers(tmp_path, number):
    file = tmp_path / "c.yaml"
    file.write_text(f"learning_rate: {number}\n")
    assert read_yaml(file)["learning_rate"] == float(number)


def test_words_with_an_e_stay_words(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: 1e5b\nadapter_path: e5\n")
    assert read_yaml(file) == {"model": "1e5b", "adapter_path": "e5"}


def test_byte_order_marks_and_merge_keys_are_read(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes("\ufeffmodel: a\r\n# ü\r\n".encode())
    assert read_yaml(file) == {"model": "a"}
    file.write_text("base: &base {rank: 4}\nlora: {<<: *base, scale: 2}\nother: {<<: *base, rank: 8}\n")
    assert read_yaml(file) == {
        "base": {"rank": 4}, "lora": {"rank": 4, "scale": 2}, "other": {"rank": 8}
    }  # fmt: skip
    file.write_text("")
    assert read_yaml(file) == {}


@pytest.mark.bad_input("a YAML file that {what}")
@pytest.mark.parametrize(
    ("what", "content", "message"),
    [
        ("is no YAML", b"a: [1,\n", r"the file is not YAML: .*, in line 2\."),
        ("is a list", b"- 1\n", r"expected `key: value` lines, got \[1\]\."),
        ("is a text", b"iters 5\n", r"expected `key: value` lines, got 'iters 5'\."),
        ("is not UTF-8", "modèle: x\n".encode("latin-1"), r"byte 3 is not UTF-8 .*save the file in UTF-8"),
        ("is in UTF-16", "model: x\n".encode("utf-16"), r"is not UTF-8"),
        ("is binary", b"\x00\x01\x02", r"the file is not YAML"),
        ("gives a key twice", b"iters: 5\nmodel: x\niters: 6\n", r"the key 'iters' stands there twice, in line 3\."),
        ("gives a nested key twice", b"lora_parameters: {rank: 1, rank: 2}\n", r"the key 'rank' stands there twice"),
        ("is nested too deeply", b"a: " + b"[" * 600, r"nested too deeply"),
        ("holds a date that is none", b"model: 2020-13-45\n", r"'2020-13-45' is not a timestamp, in line 1\."),
        ("holds a tag that does not fit", b"iters: !!bool maybe\n", r"'maybe' is not a bool, in line 1\."),
        (
            "one with a Python object",
            b"model: !!python/object/apply:os.getcwd []\n",
            r"could not determine a con",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_file_that_is_refused(run, tmp_path, what, content, message):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_yaml(file)
    code, out, err = run("train", "-c", file)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert str(file) in err


@pytest.mark.bad_input("a YAML file that is missing, or a folder")
def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_yaml(path)


@pytest.mark.bad_input("a YAML file that describes gigabytes in a few lines")
def test_a_file_that_grows_is_not_written_out(run, tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join([*lines, "iters: *a11"]))
    code, _, err = run("train", "-c", file)
    assert code == 2
    assert len(err) < 2500
    file.write_text("\n".join(f"optimizer_config: {line}" if n == 0 else f"  {line}" for n, line in enumerate(lines)))
    assert run("train", "-c", file)[0] == 2
