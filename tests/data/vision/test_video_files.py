"""Frames of video files are taken by their time stamps, whatever the container, the codec and the rate."""

import json
import re
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from console import called
from deltatune.data.vision.videos import read_frames
from deltatune.errors import UserError
from films import number_of, numbered, write_video

av = pytest.importorskip("av")

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


def read(path, count):
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
    frames = read(tmp_path / name, 24)
    assert frames.times == pytest.approx([float(second) for second in range(24)])
    # The frame that a player shows at a time is the last one stamped up to it.
    shown = [np.searchsorted(VARIABLE, 1000 * second, side="right") - 1 for second in range(24)]
    assert [number_of(frame) for frame in frames.pixels] == shown


def test_a_stream_of_no_time_stamps_is_read_in_order(tmp_path):
    write_video(tmp_path / "a.h264", numbered(25), rate=25, **REORDERED)
    frames = read(tmp_path / "a.h264", 7)
    assert [number_of(frame) for frame in frames.pixels] == list(range(0, 25, 4))
    assert frames.times == pytest.approx([number / 25 for number in range(0, 25, 4)])


def test_a_stream_that_was_cut_out_of_a_broadcast_begins_at_its_first_key_frame(tmp_path):
    write_video(tmp_path / "whole.ts", numbered(60), bf="0", g="16", crf="10")
    content = (tmp_path / "whole.ts").read_bytes()
    with av.open(str(tmp_path / "whole.ts")) as container:
        packets = [(packet.pos, packet.is_keyframe) for packet in container.demux(video=0) if packet.size]
    (tmp_path / "cut.ts").write_bytes(content[: 188 * 3] + content[packets[5][0] // 188 * 188 :])
    key = next(number for number, (_, begins) in enumerate(packets) if begins and number > 5)
    frames = read(tmp_path / "cut.ts", 2)
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
    (still, turned) = (read(tmp_path / name, 1).pixels[0] for name in ("a.mp4", "turned.mp4"))
    upright = Image.fromarray(still).rotate(-turn, expand=True)
    np.testing.assert_array_equal(turned, np.asarray(upright))


def test_the_container_does_not_change_the_loss(tiny_vision_checkpoint, tmp_path):
    frames = [frame[:32] for frame in numbered(60)]
    losses = []
    for name in ("a.mp4", "a.ts"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        write_video(folder / name, frames, **REORDERED)
        messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "bars"}]
        (folder / "test.jsonl").write_text(json.dumps({"video": name, "messages": messages}) + "\n")
        model = tiny_vision_checkpoint("qwen3_5")
        done = called("eval", "--model", model, "--data", folder, "--fps", "1")
        assert done.returncode == 0, done.stderr
        losses.append(re.search(r"loss (\S+),", done.stdout).group(1))
    assert losses[0] == losses[1]


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
        read(tmp_path / name, 4)


@pytest.mark.bad_input("a video file with a hole")
def test_a_damaged_file_is_refused(tmp_path):
    draw = np.random.default_rng(0)
    write_video(tmp_path / "a.mp4", list(draw.integers(0, 255, (20, 48, 64, 3), dtype=np.uint8)))
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    content[len(content) // 2 : len(content) // 2 + 3000] = bytes(3000)
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(UserError, match=r"row 1: video a\.mp4: no video, truncated or damaged"):
        read(tmp_path / "a.mp4", 4)


@pytest.mark.bad_input("a sound file as a video, and a video whose codec has no decoder")
def test_undecodable_video_is_refused_with_a_remedy(tmp_path):
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 8000, 0, Fraction(1, 8000)
        container.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(UserError, match=r"row 1: video sound\.wav: no video in the file"):
        read(tmp_path / "sound.wav", 2)
    write_video(tmp_path / "a.mkv", numbered(4))
    content = (tmp_path / "a.mkv").read_bytes()
    (tmp_path / "a.mkv").write_bytes(content.replace(b"V_MPEG4/ISO/AVC", b"V_MPEG9/ISO/XXX"))
    with pytest.raises(UserError, match=r"row 1: video a\.mkv: PyAV has no decoder .*-c:v libx264"):
        read(tmp_path / "a.mkv", 2)
