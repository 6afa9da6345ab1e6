"""Every part of a shortened vision demo runs and prints what it should; the demo checks how well the model learns."""

import io
import json
import re

import pytest
from rich.console import Console
from safetensors import safe_open

from deltatune import cli
from deltatune.demo.screen import DemoScreen
from deltatune.demo.vision import task, vision_demo
from deltatune.demo.vision.assets import MODEL
from deltatune.layers import describe
from deltatune.models.load import load
from deltatune.models.vision import load as vision_load

pytest.importorskip("mlx_vlm")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The exit code, output folder, printed text and losses of a demo of a few iterations."""
    output, file = tmp_path_factory.mktemp("demo"), io.StringIO()
    screen = DemoScreen(Console(file=file, width=100, highlight=False, color_system="truecolor", force_terminal=True))
    code = vision_demo.run_demo(output, iterations=8, questions=8, pictures=32, screen=screen)
    return code, output, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()), screen.losses


def test_a_short_run_learns_too_little_and_says_so_with_its_exit_code(short):
    code, _, shown, losses = short
    assert code == 1
    assert "0.0% exactly right: 0 of 8 held-out pictures" in shown
    assert len(losses) == 8
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_mlx_vlm_alone_gives_the_same_answers(short):
    _, output, shown, _ = short
    assert "8 of 8 answers are the same" in shown
    assert (output / "adapters.safetensors").is_file()
    assert json.loads((output / "adapter_config.json").read_text())["model"] == str(MODEL)


def test_what_mlx_vlm_answers_comes_from_the_adapter_and_the_pictures(short, tmp_path):
    _, output, _, _ = short
    items = task.write(tmp_path, train=1, valid=1, test=4)["test"]
    plain = vision_demo.ask(load(MODEL, image="a test"), items).answers
    assert vision_demo.ask_mlx_vlm(output, items) != plain
    assert len(set(plain)) > 1


def test_the_report_shows_the_pictures_themselves(short):
    _, output, _, _ = short
    text = (output / "report.html").read_text(encoding="utf-8")
    # Eight pictures, in the open table and in the folded one.
    assert text.count("<img ") == 2 * 8
    assert text.count("src='data:image/png;base64,") == 2 * 8
    assert "right before" in text
    assert text.count('"points": [[') >= 3
    assert not re.search("https?:(?!//www.w3.org/2000/svg)", text)


def test_the_screen_shows_a_picture_in_blocks_where_there_is_colour(short, tmp_path):
    _, _, shown, _ = short
    assert "▀" * 24 in shown
    item = task.write(tmp_path, train=1, valid=1, test=1)["test"][0]
    plain = DemoScreen(Console(file=io.StringIO(), color_system=None))
    assert vision_demo._blocks(item, plain).endswith("0000.png")


def test_without_mlx_vlm_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    find = vision_load.importlib.util.find_spec
    missing = lambda name, *more: None if name == "mlx_vlm" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(vision_load.importlib.util, "find_spec", missing)
    assert cli.main(["demo", "vision", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "which needs mlx-vlm, and mlx-vlm is not installed: pip install 'deltatune[vision]'" in error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["demo", "vision", "--output", str(tmp_path / "file" / "out")]) == 2
    assert "choose another --output" in capsys.readouterr().err


def test_the_shipped_model_is_small_hybrid_and_a_checkpoint_that_mlx_vlm_loads():
    import mlx_vlm

    sizes = {path.name: path.stat().st_size for path in MODEL.rglob("*") if path.is_file()}
    shipped = {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert shipped <= sizes.keys()
    assert sum(sizes.values()) < 3_000_000
    with safe_open(MODEL / "model.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "mlx"
    loaded = load(MODEL, image="a test")
    assert [layer.kind for layer in describe(loaded.model)] == ["delta", "attention"] * 2
    assert len(loaded.tokenizer) == loaded.config["text_config"]["vocab_size"]
    assert type(mlx_vlm.load(str(MODEL))[0]) is type(loaded.model)
