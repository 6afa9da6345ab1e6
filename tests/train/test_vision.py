"""Training on images and videos: every part learns, answers, merges and resumes; QLoRA on towers of 4 and 8 bits."""

import json
import re
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from PIL import Image

from deltatune import cli
from deltatune.data import BatchOrder
from deltatune.data.datasets import load_datasets
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora
from deltatune.models.checkpoint_writer import merge_checkpoint
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.train import setup
from deltatune.train.batch_loss import arrays, loss_of
from vision_runs import options

pytest.importorskip("mlx_vlm")


def train(model, folder, target, **more):
    return cli.main(["train", *options(model, folder, target, **more)])


def logits(model, example):
    """Return the logits that mlx-vlm's model computes for one example."""
    model.eval()
    model.language_model._position_ids = model.language_model._rope_deltas = None
    held = example.pictures
    more = {}
    if held.values:
        patches = [held.reader.read(value, "a test")[0].patches for value in held.values]
        more = {"pixel_values": mx.array(np.concatenate(patches)), "image_grid_thw": mx.array(held.grids)}
    return model(mx.array(example.tokens[None]), **more).logits


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_vl_moe", marks=pytest.mark.weekly)])
def test_a_run_learns_and_mlx_vlm_loads_the_adapter(tiny_vision_checkpoint, pictures, tmp_path, family):
    from mlx_vlm import load as upstream_load

    path = tiny_vision_checkpoint(family)
    # mlx-vlm refuses adapters on experts that are given by name, so a mixture of experts is adapted by whole layers.
    parts = "language" if "moe" in family else "language,vision,projector"
    assert train(path, pictures, tmp_path / "a", parts=parts) == 0
    losses = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["val_loss"] for line in losses if "val_loss" in line]
    assert measured[-1] < 0.9 * measured[0]

    loaded = setup.load(path, str(tmp_path / "a"), image="a test")
    config = TrainConfig(data=str(pictures), batch_size=4)
    examples = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train
    plain = load(path, image="a test")
    theirs, _ = upstream_load(str(path), adapter_path=str(tmp_path / "a"))
    for example in examples[:3]:
        ours = logits(loaded.model, example)
        assert mx.allclose(ours, logits(theirs, example), atol=1e-4)
        assert mx.abs(ours - logits(plain.model, example)).max() > 1e-2

    # A prompt without images is answered without the tower, and without what the adapter changes there.
    text = setup.load(path, str(tmp_path / "a"))
    example = next(example for example in examples if not example.pictures.values)
    assert mx.allclose(text.model(mx.array(example.tokens[None])), logits(loaded.model, example), atol=1e-4)

    assert cli.main(["merge", "--model", str(path), "--adapter-path", str(tmp_path / "a"), "--save-path",
                     str(tmp_path / "merged")]) == 0  # fmt: skip
    merged = load(tmp_path / "merged", image="a test")
    for example in examples[:3]:
        # A token for which two experts tie may be routed to the other one after the merge.
        difference = mx.abs(logits(merged.model, example) - logits(loaded.model, example))
        assert np.median(np.array(difference)) < 1e-4


