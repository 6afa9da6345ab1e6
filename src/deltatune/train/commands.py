"""What the command line's train, eval, generate and merge do, as functions of their options."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..compiling import without_kernels
from ..config import TrainConfig
from ..data import BatchOrder, Splits
from ..data.load import first_image, load_datasets
from ..data.reader import Eyes
from ..data.show import show_batch
from ..data.videos import Clip, Video, VideoReader, video_texts, with_features
from ..errors import UserError
from ..lora import convert_to_lora, load_adapter_weights, load_adapters
from ..lora.select import layer_paths
from ..lora.whole_layers import adapts_experts, whole_layers
from ..models.generate import Sampling, prompt_tokens, stream
from ..models.load import Loaded, load, locate
from ..models.packing import check_packing
from ..models.vision import has_vision, vision_spec
from ..models.vision_generate import stream_with_images, stream_with_videos
from ..patches import patched
from . import announce
from .distributed import World
from .evaluate import Evaluation
from .log import Screen
from .loop import Result, Trainer

# Looks at a converted model before its first step: says something about the run, or raises UserError.
Check = Callable[[nn.Module, TrainConfig, Splits], str]


def train(config: TrainConfig, *, show: bool = False, check: Check | None = None) -> Result | None:
    """A whole run: load, convert, train, save; then the test where asked for. `show` prints the first batch instead."""
    world = World()
    screen = Screen(shown=world.main)
    if config.from_scratch:
        config = dataclasses.replace(config, fine_tune_type="full", num_layers=-1)
    screen.say(f"Loading {config.model}")
    # Before the data are looked at for images: a model that is not there is said at once.
    path = locate(config.model)
    image = first_image(config)
    loaded = load(
        path,
        trust_remote_code=config.trust_remote_code,
        from_scratch=config.from_scratch,
        seed=config.seed,
        image=image,
    )
    splits = load_datasets(config, loaded.tokenizer, eyes(loaded))
    if show:
        order = BatchOrder(splits.train, config.batch_size, config.max_seq_length, seed=config.seed, packed=config.pack)
        if world.main:
            show_batch(next(order), loaded.tokenizer)
        return None
    for line in prepare(loaded.model, config):
        screen.say(line)
    trainer = Trainer(
        loaded.model, loaded.tokenizer, config, splits, model_config=loaded.config, world=world, screen=screen
    )
    if check is not None:
        screen.say(check(loaded.model, config, splits))
    result = trainer.run()
    if config.test:
        _say_loss("Test", loaded.model, config, splits.test, config.test_batches, world, screen)
    screen.say(f"Saved in {config.adapter_path}; report: {trainer.outputs.report}")
    return result


def eyes(loaded: Loaded) -> Eyes | None:
    """What reading images takes, of a model that was loaded to look at some."""
    if loaded.processor is None:
        return None
    videos = getattr(loaded.processor, "video_processor", None)
    return Eyes(loaded.processor.image_processor, vision_spec(loaded.model), videos)


def prepare(model: nn.Module, config: TrainConfig) -> list[str]:
    """Make the part of `model` trainable that `config` asks for, in place; returns what a person should know of it.

    The random state is set from `config.seed` first, so that adapters start the same on every rank.
    """
    mx.random.seed(config.seed)
    layers = config.num_layers
    if layers == TrainConfig.num_layers and len(layer_paths(model)) < layers:
        layers = -1
    report = convert_to_lora(
        model,
        config.lora_parameters,
        fine_tune_type=config.fine_tune_type,
        num_layers=layers,
        parts=[part.strip() for part in config.parts.split(",") if part.strip()],
    )
    if config.from_scratch:
        _unfreeze_beside_layers(model)
    if config.resume_adapter_file is not None:
        load_adapter_weights(model, config.resume_adapter_file)
    said = report.summary()
    if has_vision(model) and adapts_experts(model) and whole_layers(model) is None:
        said.append(
            "mlx-vlm 0.7.10 loads adapters on experts only where all of the last layers' modules have one, and nothing "
            "else: it will not load this adapter. deltatune does; merge it for mlx-vlm."
        )
    return said


def _unfreeze_beside_layers(model: nn.Module) -> None:
    """Embeddings, norms and heads: what full fine-tuning leaves as the checkpoint has it, and scratch cannot."""
    inside = tuple(layer_paths(model))
    for path, module in model.named_modules():
        if path not in inside and not path.startswith(tuple(f"{layer}." for layer in inside)):
            module.unfreeze(recurse=False)


def evaluate(config: TrainConfig, adapter_path: str | None) -> float:
    """Print and return the loss per token on the test set, of the model with the adapter or without one."""
    world = World()
    screen = Screen(shown=world.main)
    config = dataclasses.replace(config, train=False, test=True)
    path = locate(config.model)
    loaded = _load_with_adapter(path, adapter_path, config.trust_remote_code, first_image(config))
    splits = load_datasets(config, loaded.tokenizer, eyes(loaded))
    for line in [splits.rule, *splits.notes]:
        screen.say(line)
    return _say_loss("Test", loaded.model, config, splits.test, config.test_batches, world, screen)


def _say_loss(
    name: str,
    model: nn.Module,
    config: TrainConfig,
    examples: Any,
    batches: int,
    world: World,
    screen: Screen,
) -> float:
    order = BatchOrder(
        examples,
        config.batch_size,
        config.max_seq_length,
        packed=config.pack,
        rank=world.rank,
        world=world.size,
    )
    with without_kernels(), patched(model):
        if config.pack:
            check_packing(model)
        loss = Evaluation(model, announce.choose_loss(model)[0], world)(order, batches)
    assert loss is not None
    perplexity = math.exp(loss) if loss < 700 else math.inf
    screen.say(f"{name} loss {loss:.4f}, {name.lower()} perplexity {perplexity:.4g}.")
    return loss


def _load_with_adapter(
    model: str | Path, adapter_path: str | None, trust_remote_code: bool, image: str | None = None
) -> Loaded:
    loaded = load(model, trust_remote_code=trust_remote_code, image=image)
    if adapter_path:
        load_adapters(loaded.model, adapter_path)
        loaded.model.eval()
    return loaded


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The options of `generate`, by mlx_lm.generate's names."""

    model: str
    prompt: str
    adapter_path: str | None = None
    system_prompt: str | None = None
    prefill_response: str | None = None
    max_tokens: int = 100
    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    ignore_chat_template: bool = False
    chat_template_config: str | None = None
    extra_eos_token: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    video: tuple[str, ...] = ()
    fps: float | None = None
    video_max_frames: int | None = None
    verbose: bool = True
    trust_remote_code: bool = False


