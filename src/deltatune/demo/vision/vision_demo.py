"""The vision demo: it fine-tunes a model to list the parts in pictures of trays, and asks mlx-vlm alone afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich.text import Text

from ...layers import describe
from ...models.load import Loaded, read_config
from ...models.vision.generate import answer_pictures
from ...models.vision.load import check_vision
from ...train.reports.announce import layer_summary
from ...train.reports.report import Png
from .. import flow
from ..flow import Score
from ..screen import DemoScreen
from . import task, trays
from .assets import MODEL

ITERATIONS = 600
PICTURES = 2400
QUESTIONS = 120
LONGEST = 48
RELOAD = Path(__file__).with_name("reload.py")
_ACROSS = 24


def ask(loaded: Loaded, items: Sequence[task.TrayPicture]) -> Score:
    """Let the model answer for every picture; each token is the most likely one."""
    started = time.perf_counter()
    answers = answer_pictures(loaded, task.QUESTION, [str(item.file) for item in items], LONGEST)
    return Score(items, answers, time.perf_counter() - started)


def ask_mlx_vlm(adapter: Path, items: Sequence[task.TrayPicture]) -> list[str]:
    """The answers of mlx-vlm with the base model and the adapter, in a new process without deltatune."""
    return flow.ask_in_new_process(RELOAD, MODEL, adapter, [[str(item.file), task.QUESTION] for item in items], LONGEST)


def run_demo(
    output: str | Path = "demo-vision-out",
    *,
    iterations: int = ITERATIONS,
    questions: int = QUESTIONS,
    pictures: int = PICTURES,
    screen: DemoScreen | None = None,
) -> int:
    """Run the vision demo.

    Args:
        output: The folder for pictures, adapter and report.
        iterations: The number of training iterations.
        questions: The number of held-out pictures to ask about.
        pictures: How many pictures to train on.
        screen: Where to show the demo; the terminal by default.

    Returns:
        The exit code: 0 where 90 % of the answers are right after training and mlx-vlm gives the same, else 1.

    Raises:
        UserError: `output` cannot be written, or mlx-vlm is not installed.
    """
    check_vision(read_config(MODEL), MODEL, "the vision demo looks at pictures")
    output = Path(output)
    demo = flow.Demo(
        title="deltatune demo vision",
        task="A camera looks at trays of parts. The sorter wants a parts list in one exact form for each picture.",
        what="pictures",
        knows="It answers questions about trays in plain words. It has never seen a parts list.",
        unseen="Each held-out tray has a kind of part in a number that training never shows.",
        note="Each has a kind of part in a number that training never shows.",
        upstream="mlx-vlm",
        loader="mlx_vlm.load",
        describe=_describe,
        ask=ask,
        ask_upstream=ask_mlx_vlm,
        on_screen=_blocks,
        in_report=lambda item: Png(item.file.read_bytes(), item.answer),
    )
    items = flow.write_or_refuse(lambda: task.write(output / "data", train=pictures, test=questions)["test"], output)
    again = f'--image {quote(str(items[0].file))} --prompt "{task.QUESTION}"'
    config = flow.options(MODEL, output, iterations, (3e-3, 1e-4), parts="language,vision,projector")
    return flow.demonstrate(demo, items, output, config, screen or DemoScreen(), again)


def _describe(loaded: Loaded) -> str:
    tower = loaded.config["vision_config"]
    return (
        f"{loaded.config['model_type']}, {flow.size(loaded)}, {layer_summary(describe(loaded.model))}; a vision tower "
        f"of {tower['depth']} blocks that cuts {trays.SIDE} x {trays.SIDE} pixels into patches of "
        f"{tower['patch_size']}."
    )


def _blocks(item: task.TrayPicture, screen: DemoScreen) -> str | Text:
    """The picture in half blocks, two pixels a character; the file's name where the terminal has too few colours."""
    name = flow.shorter_path(item.file)
    if screen.console.color_system not in ("truecolor", "256"):
        return name
    small = trays.picture(item.tray).resize((_ACROSS, _ACROSS))
    text = Text(f"{name}\n", style="bold")
    for row in range(0, _ACROSS, 2):
        for column in range(_ACROSS):
            upper, lower = ("rgb({},{},{})".format(*small.getpixel((column, row + half))) for half in (0, 1))
            text.append("▀", f"{upper} on {lower}")
        text.append("\n")
    text.rstrip()
    return text
