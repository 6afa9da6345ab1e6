"""Draws pictures of sorting trays, whose 4 x 4 compartments hold small coloured parts, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

COLOURS = {
    "red": (214, 40, 40),
    "green": (38, 150, 60),
    "blue": (40, 80, 214),
    "yellow": (240, 196, 20),
    "black": (30, 30, 34),
}
SHAPES = ("circle", "square", "triangle", "cross")
MOST = 4
ROWS = 4
COMPARTMENT = 16
SIDE = ROWS * COMPARTMENT
# Pictures are drawn this many times larger and scaled down, so that edges are smooth.
_FINE = 4


@dataclass(frozen=True, order=True)
class Kind:
    """`count` parts of one colour and shape."""

    colour: str
    shape: str
    count: int

    @property
    def name(self) -> str:
        """Colour and shape, such as `red circle`."""
        return f"{self.colour} {self.shape}"

    @property
    def held_out(self) -> bool:
        """Whether this combination of kind and number is kept out of fine-tuning, as about one in eight is."""
        return ([*COLOURS].index(self.colour) + 2 * SHAPES.index(self.shape) + self.count) % 8 == 0


@dataclass(frozen=True)
class Tray:
    """A tray with parts.

    Args:
        kinds: The kinds of parts, in alphabetical order of colour and shape.
        parts: For each compartment, row by row, the (colour, shape) of its part, or None.
        look: The seed of light, sizes and positions in the picture.
    """

    kinds: tuple[Kind, ...]
    parts: tuple[tuple[str, str] | None, ...]
    look: int


def draw(rng: random.Random, kinds: int, most: int = MOST) -> Tray:
    """Draw a tray with this many kinds of parts, 1 to `most` of each, in random compartments."""
    every = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    counted = tuple(
        sorted(Kind(*colour_and_shape, rng.randint(1, most)) for colour_and_shape in rng.sample(every, kinds))
    )
    parts: list[tuple[str, str] | None] = [(kind.colour, kind.shape) for kind in counted for _ in range(kind.count)]
    parts += [None] * (ROWS * ROWS - len(parts))
    rng.shuffle(parts)
    return Tray(counted, tuple(parts), rng.getrandbits(32))


def picture(tray: Tray) -> Any:
    """Draw the tray as a Pillow image, 64 x 64 pixels in RGB."""
    from PIL import Image, ImageDraw

    rng = random.Random(tray.look)
    light = rng.uniform(0.82, 1.0)
    ground = tuple(round(light * rng.randint(222, 250)) for _ in range(3))
    image = Image.new("RGB", (SIDE * _FINE, SIDE * _FINE), ground)
    pen = ImageDraw.Draw(image)
    for index, part in enumerate(tray.parts):
        if part is None:
            continue
        row, column = divmod(index, ROWS)
        radius = rng.uniform(4.8, 6.4)
        room = COMPARTMENT / 2 - radius
        x, y = ((place + 0.5) * COMPARTMENT + rng.uniform(-room, room) for place in (column, row))
        colour = tuple(min(255, max(0, round(light * value + rng.gauss(0, 9)))) for value in COLOURS[part[0]])
        _part(pen, part[1], x * _FINE, y * _FINE, radius * _FINE, colour)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def _part(pen: Any, shape: str, x: float, y: float, radius: float, colour: tuple[int, ...]) -> None:
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape == "square":
        half = 0.86 * radius
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y - radius), (x - radius, y + 0.8 * radius), (x + radius, y + 0.8 * radius)], fill=colour)
    else:
        arm = 0.32 * radius
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
