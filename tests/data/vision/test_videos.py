"""Rows with videos give the processor's own tokens and patches, and each bad row gives one message."""

import re
import sys
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from deltatune.data import BatchOrder
from deltatune.data.datasets import first_image
from deltatune.data.vision.videos import Video, VideoReader, frame_count, read_frames, video_text
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.setup import vision_processors
from films import number_of, numbered, write_video

av = pytest.importorskip("av")

IMAGE, VIDEO = 5, 6
FRAMES = [f"f{index}.png" for index in range(5)]


@pytest.fixture(scope="module")
def processors(loaded):
    return vision_processors(loaded)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make videos of 24 frames at 8 per second, 6 at 2 and 1 at 8, five frames, images, and two damaged videos."""
    path = tmp_path_factory.mktemp("videos")
    draw = np.random.default_rng(0)
    for name, count, rate in (("a.avi", 24, 8), ("b.avi", 6, 2), ("one.avi", 1, 8)):
        frames = [np.full((32, 48, 3), index * 10, np.uint8) for index in range(count)]
        write_video(path / name, frames, codec="mjpeg", rate=rate)
    for name in (*FRAMES, "image.png"):
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path / name)
    Image.new("RGB", (64, 32)).save(path / "wide.png")
    Image.new("RGB", (8, 8)).save(path / "small.png")
    (path / "cut.avi").write_bytes((path / "a.avi").read_bytes()[:8000])
    (path / "text.mp4").write_bytes(b"no video")
    return path


@pytest.fixture
def folder(made, tmp_path):
    for file in made.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def chat(user="what?", answer="an answer", **more):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]} | more


def part(kind, value=None, **more):
    return {"type": kind} | ({kind: value} if value else {}) | more


A = ("a.avi", 2.0)
FRAMED = (FRAMES, 2.0)
ROWS = [
    (chat(videos=["a.avi"]), [A], []),
    (chat(video="a.avi", fps=4), [("a.avi", 4.0)], []),
    (chat(videos=[FRAMES]), [FRAMED], []),
    (chat(video=FRAMES, fps=0.5), [(FRAMES, 0.5)], []),
    (chat("see <video> and <video>: which?", videos=[FRAMES, "b.avi"]), [FRAMED, ("b.avi", 2.0)], []),
    (chat([part("text") | {"text": "see"}, part("video", "a.avi", fps=1)]), [("a.avi", 1.0)], []),
    (chat("a <image> b <video> c", image="image.png", video=FRAMES), [FRAMED], ["image.png"]),
    (chat("b <video> c <image>", image="image.png", video=FRAMES), [FRAMED], ["image.png"]),
    (chat([part("video", FRAMES), part("image")], images=["image.png"]), [FRAMED], ["image.png"]),
    (chat(video=FRAMES, image="image.png"), [FRAMED], ["image.png"]),
    ({"prompt": "<video>?", "completion": "yes", "video": "b.avi"}, [("b.avi", 2.0)], []),
    (chat(), [], []),
]


def upstream(loaded, folder, text, videos, images):
    from mlx_vlm.utils import VideoSampling, prepare_inputs

    values, rates = [], []
    for value, fps in videos:
        rates.append(fps)
        if isinstance(value, list):
            values.append([np.asarray(Image.open(folder / name)) for name in value])
        else:
            values.append(str(folder / value))
    more = {"videos": values, "fps": rates} if videos else {}
    assert VideoSampling(fps=1).fps == 1
    opened = [Image.open(folder / name) for name in images]
    return prepare_inputs(loaded.processor, images=opened or None, prompts=[text], **more)


@pytest.mark.parametrize("case", range(len(ROWS)))
def test_tokens_and_patches_are_those_of_mlx_vlm(write, read, folder, loaded, case):
    row, videos, images = ROWS[case]
    write(row)
    (example,) = read().train
    # The processor replaces the one token that the template writes for a video by times and tokens.
    single = row.get("messages") or [{"role": "user", "content": row["prompt"]}, chat(answer="yes")["messages"][1]]
    text = loaded.tokenizer.apply_chat_template(spelled(single, row), tokenize=False)
    expected = upstream(loaded, folder, text, videos, images)
    assert example.tokens.tolist() == np.asarray(expected["input_ids"])[0].tolist()
    assert not example.targets[np.isin(example.tokens, (IMAGE, VIDEO))].any()
    assert example.targets.any()
    grids = [expected.get(name) for name in ("image_grid_thw", "video_grid_thw")]
    positions, _ = loaded.model.language_model.get_rope_index(expected["input_ids"], *grids)
    positions = np.broadcast_to(np.array(positions), (3, 1, len(example.tokens)))
    np.testing.assert_array_equal(example.pictures.positions, positions[:, 0])
    (whole,) = read(mask_prompt=False).train
    assert (whole.targets[1:] == ~np.isin(whole.tokens[1:], (IMAGE, VIDEO))).all()
    batch = next(BatchOrder([example], 1, 2048))
    held = [example.pictures.reader.read(value, "a test")[0] for value in example.pictures.values]
    assert batch.images.patches.shape[0] >= sum(picture.grid[0] for picture in held)
    for kind, name in ((True, "pixel_values_videos"), (False, "pixel_values")):
        ours = [p.patches for p, v in zip(held, example.pictures.values, strict=True) if isinstance(v, Video) == kind]
        if ours:
            np.testing.assert_array_equal(np.concatenate(ours), np.asarray(expected[name]))


def spelled(messages, row):
    """Return the messages with a part at each place, as the template expects them."""
    content = messages[0]["content"]
    if isinstance(content, str):
        pieces = content.replace("<image>", "\0image\0").replace("<video>", "\0video\0").split("\0")
        content = [part(p) if p in ("image", "video") else {"type": "text", "text": p} for p in pieces if p]
        if len(content) == 1 and ("video" in row or "videos" in row):
            content = [*([part("image")] if "image" in row else []), part("video"), *content]
    return [{**messages[0], "content": content}, *messages[1:]]


@pytest.mark.parametrize("total", [1, 2, 3, 5, 24, 100, 2000])
@pytest.mark.parametrize(("fps", "least", "most"), [(2.0, 4, 768), (0.5, 4, 768), (8.0, 4, 16), (30.0, 5, 7)])
def test_frames_are_taken_as_mlx_vlm_takes_them(total, fps, least, most, monkeypatch):
    from mlx_vlm.utils import load_video

    cv2 = pytest.importorskip("cv2")

    class Capture:
        def __init__(self, _):
            self.values = {cv2.CAP_PROP_FRAME_COUNT: total, cv2.CAP_PROP_FPS: 12.5}
            self.values |= {cv2.CAP_PROP_FRAME_WIDTH: 4, cv2.CAP_PROP_FRAME_HEIGHT: 4}

        def get(self, name):
            return self.values[name]

        isOpened = set = release = lambda *_: True  # noqa: N815

        def read(self):
            return True, np.zeros((4, 4, 3), np.uint8)

    monkeypatch.setattr(cv2, "VideoCapture", Capture)
    count = frame_count(total, 12.5, fps, least, most)
    if count < 2:
        with pytest.raises(ValueError, match="nframes must be in"):
            load_video("x", fps=fps, min_frames=least, max_frames=most)
    else:
        assert count == len(load_video("x", fps=fps, min_frames=least, max_frames=most)[1].frames_indices)


@pytest.mark.parametrize(("count", "fps"), [(2, 2.0), (5, 0.5), (12, 24.0), (12, 10.0), (15, 30.0)])
def test_times_are_those_of_transformers(made, processors, count, fps):
    processing = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    frames = (FRAMES * 3)[:count]
    clip = VideoReader(processors.videos, made, {}, fps=fps).clip(Video(frames), "x")
    expected = processing.Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), fps, 2)
    assert clip.seconds == expected
    numbers = [round(second) for second in np.linspace(0, 23, 6)]
    clip = VideoReader(processors.videos, made, {}).clip(Video("a.avi"), "x")
    assert clip.seconds == processing.Qwen3VLProcessor._calculate_timestamps(None, numbers, 8.0, 2)


def test_times_of_ten_frames_a_second(made, processors):
    """Qwen3VLProcessor of transformers 5 writes these, rounded from the means of pairs; 0.65 is below itself."""
    clip = VideoReader(processors.videos, made, {}, fps=10.0).clip(Video((FRAMES * 3)[:12]), "x")
    text = video_text(clip.seconds, ("", "", ""))
    assert re.findall(r"<(\S+) seconds>", text) == ["0.1", "0.2", "0.5", "0.6", "0.9", "1.1"]


def test_options_choose_frames_and_sizes(write, read, loaded):
    write(chat(video="a.avi"))
    (free,) = read().train
    (dense,) = read(fps=4.0).train
    (few,) = read(fps=4.0, video_max_frames=4).train
    assert [e.pictures.grids[0][0] for e in (free, dense, few)] == [3, 6, 2]
    write(chat(video=FRAMES[:2]))
    limits = {}, {"max_pixels": 300}, {"min_pixels": 2000}
    sized = [read(**each).train[0] for each in limits]
    assert [e.pictures.grids[0][1:] for e in sized] == [(4, 4), (2, 2), (6, 6)]
    write(chat(video=FRAMES))
    (few,) = read(video_max_frames=2).train
    assert "<1.0 seconds>" in loaded.tokenizer.decode(few.tokens.tolist())
    with pytest.raises(UserError, match="fps: expected a number above 0, got -1"):
        read(fps=-1.0)
    with pytest.raises(UserError, match="video_max_frames: expected a whole number of 2 or more, got 1"):
        read(video_max_frames=1)


def test_frames_of_a_data_set_are_read_as_they_come(folder, processors):
    reader = VideoReader(processors.videos, folder, {})
    named = reader.clip(Video(FRAMES), "row 0")
    opened = Video([Image.open(folder / name) for name in FRAMES])
    stored = Video([{"bytes": (folder / name).read_bytes(), "path": None} for name in FRAMES])
    for video in (opened, stored):
        np.testing.assert_array_equal(reader.clip(video, "row 0").picture.patches, named.picture.patches)
        assert len(reader.digest(video, "row 0")) == 16


BAD = {
    "missing": (chat(video="none.mp4"), "video none.mp4: no such file"),
    "cut": (chat(video="cut.avi"), "video cut.avi: truncated or damaged: it ends after frame"),
    "not a video": (chat(video="text.mp4"), "video text.mp4: no video, truncated"),
    "an image": (chat(video="image.png"), "video image.png: 1 frame; a video needs 2 or more"),
    "one frame": (chat(video="one.avi"), "video one.avi: 1 frame; a video needs 2 or more"),
    "one picture": (chat(video=["f0.png"]), "1 frame; a video needs 2 or more"),
    "no frames": (chat(videos=[[]]), "a video with no frames"),
    "missing frame": (chat(video=["f0.png", "g.png"]), "frame 2 of a video: image g.png: no such file"),
    "sizes": (chat(video=["f0.png", "wide.png"]), "frames of 32x32 and 64x32 pixels; expected one size"),
    "small": (chat(video=["small.png"] * 2), "the model's video processor refuses it: height:8"),
    "url": (chat(video="https://example.com/a.mp4"), "expected a path; download it"),
    "number": (chat(videos=[7]), "expected the path of a video, or a list of frames, got int"),
    "fps": (chat(video="a.avi", fps=0), "'fps': expected a number of frames a second above 0, got 0"),
    "own token": (chat("<video> <|video_pad|>", video="a.avi"), "4 video tokens for 3 pairs of frames"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_one_message_with_file_and_line(refusal, case):
    row, message = BAD[case]
    assert message in refusal(chat(), row)


def test_the_decoder_says_nothing_of_its_own(made, capfd):
    reader = VideoReader(object(), made, {})
    for name in ("text.mp4", "cut.avi"):
        with pytest.raises(UserError, match=f"here: video {name}"):
            reader.clip(Video(name), "here")
    assert capfd.readouterr() == ("", "")


def test_without_a_decoder_files_are_refused_and_frames_are_not(write, read, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    write(chat(video=FRAMES))
    assert len(read().train) == 1
    write(chat(video="a.avi"))
    with pytest.raises(UserError, match=r"train.jsonl:1: video a.avi: .*pip install av; or give a list"):
        read()


@pytest.mark.parametrize(("kind", "token"), [("video", VIDEO), ("image", IMAGE)])
def test_no_video_and_no_image_is_cut_in_half(write, read, processors, kind, token):
    rows = {"video": chat("<video>" + "long " * 8, video=FRAMES), "image": chat("x <image> y", image="image.png")}
    write(rows.pop(kind), *rows.values(), chat())
    whole = read().train
    marks = np.flatnonzero(whole[0].tokens == token)
    inside = range(int(marks[0]) + 1, int(marks[-1]) + 2)
    around = {inside.start - 1, inside.start, inside.start + 1, inside.stop - 1, inside.stop, inside.stop + 1}
    for limit in sorted({4, (inside.start + inside.stop) // 2, *around}):
        splits = read(max_seq_length=limit, mask_prompt=False)
        assert (whole[0].source in {example.source for example in splits.train}) == (limit not in inside)
        for example in splits.train:
            count = int(np.isin(example.tokens, (IMAGE, VIDEO)).sum())
            assert count == sum(processors.spec.tokens(grid) for grid in example.pictures.grids)
            next(BatchOrder([example], 1, 2048))
        notes = [note for note in splits.notes if f"{kind} in half" in note]
        assert len(notes) == (limit in inside)
        assert all(("--video-max-frames" in note) == (kind == "video") for note in notes)


def test_the_first_video_is_found(write, folder):
    write(chat('say "video"'), chat(video="a.avi"))
    assert first_image(TrainConfig(data=str(folder))) == f"{folder / 'train.jsonl'}:2, in a video"
    write(chat(), chat([part("video", FRAMES)]))
    assert first_image(TrainConfig(data=str(folder))) == f"{folder / 'train.jsonl'}:2, in a video"


@pytest.mark.parametrize("name", ["a.avi", "f3.png"])
def test_another_video_of_the_same_size_is_other_data(write, read, folder, name):
    write(chat(video=FRAMES if name in FRAMES else name))
    order = BatchOrder(read().train, 1, 2048)
    state = order.state()
    content = bytearray((folder / name).read_bytes())
    (folder / name).unlink()
    if name in FRAMES:
        Image.new("RGB", (32, 32)).save(folder / name)
    else:
        (folder / name).write_bytes(content + b" ")
    with pytest.raises(UserError, match="the training data are not those"):
        BatchOrder(read().train, 1, 2048).restore(state)


# B-frames and one group of pictures: the order of decoding is not that of showing, and nothing can be sought.
REORDERED = {"bf": "3", "g": "250", "crf": "10"}
# 200 frames in four seconds, then 20 frames of a second each.
VARIABLE = [20 * number for number in range(200)] + [4000 + 1000 * number for number in range(20)]
CODECS = {
    "a.mp4": ("libx264", REORDERED),
    "a.ts": ("libx264", REORDERED),
    "a.mkv": ("libx264", REORDERED),
    "a.avi": ("libx264", REORDERED),
    "a.webm": ("libvpx-vp9", {}),
    "av1.mp4": ("libsvtav1", {"svtav1-params": "lp=1"}),
    "a.mov": ("mpeg4", {}),
}


def frames_of(path, count):
    return read_frames(path, f"row 1: video {path.name}", lambda total, rate: count)


@pytest.mark.parametrize("name", CODECS)
def test_frames_of_a_constant_rate_are_taken_by_number(tmp_path, name):
    codec, options = CODECS[name]
    write_video(tmp_path / name, numbered(60), codec=codec, **options)
    seen = []
    frames = read_frames(tmp_path / name, "x", lambda total, rate: seen.append((total, rate)) or 12)
    assert seen == [(60, 10.0)]
    numbers = np.linspace(0, 59, 12).round().astype(int).tolist()
    assert [number_of(frame) for frame in frames.pixels] == numbers
    assert frames.times == [number / 10 for number in numbers]


@pytest.mark.parametrize("name", ["a.mp4", "a.ts", "a.mkv", "a.webm"])
def test_a_variable_rate_is_sampled_by_time(tmp_path, name):
    codec, options = CODECS[name]
    write_video(tmp_path / name, numbered(220), codec=codec, stamps=VARIABLE, **options)
    frames = frames_of(tmp_path / name, 24)
    assert frames.times == pytest.approx([float(second) for second in range(24)])
    # The frame that a player shows at a time is the last one stamped up to it.
    shown = [np.searchsorted(VARIABLE, 1000 * second, side="right") - 1 for second in range(24)]
    assert [number_of(frame) for frame in frames.pixels] == shown


def test_a_stream_of_no_time_stamps_is_read_in_order(tmp_path):
    write_video(tmp_path / "a.h264", numbered(25), rate=25, **REORDERED)
    frames = frames_of(tmp_path / "a.h264", 7)
    assert [number_of(frame) for frame in frames.pixels] == list(range(0, 25, 4))
    assert frames.times == pytest.approx([number / 25 for number in range(0, 25, 4)])


def test_a_stream_that_was_cut_out_of_a_broadcast_begins_at_its_first_key_frame(tmp_path):
    write_video(tmp_path / "whole.ts", numbered(60), bf="0", g="16", crf="10")
    content = (tmp_path / "whole.ts").read_bytes()
    with av.open(str(tmp_path / "whole.ts")) as container:
        packets = [(packet.pos, packet.is_keyframe) for packet in container.demux(video=0) if packet.size]
    (tmp_path / "cut.ts").write_bytes(content[: 188 * 3] + content[packets[5][0] // 188 * 188 :])
    key = next(number for number, (_, begins) in enumerate(packets) if begins and number > 5)
    frames = frames_of(tmp_path / "cut.ts", 2)
    assert [number_of(frame) for frame in frames.pixels] == [key, 59]
    assert frames.times == pytest.approx([0, (59 - key) / 10])


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_a_video_is_turned_as_its_file_says(tmp_path, turn):
    pixels = numbered(5)[4:] * 4
    write_video(tmp_path / "a.mp4", pixels, crf="10")
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    cosine, sine = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[turn]
    # The matrix of the track's header: 16.16 fixed-point numbers (ISO 14496-12, section 8.3).
    matrix = np.array([cosine, sine, 0, -sine, cosine, 0], ">i4") * 65536
    start = content.index(b"tkhd") + 4 + 40
    content[start : start + 24] = matrix.astype(">i4").tobytes()
    (tmp_path / "turned.mp4").write_bytes(content)
    (still, turned) = (frames_of(tmp_path / name, 1).pixels[0] for name in ("a.mp4", "turned.mp4"))
    upright = Image.fromarray(still).rotate(-turn, expand=True)
    np.testing.assert_array_equal(turned, np.asarray(upright))


CUTS = {"a.mp4": 0.7, "a.mkv": 0.7, "a.webm": 0.7, "mjpeg.avi": 0.5}


@pytest.mark.bad_input("a video file that was cut off")
@pytest.mark.parametrize("name", CUTS)
def test_a_truncated_file_is_refused(tmp_path, name):
    codec, options = CODECS.get(name, ("mjpeg", {}))
    draw = np.random.default_rng(0)
    noise = list(draw.integers(0, 255, (60, 48, 64, 3), dtype=np.uint8))
    write_video(tmp_path / name, noise, codec=codec, **options)
    content = (tmp_path / name).read_bytes()
    if name == "a.mp4":
        # The index stands at the file's end otherwise, and nothing could be read.
        with (
            av.open(str(tmp_path / name)) as whole,
            av.open(str(tmp_path / "index_first.mp4"), "w", options={"movflags": "faststart"}) as container,
        ):
            stream = container.add_stream_from_template(whole.streams.video[0])
            for packet in whole.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    container.mux(packet)
        content = (tmp_path / "index_first.mp4").read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * CUTS[name])])
    with pytest.raises(UserError, match=f"row 1: video {name}: truncated or damaged: it ends after frame"):
        frames_of(tmp_path / name, 4)


@pytest.mark.bad_input("a video file with a hole")
def test_a_damaged_file_is_refused(tmp_path):
    draw = np.random.default_rng(0)
    write_video(tmp_path / "a.mp4", list(draw.integers(0, 255, (20, 48, 64, 3), dtype=np.uint8)))
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    content[len(content) // 2 : len(content) // 2 + 3000] = bytes(3000)
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(UserError, match=r"row 1: video a\.mp4: no video, truncated or damaged"):
        frames_of(tmp_path / "a.mp4", 4)


@pytest.mark.bad_input("a sound file as a video, and a video whose codec has no decoder")
def test_undecodable_video_is_refused_with_a_remedy(tmp_path):
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 8000, 0, Fraction(1, 8000)
        container.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(UserError, match=r"row 1: video sound\.wav: no video in the file"):
        frames_of(tmp_path / "sound.wav", 2)
    write_video(tmp_path / "a.mkv", numbered(4))
    content = (tmp_path / "a.mkv").read_bytes()
    (tmp_path / "a.mkv").write_bytes(content.replace(b"V_MPEG4/ISO/AVC", b"V_MPEG9/ISO/XXX"))
    with pytest.raises(UserError, match=r"row 1: video a\.mkv: PyAV has no decoder .*-c:v libx264"):
        frames_of(tmp_path / "a.mkv", 2)