@pytest.mark.parametrize(("part", "inside"), [
    ("language", "language_model.model.layers"),
    ("vision", "vision_tower.blocks"),
    ("projector", "vision_tower.merger|vision_tower.deepstack_merger_list"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_parts_train_by_themselves(tiny_vision_model, part, inside, kind):
    model = tiny_vision_model("qwen3_vl")
    convert_to_lora(model, LoraConfig(rank=2), fine_tune_type=kind, parts=[part])
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    if kind == "full" and part == "vision":
        inside = "vision_tower"
    assert names
    assert all(name.startswith(tuple(inside.split("|"))) for name in names)
    assert not any("merger" in name for name in names if part != "projector")


def test_an_adapter_that_mlx_vlm_refuses_is_announced_and_merges(tiny_vision_checkpoint, pictures, tmp_path, capsys):
    path = tiny_vision_checkpoint("qwen3_vl_moe")
    assert train(path, pictures, tmp_path / "a", parts="language,vision", iters=2) == 0
    assert "it cannot load this adapter" in capsys.readouterr().out
    loaded = setup.load(path, str(tmp_path / "a"), image="a test")
    merge_checkpoint(path, tmp_path / "a", tmp_path / "merged")
    config = TrainConfig(data=str(pictures), batch_size=4)
    example = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train[2]
    merged = load(tmp_path / "merged", image="a test")
    assert np.median(np.array(mx.abs(logits(merged.model, example) - logits(loaded.model, example)))) < 1e-4


def test_parts_that_are_not_there_are_named(tiny_vision_model, tiny_model):
    with pytest.raises(UserError, match="'towers' is not known"):
        convert_to_lora(tiny_vision_model("qwen3_vl"), LoraConfig(rank=2), parts=["towers"])
    with pytest.raises(UserError, match="loaded without a vision tower"):
        convert_to_lora(tiny_model("qwen3"), LoraConfig(rank=2), parts=["vision"])


def test_keys_reach_the_tower_too(tiny_vision_model):
    model = tiny_vision_model("qwen3_5")
    found = convert_to_lora(model, LoraConfig(rank=2, keys=["vision_tower.blocks.*.attn.qkv", "self_attn.q_proj"]))
    assert [path.split(".")[0] for path in found.converted].count("vision_tower") == 3
    assert len(found.converted) == 4


@pytest.mark.parametrize(
    ("data", "family"),
    [
        ("pictures", "qwen3_vl_moe"),
        ("videos", "qwen3_vl"),
        *(pytest.param(data, "qwen3_5", marks=pytest.mark.weekly) for data in ("pictures", "videos")),
    ],
)
def test_a_batch_weighs_as_its_rows_do(tiny_vision_checkpoint, request, data, family):
    """The loss of a batch of four rows, with differing numbers of pictures, is that of the four alone."""
    loaded = load(tiny_vision_checkpoint(family), image="a test")
    config = TrainConfig(data=str(request.getfixturevalue(data)), batch_size=4)
    examples = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train[:4]
    with patched(loaded.model):
        loss, _ = setup.choose_loss(loaded.model)
        together = loss_of(loss, arrays(next(BatchOrder(examples, 4, 2048))))
        alone = [loss_of(loss, arrays(next(BatchOrder([example], 1, 2048)))) for example in examples]
    assert together[1].item() == sum(weight.item() for _, weight in alone)
    assert together[0].item() == pytest.approx(sum(total.item() for total, _ in alone), rel=1e-4)


# Frames are read as pictures are.
VIDEOS = {"parts": "vision,projector", "iters": 4, "video-max-frames": 4}


@pytest.mark.parametrize(
    ("data", "part", "more"),
    [
        ("pictures", 2, {"parts": "vision", "iters": 3}),
        pytest.param("pictures", 3, {"parts": "language"}, marks=pytest.mark.weekly),
        pytest.param("videos", 2, VIDEOS, marks=pytest.mark.weekly),
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(tiny_vision_checkpoint, request, tmp_path, data, part, more):
    """A run that stops after `part` iterations and is resumed ends with the bits of one that never stops."""
    model, folder = tiny_vision_checkpoint("qwen3_vl"), request.getfixturevalue(data)
    assert train(model, folder, tmp_path / "straight", **more) == 0
    assert train(model, folder, tmp_path / "again", **more | {"iters": part}) == 0
    assert cli.main(["train", *options(model, folder, tmp_path / "again", **more), "--resume"]) == 0
    straight, again = (mx.load(str(tmp_path / name / "adapters.safetensors")) for name in ("straight", "again"))
    assert straight.keys() == again.keys()
    assert all(mx.array_equal(value, again[name]) for name, value in straight.items())


def test_eval_and_generate_look_at_images(tiny_vision_checkpoint, pictures, capsys):
    path = str(tiny_vision_checkpoint("qwen3_vl"))
    assert cli.main(["eval", "--model", path, "--data", str(pictures), "--batch-size", "2"]) == 0
    image = str(pictures / "1_0.png")
    assert cli.main(["generate", "--model", path, "--image", image, "--prompt", "which?", "--max-tokens", "3"]) == 0
    assert "prompt tokens" in capsys.readouterr().out
    assert cli.main(["generate", "--model", path, "--image", "none.png", "--prompt", "which?"]) == 2
    assert "--image none.png: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(("data", "place"), [("pictures", ""), ("videos", ", in a video")])
def test_a_text_model_given_them_is_one_message(tiny_checkpoint, request, tmp_path, capsys, data, place):
    assert train(tiny_checkpoint("qwen3"), request.getfixturevalue(data), tmp_path / "a") == 2
    error = capsys.readouterr().err
    assert re.search(rf"train\.jsonl:2(?:{place})?: has an image", error)
    assert "Traceback" not in error


def test_show_batch_prints_rows_with_images(tiny_vision_checkpoint, pictures, tmp_path, capsys):
    path = tiny_vision_checkpoint("qwen3_vl")
    assert cli.main(["train", *options(path, pictures, tmp_path / "a"), "--show-batch"]) == 0
    assert "<|image_pad|>" in capsys.readouterr().out


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Rows with no, one or two videos of frames that grow lighter or darker, some with an image."""
    path = tmp_path_factory.mktemp("videos")
    rows = []
    for index in range(12):
        videos, answers = [], []
        for place in range(index % 3):
            rising = (index + place) % 2 == 0
            count = 4 + 2 * (index % 2)
            shades = np.linspace(20, 230, count).astype(int)[:: 1 if rising else -1]
            frames = [f"{index}_{place}_{number}.png" for number in range(count)]
            for name, shade in zip(frames, shades, strict=True):
                Image.new("RGB", (32, 32), (int(shade),) * 3).save(path / name)
            videos.append(frames)
            answers.append("lighter" if rising else "darker")
        user = "<video>" * len(videos) + "which?"
        answer = " ".join(answers) or "none"
        row = {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}
        rows.append(row | {"videos": videos, "fps": 1})
        if videos and index % 2:
            rows[-1]["images"] = [videos[0][0]]
            rows[-1]["messages"][0]["content"] = "<image>" + user
    for split, count in (("train", 12), ("valid", 4)):
        (path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows[:count])))
    return path


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_vl", marks=pytest.mark.weekly)])
def test_a_run_learns_and_answers(tiny_vision_checkpoint, videos, tmp_path, family, capsys):
    path = tiny_vision_checkpoint(family)
    assert cli.main(["train", *options(path, videos, tmp_path / "a")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["val_loss"] for line in lines if "val_loss" in line]
    assert measured[-1] < 0.9 * measured[0]
    capsys.readouterr()
    (videos / "test.jsonl").write_text((videos / "valid.jsonl").read_text())
    assert cli.main(["eval", "--model", str(path), "--data", str(videos), "--video-max-frames", "4"]) == 0
    capsys.readouterr()
    asked = ["generate", "--model", str(path), "--adapter-path", str(tmp_path / "a"), "--prompt", "which?"]
    frames = [str(videos / f"1_0_{number}.png") for number in range(6)]
    assert cli.main([*asked, "--max-tokens", "4", "--fps", "1", "--video", *frames]) == 0
    said = capsys.readouterr().out

    # The same prompt is given to the forward pass of training, whose most likely token must begin the answer.
    loaded = setup.load(path, str(tmp_path / "a"), image="a test")
    row = {"messages": [{"role": "user", "content": "which?"}, {"role": "assistant", "content": "x"}]}
    row |= {"video": frames, "fps": 1}
    target = tmp_path / "data"
    target.mkdir()
    (target / "train.jsonl").write_text(json.dumps(row))
    config = TrainConfig(data=str(target), batch_size=1)
    (example,) = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train
    first = int(np.argmax(example.targets))
    tokens = mx.array(example.tokens[None, :first])
    assert f"[{first} prompt tokens" in said
    picture = example.pictures.reader.read(example.pictures.values[0], "a test")[0]
    more = {"pixel_values_videos": mx.array(picture.patches), "video_grid_thw": mx.array([picture.grid])}
    loaded.model.eval()
    with patched():
        best = mx.argmax(loaded.model(tokens, **more).logits[0, -1]).item()
    # An answer that ends at once is empty.
    assert said.startswith("\n[" if best in loaded.tokenizer.eos_token_ids else loaded.tokenizer.decode([best]))


def test_generate_names_what_it_cannot_watch(tiny_vision_checkpoint, videos, capsys):
    asked = ["generate", "--model", str(tiny_vision_checkpoint("qwen3_vl")), "--prompt", "which?"]
    frame = str(videos / "1_0_0.png")
    (videos / "text.mp4").write_text("no video")
    for given, message in (
        (["--video", "none.mp4"], "--video none.mp4: no such file"),
        (["--video", frame, "--image", frame], "--image and --video: give one of them"),
        (["--video", frame, str(videos / "text.mp4")], "--video: got images together with videos"),
        (["--video", str(videos / "text.mp4")], "no video, truncated"),
        (["--video", frame], "1 frame; a video needs 2 or more"),
        (["--video", frame, frame, "--fps", "0"], "fps: expected a number above 0"),
    ):
        assert cli.main([*asked, *given]) == 2
        assert message in capsys.readouterr().err


def quantized(source, target, bits):
    """Quantize `source` with mlx-vlm's converter, which leaves the vision tower as it is."""
    from mlx_vlm.convert import convert

    convert(str(source), str(target), quantize=True, q_group_size=32, q_bits=bits)
    shutil.copy(source / "preprocessor_config.json", target)
    return target


@pytest.mark.parametrize(
    ("family", "bits"),
    [("qwen3_5_moe", 4)] + [pytest.param(each, 8, marks=pytest.mark.weekly) for each in ("qwen3_vl_moe", "qwen3_5")],
)
def test_a_quantized_language_tower_trains_on_images(family, bits, tiny_vision_checkpoint, pictures, tmp_path):
    sizes = {"moe_intermediate_size": 64} if "moe" in family else {}
    path = quantized(tiny_vision_checkpoint(family, **sizes), tmp_path / "base", bits)
    stored = {type(module).__name__ for _, module in load(path, image="a test").model.named_modules()}
    assert "QuantizedLinear" in stored
    assert ("QuantizedSwitchLinear" in stored) == ("moe" in family)
    assert train(path, pictures, tmp_path / "a", **{"iters": 12, "steps-per-report": 1}) == 0
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train_loss"] for line in lines if "train_loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    trained = mx.load(str(tmp_path / "a" / "adapters.safetensors"))
    moved = {name: mx.abs(value).max().item() for name, value in trained.items() if name.endswith("lora_b")}
    assert all(moved.values()), moved
    assert any("switch_mlp" in name for name in moved) == ("moe" in family)
