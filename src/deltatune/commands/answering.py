"""What `generate` and `chat` share: the flags that say how a model answers, their values, and what is checked first."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError
from ..options.chat_template import parsed_options
from ..options.generation import AnswerOptions
from ..options.values import short
from .flags import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..data.vision.prompt import PromptPictures
    from ..models.generate import Sampling
    from ..models.load import Loaded
    from ..plan.placement import Placed
    from ..train.by_layer.layer_calls import LayerCalls
    from ..train.by_layer.layer_weights import LayerWeights


class Reading(NamedTuple):
    """Layers that read their weights.

    Attributes:
        weights: What they read them from.
        calls: Their calls.
    """

    weights: LayerWeights
    calls: LayerCalls


def add_sampling(add: Any, max_tokens: int) -> None:
    """Add the flags that say how a model answers, whatever it is asked; `max_tokens` is the default of that flag."""
    add(
        "--max-tokens",
        "-m",
        type=int,
        metavar="N",
        help=f"largest number of tokens in the answer (default: {max_tokens})",
    )
    add("--temp", type=float, metavar="X", help="sampling temperature; 0 always takes the likeliest token (default: 0)")
    add("--top-p", type=float, metavar="X", help="sample from the likeliest tokens whose probabilities sum to this")
    add("--min-p", type=float, metavar="X", help="leave out tokens below this share of the likeliest one's probability")
    add("--top-k", type=int, metavar="N", help="sample from this number of the likeliest tokens")
    add("--seed", type=int, metavar="N", help="seed of the sampling")
    add(
        "--chat-template-config",
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}; default: those of the adapter',
    )
    add(
        "--memory",
        type=size,
        metavar="SIZE",
        help="size, such as 12GB, of the arrays that may be held: layers that do not fit stay on the disk and are read "
        "for every token, which is slow",
    )
    add("--extra-eos-token", nargs="+", metavar="TEXT", help="further tokens that end the answer")
    add("--trust-remote-code", action="store_true", help="allow code that comes with the model or its tokenizer to run")
    add("--force", action="store_true", help="answer although a function that results depend on runs upstream's code")


def sampling_of(options: AnswerOptions) -> Sampling:
    """Return how each token is chosen."""
    from ..models.generate import Sampling

    return Sampling(options.temp, options.top_p, options.min_p, options.top_k)


def trained_template_options(options: AnswerOptions) -> dict[str, Any]:
    """Return the variables of the chat template: those that the adapter was trained with, then those of the flag."""
    from ..lora.adapter_files import template_options

    text = options.chat_template_config
    asked = {} if text is None else parsed_options(text, "--chat-template-config", prompt=True)
    return template_options(options.adapter_path, asked)


def check_served(options: AnswerOptions, media: str | None = None) -> None:
    """Refuse, before weights are read, a model of which results depend on upstream's code.

    Args:
        options: The options of the command.
        media: The flag and the file of the first image or video, as messages name it; None without any.
    """
    from ..models.adapted_base import folder_of
    from ..models.early_refusal import refuse_unserved
    from ..patches import INFERENCE

    if not options.force:
        folder = folder_of(options.model, options.adapter_path)
        refuse_unserved(folder, (INFERENCE,), image=media, trust_remote_code=options.trust_remote_code)


def check_tokens(options: AnswerOptions, loaded: Loaded) -> None:
    """Refuse tokens that the model does not have, more candidates than it has tokens, and code that nobody knows."""
    from ..patches import INFERENCE, patched

    with patched(loaded.model, strict=not options.force, uses=(INFERENCE,)):
        pass  # It is refused before anything is generated.
    known = loaded.tokenizer.get_vocab()
    if options.top_k >= len(known):
        raise UserError(
            f"--top-k: expected at most {len(known) - 1}, since the model has {len(known):,} tokens; "
            f"got {options.top_k}."
        )
    numbers = {str(number) for number in known.values()}
    for token in options.extra_eos_token:
        if token not in known and token not in numbers:
            raise UserError(f"--extra-eos-token: {short(token)} is no token of this model, and no token's number.")


def reading(where: Placed, loaded: Loaded, unit: str, stack: ExitStack) -> Reading | None:
    """Let the layers of a model read their weights until `stack` ends, and say on standard error which of them do.

    Args:
        where: Which layers stay on the disk.
        loaded: The model, loaded lazily, with its adapter.
        unit: What reads all of them once.
        stack: Closes the files when it ends.

    Returns:
        What they are read from, and their calls; None where all stay in memory.
    """
    import mlx.core as mx

    from ..layers import describe
    from ..train.by_layer.read_layers import reading_calls

    for fact in where.placement.said(unit):
        print(fact, file=sys.stderr)
    weights = where.of(loaded.model, stack)
    beside = 0 if weights is None else weights.on_host
    stack.callback(mx.set_memory_limit, mx.set_memory_limit(where.limit() + beside))
    if weights is None:
        return None
    calls = reading_calls([layer.module for layer in describe(loaded.model)], weights)
    stack.enter_context(calls.watched())
    return Reading(weights, calls)


def placed(
    options: AnswerOptions, loaded: Loaded, tokens: Sequence[int], pictures: PromptPictures | None, stack: ExitStack
) -> LayerWeights | None:
    """Put the adapter on a model that was loaded lazily, whose layers read their weights until `stack` ends.

    Args:
        options: The options of the command, with a bound of memory.
        loaded: The model, without its adapter.
        tokens: Those of the prompt.
        pictures: Its images and videos; None without.
        stack: Closes the files when it ends.

    Returns:
        What they are read from; None where all stay in memory.
    """
    assert options.memory is not None
    where = planned(options, loaded, tokens, pictures)
    read_layers = reading(where, loaded, "token", stack)
    return None if read_layers is None else read_layers.weights


def planned(
    options: AnswerOptions, loaded: Loaded, tokens: Sequence[int], pictures: PromptPictures | None = None
) -> Placed:
    """Put the adapter on a model that was loaded lazily, and choose which of its layers stay on the disk.

    Args:
        options, loaded, tokens, pictures: What placed() takes.
    """
    from ..plan.forward_placement import AskedPrompt, placed_answer

    assert options.memory is not None
    trusted, prompt = options.trust_remote_code, AskedPrompt(tokens, options.max_tokens, pictures)
    return placed_answer(loaded, options.adapter_path, options.memory, prompt, trust_remote_code=trusted)
