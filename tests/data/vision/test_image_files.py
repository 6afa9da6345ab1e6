"""Images are opened upright and on white, whatever their format; a damaged one gives one message that names it."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from deltatune.data.rows.sources import load_hugging_face
from deltatune.data.vision.images import image_file, open_image
from deltatune.data.vision.videos import Video, VideoReader
from deltatune.errors import UserError

SIZE = (20, 12)


def colours(seed=0):
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 255, (SIZE[1], SIZE[0], 3), dtype=np.uint8))


def written(image, kind, **options):
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    tags[0x010F] = "maker"
    return tags


# Tags of TIFF: number, type and the 4 bytes of the value. Text cannot be a resolution, nor a fraction a name.
WRONG = {
    "XResolution as text": (0x011A, 2, b"72\0\0"),
    "Make as a fraction": (0x010F, 5, struct.pack(">I", 8)),
    "Make as an offset beyond the end": (0x010F, 5, b"\0\0\xff\xff"),
}


def rotated_with(tag):
    number, kind, value = tag
    entries = [(number, struct.pack(">HHI", number, kind, 1 if kind != 2 else 3) + value)]
    entries.append((0x0112, struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)))
    body = struct.pack(">H", len(entries)) + b"".join(entry for _, entry in sorted(entries)) + bytes(4)
    return b"Exif\0\0MM\0\x2a\0\0\0\x08" + body


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_its_orientation_says(kind, orientation):
    content = written(colours(), kind, exif=exif(orientation), **({"lossless": True} if kind == "WEBP" else {}))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    np.testing.assert_array_equal(open_image(content, "x"), expected)


@pytest.mark.parametrize("tag", WRONG)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_another_tag_of_a_wrong_type_does_not_matter(tag, kind):
    plain = written(colours(), kind)
    expected = Image.open(io.BytesIO(plain)).convert("RGB").transpose(Image.Transpose.ROTATE_270)
    content = written(colours(), kind, exif=rotated_with(WRONG[tag]))
    np.testing.assert_array_equal(open_image(content, "x"), expected)


@pytest.mark.parametrize(
    "block", [b"Exif\0\0", b"Exif\0\0MM", b"Exif\0\0no TIFF at all", b"Exif\0\0MM\0\x2a\xff\xff\xff\xff"]
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_block_that_cannot_be_read_turns_nothing(block, kind):
    expected = Image.open(io.BytesIO(written(colours(), kind))).convert("RGB")
    np.testing.assert_array_equal(open_image(written(colours(), kind, exif=block), "x"), expected)


def sixteen_bits(image):
    cv2 = pytest.importorskip("cv2")
    deep = np.asarray(image)[..., [2, 1, 0, 3]].astype(np.uint16) * 257
    return cv2.imencode(".png", deep)[1].tobytes()


def with_alpha(image, alpha):
    return Image.merge("RGBA", [*image.split(), Image.fromarray(alpha)])


ALPHA = np.full(SIZE[::-1], 255, np.uint8)
ALPHA[3:9, 5:14] = 0
PALETTE = colours().quantize(8)
# Each is transparent where ALPHA is 0, and holds a colour there that must not be seen.
TRANSPARENT = {
    "RGBA": lambda: written(with_alpha(colours(), ALPHA), "PNG"),
    "WebP": lambda: written(with_alpha(colours(), ALPHA), "WEBP", lossless=True, exact=True),
    "grey": lambda: written(with_alpha(colours().convert("L").convert("RGB"), ALPHA).convert("LA"), "PNG"),
    "16 bits": lambda: sixteen_bits(with_alpha(colours(), ALPHA)),
    "a palette's alphas": lambda: written(hidden_in_palette(), "PNG", transparency=bytes([255] * 8 + [0])),
    "a palette's entry": lambda: written(hidden_in_palette(), "GIF", transparency=8),
    "a colour": lambda: written(hidden_colour(), "PNG", transparency=(1, 2, 3)),
    "a grey": lambda: written(hidden_grey(), "PNG", transparency=hidden_grey().getpixel((5, 3))),
}  # fmt: skip


def hidden_in_palette():
    indices = np.where(ALPHA == 0, 8, np.asarray(PALETTE)).astype(np.uint8)
    image = Image.fromarray(indices, "P")
    image.putpalette([*PALETTE.getpalette()[:24], 0, 0, 0])
    return image


def hidden_colour():
    pixels = np.asarray(colours()).clip(20, 255).astype(np.uint8)
    pixels[ALPHA == 0] = (1, 2, 3)
    return Image.fromarray(pixels)


def hidden_grey():
    return hidden_colour().convert("L")


@pytest.mark.parametrize("case", TRANSPARENT)
def test_transparent_pixels_become_white(case):
    content = TRANSPARENT[case]()
    pixels = np.asarray(open_image(content, "x"))
    assert (pixels[ALPHA == 0] == 255).all()
    np.testing.assert_array_equal(
        pixels[ALPHA == 255], np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))[ALPHA == 255]
    )


def test_half_transparent_colours_are_mixed_with_white():
    half = with_alpha(Image.new("RGB", SIZE), np.full(SIZE[::-1], 128, np.uint8))
    assert np.asarray(open_image(half, "x")).reshape(-1, 3).tolist() == [[127] * 3] * SIZE[0] * SIZE[1]


def frames(count=2):
    return [colours(seed) for seed in range(count)]


FORMATS = {
    "PNG": lambda: written(colours(), "PNG", exif=exif(6)),
    "PNG with alpha": TRANSPARENT["RGBA"],
    "PNG with a palette": TRANSPARENT["a palette's alphas"],
    "PNG of 16 bits": TRANSPARENT["16 bits"],
    "animated PNG": lambda: written(colours(), "PNG", save_all=True, append_images=frames()),
    "JPEG": lambda: written(colours(), "JPEG", exif=exif(6)),
    "progressive JPEG": lambda: written(colours(), "JPEG", progressive=True),
    "JPEG in CMYK": lambda: written(colours().convert("CMYK"), "JPEG"),
    "WebP": lambda: written(colours(), "WEBP", exif=exif(6)),
    "animated WebP": lambda: written(colours(), "WEBP", save_all=True, append_images=frames()),
    "GIF": TRANSPARENT["a palette's entry"],
    "animated GIF": lambda: written(colours(), "GIF", save_all=True, append_images=frames()),
}


def damaged(content, chance):
    """Cut the content, or replace some of its bytes; the sums of a PNG's chunks are right, so that they are read."""
    if chance.random() < 0.2:
        return content[: chance.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(chance.choice([1, 2, 8])):
        place = chance.randrange(len(content) if chance.random() < 0.5 else 100)
        changed[place] = chance.choice([0, 127, 255, changed[place] ^ 1 << chance.randrange(8)])
    return with_sums(bytes(changed))


def with_sums(content):
    place, parts = 8, [content[:8]]
    while content.startswith(b"\x89PNG\r\n\x1a\n") and place + 12 <= len(content):
        length = struct.unpack(">I", content[place : place + 4])[0]
        body = content[place + 4 : place + 8 + length]
        parts += [content[place : place + 4], body, struct.pack(">I", zlib.crc32(body))]
        place += 12 + length
    return b"".join(parts) + content[place:]


@pytest.mark.bad_input("a damaged image of any format")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_image_is_opened_or_gives_one_message_that_names_it(kind, tmp_path):
    content, chance = FORMATS[kind](), random.Random(kind)
    path = tmp_path / "a.bin"
    refused = 0
    for _ in range(30):
        path.write_bytes(damaged(content, chance))
        try:
            said = open_image(path, "data:3").mode
        except UserError as error:
            said = str(error)
            refused += 1
        assert said == "RGB" or said.startswith(f"data:3: image {path}: ")
        assert "\n" not in said
    assert 0 < refused < 30
    path.write_bytes(content)
    assert open_image(path, "data:3").size in (SIZE, SIZE[::-1])


@pytest.mark.bad_input("an image of billions of pixels")
def test_a_huge_image_is_refused_before_it_is_decoded():
    # The size stands behind the signature and the head of the first chunk.
    content = bytearray(written(colours(), "PNG"))
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    with pytest.raises(UserError, match="data:3: image in the data set: too large"):
        open_image(with_sums(bytes(content)), "data:3")


@pytest.mark.parametrize("streaming", [False, True])
def test_the_images_of_a_data_set_come_as_the_bytes_that_it_stores(tmp_path, streaming):
    import datasets

    content = written(colours(), "PNG", exif=rotated_with(WRONG["XResolution as text"]))
    stored = {"bytes": content, "path": None}
    features = datasets.Features({"image": datasets.Image(), "images": datasets.List(datasets.Image())})
    rows = datasets.Dataset.from_dict({"image": [stored], "images": [[stored, stored]]}, features=features)
    rows.to_parquet(str(tmp_path / "train.parquet"))
    (loaded,) = load_hugging_face(str(tmp_path), None, {}, streaming=streaming).values()
    (row,) = loaded
    assert row["image"]["bytes"] == content
    assert [image["bytes"] for image in row["images"]] == [content, content]


def test_the_frames_of_a_video_lie_on_white(tmp_path):
    frame = with_alpha(colours(), ALPHA)
    for name in ("a.png", "b.png"):
        frame.save(tmp_path / name)
    reader = VideoReader(None, tmp_path, {})
    pixels = np.stack(reader._frames(Video(["a.png", "b.png"]), "x").pixels)
    assert (pixels[:, ALPHA == 0] == 255).all()


@pytest.mark.bad_input("an image of a row that is {what}")
@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("a name with a tilde", "~tmp.png", r"image ~tmp.png: no such file"),
        ("a name that is too long", "x" * 300, r"image x+\.\.\.: no such file"),
        ("its content in base64", "iVBOR" * 2000, r"expected a path, got a text of 10,000 characters"),
    ],
)
def test_value_that_is_no_image_is_refused_by_its_row(what, value, message, tmp_path):
    with pytest.raises(UserError, match=rf"^train.jsonl:3: .*{message}"):
        image_file(value, tmp_path, "train.jsonl:3")
