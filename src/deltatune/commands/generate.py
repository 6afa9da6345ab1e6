"""`deltatune generate` lets a model, with or without an adapter, answer a prompt."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..machine import startup
from ..options.generation import GenerateOptions
from .flags import add_adapter, add_fields, add_model, given_flags

if TYPE_CHECKING:
    from ..answering.session import Session
    from ..data.vision.media import PromptPictures


HELP = "let a model, with or without an adapter, answer a prompt"


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "folder of the model")
    add_adapter(parser)
    add_fields(parser, GenerateOptions)
    about = GenerateOptions.__dataclass_fields__["verbose"].metadata["help"]
    parser.add_argument("--verbose", type=_true_or_false, metavar="BOOL", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Generate an answer as the arguments say and return exit code 0."""
    options = GenerateOptions(**given_flags(GenerateOptions, arguments))
    if not options.trust_remote_code:
        startup.leave_torch_out()
    generate(options)
    return 0


def _true_or_false(text: str) -> bool:
    """Return the values of mlx_lm.generate's words, and refuse others, which it takes for true."""
    try:
        return {"true": True, "t": True, "false": False, "f": False}[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}") from None


def generate(options: GenerateOptions) -> str:
    """Print the model's answer as it is generated, and return it; UserError for an option, file or prompt that is
    unfit.
    """
    from ..answering.session import Session
    from ..data.prompts import Question

    media = _first_media(options)
    text = _prompt(options.prompt)
    parts = []
    last = None
    with Session.open(options, media=media, chat=not options.ignore_chat_template) as session:
        pictures = _pictures(options, session) if media else None
        prompt = session.prompt(
            Question(
                text,
                options.system_prompt,
                options.prefill_response,
                images=len(options.image),
                videos=pictures.video_texts if pictures else (),
            ),
            "--prompt",
            "--prompt: the chat template leaves nothing of it; give a prompt with text in it.",
            pictures,
            chat_template=not options.ignore_chat_template,
            template_options=session.template_options,
        )
        if options.memory is not None:
            from ..plan.forward_placement import placed_answer

            session.place(partial(placed_answer, prompt=prompt, max_tokens=options.max_tokens), "token")
        for last in session.answer(prompt, options.max_tokens):
            print(last.text, end="", flush=True)
            parts.append(last.text)
    print()
    if options.verbose and last is not None:
        _say_speeds(last, 0 if session.weights is None else session.weights.on_host)
    return "".join(parts)


def _say_speeds(last: Any, on_host: int) -> None:
    """Print the speeds of an answer from its last response; MLX counts the weights on the host as its own memory."""
    from ..train.reports.screen import gigabytes

    peak = last.peak_memory - on_host / 1e9
    drafted = getattr(last, "drafted", 0)
    drafts = f"; {last.accepted:,} of {drafted:,} drafted tokens accepted" if drafted else ""
    print(
        f"[{last.prompt_tokens:,} prompt tokens at {last.prompt_tps:,.1f}/s; {last.generation_tokens:,} generated "
        f"at {last.generation_tps:,.1f}/s{drafts}; peak memory {gigabytes(peak)}]"
    )


def _prompt(text: str) -> str:
    """Return the prompt, read from standard input where it is `-`; UserError where that is empty or not UTF-8."""
    if text != "-":
        # As for mlx_lm; standard input is taken as it stands.
        return text.replace("\\n", "\n").replace("\\t", "\t")
    if sys.stdin is None:
        raise UserError("--prompt -: standard input is closed; give it the prompt, or give --prompt TEXT.")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt -: byte {error.start} of standard input is not UTF-8 ({error.reason}); give text in UTF-8."
        ) from error
    if not text.strip():
        raise UserError("--prompt -: standard input is empty; give a prompt with text in it.")
    return text


def _first_media(options: GenerateOptions) -> str | None:
    """Return the flag and the file of the first image or video, as messages name it, or None where there is none."""
    for flag, names in (("--image", options.image), ("--video", options.video)):
        for name in names:
            if not Path(name).is_file():
                raise UserError(f"{flag} {name}: no such file; give the path of an image or video.")
    if options.image and options.video:
        raise UserError("--image and --video: give one of them, not both.")
    if options.video:
        return f"--video {options.video[0]}"
    return f"--image {options.image[0]}" if options.image else None


def _pictures(options: GenerateOptions, session: Session) -> PromptPictures:
    """Read the images or videos of the options; where all files of --video are images, they are one video's frames."""
    from ..data.vision.media import picture_options
    from ..data.vision.videos import Video

    names = options.video
    are_images = [(guess_type(name)[0] or "").startswith("image/") for name in names]
    if any(are_images) and not all(are_images):
        raise UserError(
            "--video: got images together with videos; give video files, or images that are the frames of one video."
        )
    videos = [Video(value) for value in ([list(names)] if names and all(are_images) else names)]
    source = "--video" if videos else "--image"
    prepared = picture_options(vars(options), options.adapter_path)
    return session.pictures([*options.image, *videos], source, Path(), prepared)
