"""The options of a training run. Each option has its one default here, and the values that it may have.

Names are those of `mlx_lm.lora` for every option that it has; docs/guides/from-mlx-lm.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ..errors import UserError
from .values import COUNT, FINITE, NOT_NEGATIVE, POSITIVE, Range, checked_options, fix, option, unknown_names


class DataInMemory(str):
    """The name of rows in memory, for messages and saved options, with the rows.

    `splits` holds, by the name of a split, the words with which messages name its rows, and the rows: a list, or a data
    set of the datasets library.
    """

    splits: dict[str, tuple[str, Any]]

    @classmethod
    def of(cls, data: Iterable[Any] | Mapping[str, Iterable[Any]]) -> DataInMemory:
        """Take training rows, or a mapping such as {"train": rows, "valid": rows}."""
        made = cls("data in memory")
        splits = {"train": ("data", data)}
        if isinstance(data, Mapping):
            splits = {name: (f"data[{name!r}]", rows) for name, rows in data.items()}
        # A data set is read where it is; another iterator could be read only once.
        made.splits = {
            name: (label, rows if hasattr(rows, "__getitem__") else [*rows]) for name, (label, rows) in splits.items()
        }
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        # Saved options hold the name alone.
        return str(self)


# By the group in which an option is listed.
_first = partial(option, "most runs give these")
_data = partial(option, "data")
_tune = partial(option, "what trains")
_loss = partial(option, "loss")
_rollouts = partial(option, "reinforcement learning")
_optimizer = partial(option, "optimizer")
_run = partial(option, "run and evaluation")
_save = partial(option, "saving and reporting")

#: The losses of preferences, by their names in train/preferences/objectives.py.
PREFERENCES = ("dpo", "orpo", "kto", "simpo", "cpo")
#: The settings, of every optimizer that has them, that optimizer_config may change.
OPTIMIZER_SETTINGS = {"bias_correction": True}
NO_TYPE_FROM_SCRATCH = (
    "from_scratch trains all weights of a new model, and fine_tune_type {} asks for adapters; leave one of them out."
)


@dataclass(frozen=True)
class LoraConfig:
    """The options of the adapters.

    Each field's metadata holds its help text and the values that it may have; making a LoraConfig checks them.

    Raises:
        UserError: A value is not one that the option may have.
    """

    rank: int = _tune(16, "inner size of each adapter's update", range=COUNT)
    rank_pattern: dict[str, int] = _tune(
        dict,
        "ranks of the modules that match a pattern (see keys), as JSON, in place of rank; of several patterns that "
        'match, the first counts: {"mlp.switch_mlp.*": 4}',
        range=COUNT,
    )
    scale: float = _tune(2.0, "factor of the update, which is PEFT's alpha / rank", range=POSITIVE)
    alpha: float | None = _tune(
        None,
        "PEFT's lora_alpha, in place of scale: scale is alpha / rank, or with rslora alpha / sqrt(rank), of each "
        "module's own rank",
        range=POSITIVE,
    )
    dropout: float = _tune(
        0.0, "share of each adapter's inputs that training sets to zero", range=Range(least=0, below=1)
    )
    keys: list[str] | None = _tune(
        None,
        "patterns (fnmatch) of the modules to adapt, by full path, path in a layer or name; default: every "
        "linear, expert and embedding module of the chosen layers",
        flag=False,
    )
    exclude: list[str] = _tune(list, "patterns of the modules that get no adapter", flag=False)
    layer_kinds: list[str] | None = _tune(
        None, "kinds of layers to adapt; default: all", flag=False, choices=("delta", "attention", "mamba", "other")
    )
    layers: list[int] | None = _tune(
        None,
        "indices of the layers to adapt, in place of num_layers; negative ones count from the last",
        flag=False,
        range=FINITE,
    )
    rslora: bool = _tune(False, "divide the scale by the square root of the rank", flag=False)

    def __post_init__(self) -> None:
        fix(self)
        if self.alpha is not None:
            vars(self).update(scale=self.alpha if self.rslora else self.alpha / self.rank)

    def scale_at(self, rank: int) -> float:
        """Return the factor of an update of this rank."""
        if self.rslora:
            return self.scale / rank**0.5
        return self.scale if self.alpha is None or rank == self.rank else self.alpha / rank


@dataclass(frozen=True)
class TrainConfig:
    """The options of a training run, settled: making a TrainConfig checks them and sets those that others imply.

    `from_scratch` implies `fine_tune_type: full` and all layers, and `memory` implies `grad_checkpoint`. The default of
    `learning_rate` follows from the weights that train and from the loss. Lengths are in tokens. Schedules count
    optimizer steps; everything else counts iterations, of which `grad_accumulation_steps` make one optimizer step. Each
    field's metadata holds its help text and the values that it may have.

    Raises:
        UserError: A value is not one that the option may have, or two options contradict each other.
    """

    model: str | None = _first(None, "folder of the model, or its name on the Hugging Face hub; required")
    data: str | None = _first(
        None,
        "file of training data (.jsonl, .json, .csv, .tsv or .parquet), folder that holds train.jsonl, valid.jsonl and "
        "test.jsonl, or the name of a Hugging Face data set; required without hf_dataset",
    )
    val_split: float | None = _data(
        None,
        "share of the training rows to validate on, drawn by the seed; default: 0.1 where the data have no validation "
        "set and 20 rows or more",
        range=Range(least=0, below=1),
    )
    hf_dataset: Any = _data(
        None, "a Hugging Face data set, or a list of them, with the keys that mlx_lm.lora reads", flag=False
    )
    train: bool = _run(True, "accepted because mlx_lm.lora has it; this command always trains", negated=False)
    test: bool = _run(False, "evaluate the model on the test set after training")
    fine_tune_type: str = _tune(
        "lora",
        "train LoRA adapters (lora), DoRA adapters (dora) or the layers' own weights (full)",
        choices=("lora", "dora", "full"),
    )
    from_scratch: bool = _tune(
        False, "build the model of config.json with random weights, train all of them, and write a whole checkpoint"
    )
    loss: str = _loss(
        "sft",
        "what is learnt: sft imitates the data; grpo learns from rewards of answers that the model samples; distill "
        "learns a teacher's probabilities; the others learn which of two answers is better, kto whether one is good",
        choices=("sft", *PREFERENCES, "grpo", "distill"),
    )
    loss_variant: str | None = _loss(
        None,
        "published form of dpo (sigmoid, robust, hinge or ipo), cpo (sigmoid, hinge or ipo) or grpo (dapo, grpo, "
        "dr_grpo, bnpo, gspo, cispo or rloo); default: the first",
        choices=("sigmoid", "robust", "hinge", "ipo", "dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "rloo"),
    )
    beta: float | None = _loss(
        None,
        "factor of the rewards of a preference loss, orpo's weight of the odds ratio, and grpo's weight of the "
        "divergence from the model without its adapter; default: 0.1, and 0 for grpo; the authors of simpo use 2.0. "
        "With distill, the divergence: forward at 0, reverse at 1, the default, and Jensen-Shannon's between them",
        range=NOT_NEGATIVE,
    )
    teacher: str | None = _loss(None, "the teacher of distill: folder or name of a model with the same vocabulary")
    lmbda: float = _loss(
        0.5,
        "share of updates in which distill learns from answers that the model samples, in the place of the data's",
        range=Range(least=0, most=1),
    )
    gamma: float = _loss(0.5, "margin by which simpo wants the chosen answer's reward to be larger", range=NOT_NEGATIVE)
    label_smoothing: float = _loss(
        0.0, "share of pairs assumed to be labelled wrongly (dpo, simpo, cpo)", range=Range(least=0, below=0.5)
    )
    num_generations: int = _rollouts(
        8, "number of answers that are sampled behind each prompt, which are compared", range=Range(least=2)
    )
    max_completion_length: int = _rollouts(512, "largest number of tokens in a sampled answer", range=COUNT)
    temperature: float = _rollouts(
        1.0,
        "temperature of the sampled answers, which the loss has too; with distill, of both models",
        range=POSITIVE,
    )
    top_p: float = _rollouts(
        1.0, "sample from the likeliest tokens with this sum of probabilities alone", range=Range(above=0, most=1)
    )
    top_k: int = _rollouts(0, "sample from this many of the likeliest tokens alone; 0 means all", range=NOT_NEGATIVE)
    min_p: float = _rollouts(
        0.0,
        "sample from the tokens alone that are at least this likely, relative to the likeliest",
        range=Range(least=0, most=1),
    )
    epsilon: float = _rollouts(
        0.2, "largest change of a probability, as a share, that the loss rewards", range=POSITIVE
    )
    epsilon_high: float | None = _rollouts(
        None,
        "the same for a rise; default: epsilon. With cispo, the largest ratio of probabilities, such as 5",
        range=POSITIVE,
    )
    num_iterations: int = _rollouts(1, "number of times that the loss goes through sampled answers", range=COUNT)
    scale_rewards: str = _rollouts(
        "group",
        "standard deviation by which advantages are divided: of the answers to a prompt, of all answers (batch), none",
        choices=("group", "batch", "none"),
    )
    stop_strings: list[str] = _rollouts(
        list, "texts at which a sampled answer ends, as at an end token; the text remains in the answer"
    )
    mask_truncated_completions: bool = _rollouts(
        False, "leave answers without an end out of the loss, which max_completion_length has cut"
    )
    sampler_correction: str = _rollouts(
        "token",
        "weigh each token, or each answer (sequence), by the ratio of its probabilities in training and in sampling, "
        "up to 2; none weighs all alike",
        choices=("token", "sequence", "none"),
    )
    mtp: bool | str = _tune(
        False,
        "train the multi-token-prediction head with the model, so that it goes on drafting its tokens in speculative "
        "decoding; only trains the head alone, behind the model as it is",
        choices=("only",),
    )
    mtp_weight: float = _loss(0.3, "weight of the loss of the multi-token-prediction head", range=POSITIVE)
    mtp_trunk_gradient: bool = _loss(
        False, "let the gradient of the multi-token-prediction head's loss reach the model's layers"
    )
    router_aux_loss_coef: float = _loss(
        0.0, "weight of the load-balancing loss of a mixture's routers", range=NOT_NEGATIVE
    )
    reward_funcs: list[str] = _rollouts(
        list,
        "reward functions: FILE.py:FUNCTION,FUNCTION, command:PROGRAM, or exact, marked, regex:PATTERN, json:FIELDS, "
        "length:TOKENS, repetition, math-verify or reasoning-gym",
    )
    reward_weights: list[float] = _rollouts(
        list, "factor of each reward function's rewards in their sum; default: 1 for all", range=FINITE
    )
    reward_timeout: float = _rollouts(
        60.0, "seconds that the rewards of a batch may take", range=Range(above=0, most=86400)
    )
    reward_errors: str = _rollouts(
        "stop",
        "whether a reward function that fails ends the run (stop), or gives no reward (none)",
        choices=("stop", "none"),
    )
    optimizer: str = _optimizer(
        "adamw", "an optimizer of MLX, such as adamw, muon, sgd or lion, or adamw8bit; Adam's correct bias"
    )
    optimizer_config: dict[str, dict[str, Any] | None] = _optimizer(
        dict, "settings for each optimizer by name, such as {adamw: {weight_decay: 0.01}}", flag=False
    )
    learning_rate: float = _first(
        None,
        "largest learning rate; default: 2e-4, or 1e-5 for preferences and rewards; in full fine-tuning a tenth of it",
        range=POSITIVE,
    )
    lr_schedule: dict[str, Any] | str = _optimizer(
        "cosine",
        "course of the learning rate over the run: constant, or falling to 0 by a cosine or linearly. A file may give "
        "the mapping of mlx_lm.lora in place of the word, counted in optimizer steps, with the keys name, arguments, "
        "warmup and warmup_init",
        choices=("constant", "cosine", "linear"),
    )
    warmup: float = _optimizer(
        0.03,
        "part of the run over which the learning rate rises to learning_rate: a share below 1, or a number of "
        "optimizer steps",
        range=NOT_NEGATIVE,
    )
    grad_clip: float | None = _optimizer(
        None, "largest global gradient norm; a larger gradient is scaled down to it", range=POSITIVE
    )
    grad_accumulation_steps: int = _optimizer(
        1, "number of iterations whose gradients, weighted by their tokens, make one optimizer step", range=COUNT
    )
    seed: int = _run(
        0, "seed of the random weights, the dropout and the order of the data", range=Range(least=0, most=2**64 - 1)
    )
    num_layers: int = _tune(
        -1,
        "number of layers to train, counted from the last; -1, or a number above the model's, trains all",
        range=Range(least=1, also=(-1,)),
    )
    lora_parameters: LoraConfig = _tune(
        LoraConfig,
        "options of the adapters: rank, scale, dropout, keys, exclude, layer_kinds, layers and rslora",
        flag=False,
    )
    resize_embeddings: bool = _tune(
        False,
        "give the embedding and the head a row for each token that was added to the tokenizer, and train those rows",
    )
    batch_size: int = _run(4, "number of rows in a batch, summed over all ranks", range=COUNT)
    epochs: float | None = _run(
        None,
        "number of passes over the training data, in place of iters; a fraction of one is rounded up to a batch",
        range=POSITIVE,
    )
    iters: int = _first(1000, "number of iterations to train for", range=COUNT)
    grad_checkpoint: bool | str = _run(
        False,
        "recompute each layer in the backward pass, which takes less memory and more time; auto recomputes as few "
        "layers as the memory allows",
        choices=("auto",),
    )
    max_seq_length: int = _data(2048, "largest length of a row, in tokens", range=Range(least=2))
    overlong: str = _data(
        "truncate",
        "whether an example longer than max_seq_length is cut (truncate) or left out (skip)",
        choices=("truncate", "skip"),
    )
    mask_prompt: bool | None = _data(
        None,
        "count only completions in the loss, which is the default for prompts and chats; --no-mask-prompt counts "
        "every token",
    )
    chat_turns: str = _data(
        "each",
        "which assistant turns of a chat count in the loss: each of them, or the last alone. Where the chat "
        "template rewrites earlier turns, a chat takes several rows with each",
        choices=("each", "last"),
    )
    min_pixels: int | None = _data(
        None, "area, in pixels, to which smaller images are scaled up; default: the model's own", range=COUNT
    )
    max_pixels: int | None = _data(
        None, "area, in pixels, to which larger images are scaled down; default: the model's own", range=COUNT
    )
    fps: float | None = _data(
        None,
        "frames per second to take from a video file, or at which a list of frames was recorded; default: "
        "the model's own",
        range=POSITIVE,
    )
    video_max_frames: int | None = _data(
        None, "largest number of frames to take from a video; default: the model's own", range=Range(least=2)
    )
    chat_template_config: dict[str, Any] | None = _data(
        None,
        'variables of the chat template, such as {"enable_thinking": false}; default: what the answers of the data '
        "need",
    )
    streaming: bool = _data(
        False,
        "read and tokenise the training data while training, so that it need not fit in memory; validation and "
        "test read no more rows than they evaluate",
    )
    pack: bool = _data(
        False, "put several documents into a row; attention, recurrence and convolution do not cross between them"
    )
    val_batches: int = _run(
        25,
        "number of batches in an evaluation; -1 takes the whole validation set, 0 turns evaluation off",
        range=Range(least=0, also=(-1,)),
    )
    test_batches: int = _run(
        500, "number of batches in the test; -1 takes the whole test set", range=Range(least=1, also=(-1,))
    )
    steps_per_report: int = _save(10, "number of iterations between reports of the training loss", range=COUNT)
    steps_per_eval: int = _run(
        200, "number of iterations between evaluations, and between answers to sample_prompts", range=COUNT
    )
    save_every: int = _save(100, "number of iterations between saves", range=COUNT)
    keep: int | None = _save(
        None, "number of numbered copies of the adapters to keep, the newest; default: all", range=NOT_NEGATIVE
    )
    sample_prompts: list[str] = _save(
        list,
        "prompts that the model answers before, during and after training, with up to 100 tokens, or "
        "max_completion_length where the loss samples answers; a name that ends with .jsonl stands for the prompts, "
        "chats or texts in the rows of that file",
    )
    early_stopping: int | None = _run(
        None, "stop training after this many evaluations without a lower loss", range=COUNT
    )
    adapter_path: str = _first("adapters", "folder to which a run writes all its files")
    resume: bool = _save(False, "continue the run that is saved in adapter_path, with the same results bit for bit")
    overwrite: bool = _save(
        False, "delete an earlier run in adapter_path; by default it is moved to a numbered folder beside it"
    )
    parts: str = _tune(
        "language",
        "parts of a vision model to train, separated by commas: language, vision, projector",
        words=("language", "vision", "projector"),
    )
    resume_adapter_file: str | None = _tune(None, "file of adapter weights to start from")
    memory: int | None = _run(
        None,
        "size, such as 12GB, of the arrays that the run may hold: frozen layers that do not fit, with loss: distill "
        "those of the teacher, stay on the disk and are read in every pass; implies grad_checkpoint",
        range=Range(least=1, most=2**63 - 1, size=True),
    )
    report_to: str | None = _save(
        None,
        "loggers to report to, separated by commas: tensorboard, wandb, swanlab",
        words=("tensorboard", "wandb", "swanlab"),
    )
    project_name: str | None = _save(
        None, "project name for the loggers of report_to; default: the current folder's name"
    )
    trust_remote_code: bool = _run(False, "allow code that comes with the model or its tokenizer to run")
    force: bool = _run(
        False,
        "go on even if the plan says that the run cannot fit in memory, or upstream's code has to run where "
        "results depend on deltatune's",
    )
    prompt_feature: str | None = _data(
        None, "key, or column, that holds the prompt of a row; default: prompt", flag="--prompt-column"
    )
    text_feature: str | None = _data(
        None, "key, or column, that holds the plain text of a row; default: text", flag="--text-column"
    )
    completion_feature: str | None = _data(
        None, "key, or column, that holds the completion of a row; default: completion", flag="--completion-column"
    )
    chat_feature: str | None = _data(
        None, "key, or column, that holds the messages of a chat; default: messages", flag="--chat-column"
    )

    def __post_init__(self) -> None:
        if isinstance(self.data, Iterable) and not isinstance(self.data, str):
            vars(self).update(data=DataInMemory.of(self.data))
        if self.learning_rate is None:
            rate = 2e-4 if self.loss in ("sft", "distill") else 1e-5
            is_full = self.fine_tune_type == "full" and not self.from_scratch
            vars(self).update(learning_rate=rate / 10 if is_full else rate)
        fix(self)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise UserError(
                f"min_pixels: expected at most max_pixels, which is {self.max_pixels}, got {self.min_pixels}."
            )
        if self.chat_template_config is not None:
            checked_options(self.chat_template_config, "chat_template_config")
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise UserError(f"warmup: expected a share below 1 or a whole number of steps, got {self.warmup}.")
        self._check_streaming()
        if self.memory is not None and self.loss != "distill" and self.trains_base is not None:
            raise UserError(f"memory leaves frozen weights on the disk, and {self.trains_base}; leave one of them out.")
        if self.max_completion_length >= self.max_seq_length and self.loss == "grpo":
            raise UserError(
                f"max_completion_length: expected less than max_seq_length, which is {self.max_seq_length}, since a "
                f"row holds a prompt and its answer; got {self.max_completion_length}."
            )
        if self.loss == "distill":
            self._check_distillation()
        if self.resume and self.overwrite:
            raise UserError("resume continues the run that overwrite would delete; give one of them.")
        if self.from_scratch and self.fine_tune_type == "dora":
            raise UserError(NO_TYPE_FROM_SCRATCH.format(self.fine_tune_type))
        if self.from_scratch:
            vars(self).update(fine_tune_type="full", num_layers=-1)
        if self.memory is not None:
            vars(self).update(grad_checkpoint=True)

    @classmethod
    def of(cls, **options: Any) -> TrainConfig:
        """Return the options of a run by name, those of adapters among them, as flags have them: rank=8, iters=300.

        Raises:
            UserError: A name is unknown, or a value is not one that the option may have.
        """
        of_adapters = {field.name: options.pop(field.name) for field in fields(LoraConfig) if field.name in options}
        if of_adapters and "lora_parameters" in options:
            raise UserError(f"lora_parameters holds {', '.join(of_adapters)} already; give them in one place.")
        # A name of another trainer is answered by `rank`, not by its place in a file.
        known = [field.name for kind in (cls, LoraConfig) for field in fields(kind) if field.name != "lora_parameters"]
        if unknown := unknown_names([name for name in options if name != "lora_parameters"], known, ""):
            raise UserError("\n".join(unknown))
        return cls(**{"lora_parameters": of_adapters} | options)

    @property
    def trains_base(self) -> str | None:
        """The option with which the base model's weights change, as a clause; None where all of them stay frozen."""
        if self.from_scratch:
            return "from_scratch trains them"
        return "fine_tune_type: full trains them" if self.fine_tune_type == "full" else None

    @property
    def has_preferences(self) -> bool:
        """Whether the loss learns from answers that the data judge."""
        return self.loss in PREFERENCES

    @property
    def samples_answers(self) -> bool:
        """Whether the model samples answers that it learns from."""
        return self.loss == "grpo" or (self.loss == "distill" and self.lmbda > 0)

    @property
    def packs_data(self) -> bool:
        """Whether the documents of the data share rows; answers to prompts share theirs when they are sampled."""
        return self.pack and self.loss != "grpo"

    @property
    def reward_factor(self) -> float:
        """The factor of the rewards of a preference loss."""
        return 0.1 if self.beta is None else self.beta

    @property
    def rows_each(self) -> int:
        """The rows of a batch that one of its batch_size takes: one for each document of an example."""
        if self.loss == "grpo":
            return self.num_generations
        return 2 if self.has_preferences and not self.pack else 1

    @property
    def trained_parts(self) -> list[str]:
        """The parts of the model to train, as convert_to_lora takes them."""
        if self.mtp == "only":
            return ["mtp"]
        parts = self.parts.split(",")
        return [*parts, "mtp"] if self.mtp else parts

    def _check_distillation(self) -> None:
        if self.teacher is None:
            raise UserError("loss: distill needs a teacher; name one with teacher, a folder or a name on the hub.")
        if self.beta is not None and self.beta > 1:
            raise UserError(f"beta: expected a number from 0 to 1 with loss distill, got {self.beta:g}.")

    def _check_streaming(self) -> None:
        if not self.streaming:
            return
        if self.loss not in ("sft", "distill"):
            raise UserError(
                f"streaming: the loss {self.loss} reads its whole data set before the first step, so it cannot be "
                "streamed; leave streaming out."
            )
        if self.epochs is not None:
            raise UserError("streaming: the length of the data is not known, so epochs cannot be counted; give iters.")
