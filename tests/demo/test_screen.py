import io

import pytest
from rich.ansi import AnsiDecoder
from rich.console import Console

from deltatune.demo.screen import DemoScreen


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_screen(width):
    file = io.StringIO()
    screen = DemoScreen(Console(file=file, width=width, force_terminal=True, highlight=False))
    screen.title("deltatune demo", "word " * 40)
    screen.part(1, "A part")
    screen.line("word " * 40, ("12.0%", "bold red"))
    screen.answers([("a message " * 9, "no idea " * 12, '{"tool":"order"}' * 9, True), ("another", "", "{}", False)])
    screen.start(0, 100)
    screen.advance(1, 3.5, 1.0)
    screen.stop()
    lines = _without_escapes(file.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    text = "\n".join(lines)
    assert "✓" in text
    assert "✗" in text
    assert "(nothing)" in text


def test_a_command_can_be_pasted_from_a_narrow_terminal():
    file, model = io.StringIO(), "model/" * 15
    command = (
        f'python -m deltatune generate --model {model} --adapter-path demo-out --prompt "6 mochas for Zelda, please."'
    )
    DemoScreen(Console(file=file, width=80)).end("0.0%", "99.0%", "demo-out/" * 12 + "report.html", command, 99.4)
    lines = file.getvalue().splitlines()
    at = lines.index("python -m deltatune generate \\")
    assert lines[at + 1 : at + 3] == [
        f"  --model {model} \\", '  --adapter-path demo-out --prompt "6 mochas for Zelda, please."',
    ]  # fmt: skip
    assert f"report: {'demo-out/' * 12}report.html" in lines


def test_text_with_markup_is_shown_as_it_is():
    file = io.StringIO()
    screen = DemoScreen(Console(file=file, width=80))
    screen.answers([("[red]a[/red]", "[b]", "[/]", True)])
    assert "[red]a[/red]" in file.getvalue()
    assert "[/]" in file.getvalue()


def _without_escapes(text: str) -> str:
    return "\n".join(line.plain for line in AnsiDecoder().decode(text.replace("\r", "\n")))