def generate(options: GenerateOptions) -> str:
    """Print, as it comes, what the model answers; returns it."""
    if options.seed is not None:
        mx.random.seed(options.seed)
    template_options = _template_options(options.chat_template_config)
    shown = _shown(options)
    loaded = _load_with_adapter(options.model, options.adapter_path, options.trust_remote_code, shown)
    for token in options.extra_eos_token:
        loaded.tokenizer.add_eos_token(token)
    clips = _clips(options, loaded) if options.video else []
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    tokens = prompt_tokens(
        loaded.tokenizer,
        prompt.replace("\\n", "\n").replace("\\t", "\t"),
        system_prompt=options.system_prompt,
        prefill_response=options.prefill_response,
        chat_template=not options.ignore_chat_template,
        template_options=template_options,
        images=len(options.image),
        videos=video_texts(loaded.tokenizer, clips, vision_spec(loaded.model)) if clips else (),
    )
    if not tokens:
        raise UserError("--prompt: nothing is left of it after the chat template; give a text.")
    sampling = Sampling(options.temp, options.top_p, options.min_p, options.top_k)
    if options.image:
        answer = stream_with_images(loaded, tokens, options.image, options.max_tokens, sampling)
    elif clips:
        tokens = with_features(tokens, clips, vision_spec(loaded.model))
        pictures = [clip.picture for clip in clips]
        answer = stream_with_videos(loaded, tokens, pictures, options.max_tokens, sampling)
    else:
        answer = stream(loaded, tokens, options.max_tokens, sampling)
    parts, last = [], None
    for last in answer:
        print(last.text, end="", flush=True)
        parts.append(last.text)
    print()
    if options.verbose and last is not None:
        print(
            f"[{last.prompt_tokens} prompt tokens at {last.prompt_tps:.1f}/s; {last.generation_tokens} generated at "
            f"{last.generation_tps:.1f}/s; peak memory {last.peak_memory:.2f} GB]"
        )
    return "".join(parts)


def _shown(options: GenerateOptions) -> str | None:
    """The first image or video, as messages name it."""
    for flag, names in (("--image", options.image), ("--video", options.video)):
        for name in names:
            if not Path(name).is_file():
                raise UserError(f"{flag} {name}: no such file.")
    if options.image and options.video:
        raise UserError("--image and --video: give one of them.")
    if options.video:
        return f"--video {options.video[0]}"
    return f"--image {options.image[0]}" if options.image else None


def _clips(options: GenerateOptions, loaded: Loaded) -> list[Clip]:
    """The videos in patches. Several images are the frames of one."""
    names = options.video
    framed = [(guess_type(name)[0] or "").startswith("image/") for name in names]
    if any(framed) and not all(framed):
        raise UserError("--video: images beside videos; give video files, or the images that are the frames of one.")
    processor = getattr(loaded.processor, "video_processor", None)
    reader = VideoReader(processor, Path(), {}, options.fps, options.video_max_frames)
    return [reader.clip(Video(value), "--video") for value in ([list(names)] if all(framed) else names)]


def _template_options(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--chat-template-config: not JSON ({error}).") from error
    if not isinstance(options, dict):
        raise UserError(f"--chat-template-config: expected a JSON object, got {text!r}.")
    return options
