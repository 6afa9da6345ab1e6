"""Plans a run for `deltatune plan`, and checks before `deltatune train` that the run fits the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.nn as nn
import numpy as np

from ..data import BatchOrder, Splits
from ..data.batches.stream_order import StreamOrder
from ..data.preferences.preference import SLOTS
from ..data.prompts import PromptExample
from ..data.vision.media import largest_batch
from ..errors import UserError
from ..layers import describe
from ..lora.adapter import Adapter
from ..lora.convert import adapters
from ..lora.weights import dense_weight
from ..machine.compiling import without_kernels
from ..models.batch_decoder import ROWS, can_be_joined
from ..models.generate import begun, cache_bytes
from ..models.vision.split import has_vision
from ..ops.recomputation import Checkpoints, operators_pay
from ..options.config import TrainConfig
from ..patches import patched
from ..train.evaluation.evaluate import inferring
from ..train.loop import Bounds
from ..train.reports.screen import Fact
from ..train.saved import state
from ..train.setup import Run, load_model, prepare, ready
from ..train.tree import nbytes
from . import screen
from .advice import advice
from .array_layout import ArrayLayout, LayoutError
from .checkpoints import Choice, Order, choose, order_of
from .device_limits import Brake, DeviceLimits, device_limits
from .few_layers import UPDATE
from .forecast import Forecast, Moment, Steps
from .search import Largest, RunForecast, fits, largest, left_on_disk
from .traced_layers import InputsPlace
from .traced_step import BatchShape

# The memory of decoding, in states of all rows: those before a step, the new ones, and copies where no kernel serves.
_STATES = 4
# The same in keys and values of all rows: a step writes into them; while prompts are read, a copy stands beside them.
_KEYS = 2
# How many arrays of fp32 logits are alive while a token is sampled: those of the model and of the policy, their
# exponentials, and two more where they are sorted for top_p.
_LOGITS = 6


def with_sampling(
    forecast: Forecast, model: nn.Module, config: TrainConfig, packed: BatchOrder | StreamOrder | None = None
) -> Forecast:
    """Return the forecast of a run's largest moment, which may be the sampling of its answers before a step.

    It is an estimate from above: the caches of all rows at full length, with the copies of a step. `packed` are the
    batches of data with several prompts in a row.
    """
    pictures = has_vision(model)
    if not config.samples_answers or not (pictures or can_be_joined(model)):
        return forecast
    rows = forecast.rows * config.grad_accumulation_steps
    length = forecast.length
    if packed is not None:
        rows = rows * packed.slots
        length = packed.longest
    # Answers to prompts with pictures are sampled one prompt after the other.
    rows = config.rows_each if pictures else min(ROWS, rows)
    decoder = model["language_model"] if pictures else model
    with without_kernels(), patched(), inferring(model):
        caches = cache_bytes(decoder)
        logits = list(begun(decoder, 2))[-1][-1]
    of_row = _STATES * caches.fixed + _KEYS * caches.token * (length + 2) + _LOGITS * 4 * logits.shape[-1]
    amount = forecast.sizes["parameters"] + forecast.sizes["moments"] + rows * of_row
    if amount <= forecast.bytes.amount:
        return forecast
    return replace(forecast, bytes=Moment(amount, f"sampling {rows:,} answers, before the step"))


_LONGEST = 1 << 17
_LENGTHS = 32
_MOST_ROWS = 1024
_MOST_RANK = 256
# More experts than models choose for a token.
_MOST_CHOSEN = 16


@dataclass(frozen=True)
class Planner:
    """Plans steps of a run, the model of which is prepared."""

    run: Run
    layout: ArrayLayout
    brake: Brake | None = None
    # The models and options that steps were planned of.
    _steps: list[Steps] = field(default_factory=list)

    def at(
        self,
        rows: int,
        length: int,
        checkpoints: Checkpoints | None = None,
        *,
        config: TrainConfig | None = None,
        model: nn.Module | None = None,
        layer_inputs: InputsPlace | None = None,
    ) -> Forecast:
        """Forecast a step of so many rows of so many tokens, as Steps.forecast() does.

        `config` and `model` stand in the place of the run's.
        """
        config = config or self.run.config
        batch = batch_shape(config, rows, length, self.run.splits)
        model = model or self.run.model
        steps = next((steps for steps in self._steps if steps.model is model and steps.config is config), None)
        if steps is None:
            steps = Steps(model, config, self.layout)
            self._steps.append(steps)
        forecast = steps.forecast(batch, checkpoints, layer_inputs=layer_inputs, brake=self.brake)
        return with_sampling(forecast, model, config, self._packed)

    @cached_property
    def _packed(self) -> BatchOrder | StreamOrder | None:
        """The batches of the data, where they hold several prompts in a row."""
        config = self.run.config
        return self.run.training_order() if config.samples_answers and config.packs_data else None

    @property
    def every_layer(self) -> Checkpoints:
        """The recomputation of every layer."""
        return Checkpoints(range(len(describe(self.run.model))))

    @property
    def least(self) -> Checkpoints | None:
        """The checkpoints where memory is short: auto then recomputes every layer; None for those of the options."""
        return self.every_layer if self.run.config.grad_checkpoint == "auto" else None


def examine(
    config: TrainConfig,
    limits: DeviceLimits | None = None,
    shown: screen.PlanLines | screen.PlanPanel | None = None,
    *,
    advise: bool = False,
) -> RunForecast:
    """Plan the run that `config` describes, and search for the largest batch, length and rank that fit.

    The weights are not read from the disk. `limits` are those of MLX's default device by default, and `advise` asks for
    advice on smaller adapters and moments where the run fits, too. UserError where the graphs of this MLX cannot be
    read, or the run cannot be set up.
    """
    try:
        layout = ArrayLayout.measured()
    except LayoutError as error:
        raise UserError(
            f"plan: this version of MLX stores its graphs in a way that deltatune does not know ({error}); "
            "deltatune train works without a plan."
        ) from error
    limits = limits or device_limits()
    shown = shown or screen.PlanLines(lambda line: None)
    run = ready(config, lazy=True)
    run.prepare()
    rows, length = shape(run)
    for fact in (screen.shape(rows, length, run.config.max_seq_length), *map(screen.fault, run.notes)):
        shown.add(fact)
    planner = Planner(run, layout, limits.brake)
    choice = _choice(planner, limits, lambda tried: shown.add(screen.tried(tried)))
    first = planner.at(rows, length) if choice is None else choice.forecast
    forecast = RunForecast(first, limits, checkpoints=None if choice is None else str(choice))
    shown.answer(forecast)
    for fact in [*([] if choice is None else [screen.checkpoints(choice)]), *screen.step(forecast, shown.verbose)]:
        shown.add(fact)
    # Where larger values are searched for, auto may checkpoint every layer.
    if choice is not None and choice.again != choice.of:
        first = planner.at(rows, length, planner.least)
    values = {}
    for name, value in _searches(planner, first, limits):
        values[name] = value
        shown.add(screen.largest(name, value))
    if sentence := _smaller(planner, first, limits, asked=advise).strip():
        shown.add(Fact("smaller", sentence, line=sentence))
    return dataclasses.replace(forecast, batch=values["batch"], length=values["length"], rank=values.get("rank"))


def _searches(planner: Planner, first: Forecast, limits: DeviceLimits) -> Iterator[tuple[str, Largest]]:
    """Yield the largest length, batch and rank that fit, with `first` as the plan of the run's own step."""
    rows, length = first.rows, first.length
    run = planner.run
    config = planner.run.config
    least = planner.least
    fixed = _without_tokens(first)

    def planned_at_rank(rank: int) -> Forecast:
        changed = dataclasses.replace(config, lora_parameters=dataclasses.replace(config.lora_parameters, rank=rank))
        other = load_model(changed, image=run.image, lazy=True).model
        prepare(other, changed)
        return planner.at(rows, length, least, config=changed, model=other)

    lengths = range(_LENGTHS, max(length, _positions(run.loaded.config)) + 1, _LENGTHS)
    yield "length", largest(lambda length: planner.at(rows, length, least), limits, {length: first}, lengths, fixed)
    numbers = range(config.rows_each, max(rows, _MOST_ROWS) + 1, config.rows_each)
    batch = largest(lambda rows: planner.at(rows, length, least), limits, {rows: first}, numbers, fixed)
    yield "batch", Largest(batch.value // config.rows_each * run.world.size, batch.more)
    if config.fine_tune_type != "full":
        current = config.lora_parameters.rank
        ranks = range(1, max(current, min(_MOST_RANK, _widest(run.model))) + 1)
        again = bool(config.grad_checkpoint)
        smallest, greatest = _bounds_of_ranks(run.model, first, ranks[-1] / current, recomputed=again)
        if limits.bytes is None or not smallest <= limits.bytes <= greatest:
            yield "rank", Largest(ranks[-1], more=True) if fits(first, limits) else Largest(0, more=False)
        else:
            yield "rank", largest(planned_at_rank, limits, {current: first}, ranks)


def _bounds_of_ranks(
    model: nn.Module, plan: Forecast, times: float, *, recomputed: bool = False
) -> tuple[float, float]:
    """Bounds of a step's bytes with adapters of any rank up to so many times that of a plan.

    Factors, their gradients and moments grow with the rank, and so do the products of inputs with factors. At no moment
    are more alive than each of the former three times, and of the latter twice, which are those of one layer where all
    are `recomputed`; then the passes hold the gradients twice beside their sums, and the moments once.
    """
    gradients, moments = plan.sizes["gradients"], plan.sizes["moments"]
    trained = 3 * (2 * gradients + moments)
    factors = [adapter["lora_a"] for adapter in adapters(model).values() if isinstance(adapter, Adapter)]
    ranks = sum(a.shape[-1] if a.ndim == 2 else _MOST_CHOSEN * a.shape[1] for a in factors)
    joined = 2 * 4 * plan.tokens * ranks
    peak = plan.bytes.amount
    if not recomputed or plan.bytes.where == UPDATE:
        return peak - trained, peak + (times - 1) * trained + times * joined
    # No layer is twice as large as the others. The update of a large rank may need more than the passes.
    joined = min(joined, joined * 2 // len(describe(model)))
    in_passes = 4 * gradients + moments
    in_update = plan.sizes["parameters"] + times * trained
    return peak - in_passes - 2 * joined, max(peak + (times - 1) * in_passes + times * joined, in_update)


def _without_tokens(plan: Forecast) -> Forecast:
    """The plan of a step like another without tokens: its weights, gradients and moments alone."""
    buffers = Moment(sum(plan.counts.values()), "")
    return dataclasses.replace(plan, buffers=buffers, bytes=Moment(sum(plan.sizes.values()), ""))


def check(run: Run) -> Bounds:
    """Check that a run fits the device before it starts, and choose its checkpoints if `grad_checkpoint` is auto.

    A UserError on one that does not fit names changes with which it does; with the option `force` it is only reported.
    """
    limits = device_limits()
    try:
        planner = Planner(run, ArrayLayout.measured(), limits.brake)
        choice = _choice(planner, limits)
        plan = choice.forecast if choice else planner.at(*shape(run))
    except LayoutError as error:
        line = (
            f"Plan: none, since this version of MLX stores its graphs in a way that deltatune does not know ({error})."
        )
        return _unplanned(run, line)
    said: list[Fact | str] = [] if choice is None else [screen.checkpoints(choice)]
    said.append(screen.memory(plan, limits))
    if not fits(plan, limits):
        message = f"{said[-1]} {_remedy(planner, plan, choice, limits)}{_from_disk(planner, limits)}"
        if not run.config.force:
            message += _smaller(planner, plan, limits)
            raise UserError(f"{message} --force trains all the same.")
        said[-1] = f"{message} Training starts all the same (--force)."
    return Bounds(said, None if choice is None else choice.checkpoints, plan.memory_limit)


def _choice(planner: Planner, limits: DeviceLimits, tried: Callable[[Choice], None] | None = None) -> Choice | None:
    """Return the choice of `grad_checkpoint: auto`: that of the continued run, or a new one; None without auto.

    Every rank takes the checkpoints of the one with the least memory, so that all round alike. `tried` gets each plan.
    """
    run = planner.run
    if run.config.grad_checkpoint != "auto":
        return None
    order = order_of(run.model)

    def attempt(checkpoints: Checkpoints) -> Forecast:
        plan = planner.at(*shape(run), checkpoints)
        if tried is not None:
            tried(order.choice(checkpoints, plan))
        return plan

    saved = _saved_checkpoints(run)
    if saved is None:
        choice = choose(attempt, order, limits, operators=operators_pay())
    else:
        choice = order.choice(saved, attempt(saved))
    checkpoints = _of_all_ranks(run, order, choice.checkpoints)
    return choice if checkpoints == choice.checkpoints else order.choice(checkpoints, attempt(checkpoints))


def _of_all_ranks(run: Run, order: Order, here: Checkpoints) -> Checkpoints:
    """The most layers and cheap operators that any rank recomputes."""
    layers = order.count(here)
    operators = here.operators
    most, any_operators = int(run.world.largest(layers)), bool(run.world.largest(operators))
    return here if (most, any_operators) == (layers, operators) else order.first(most, operators=any_operators)


def _saved_checkpoints(run: Run) -> Checkpoints | None:
    """Return the checkpoints of the continued run; None if it chose none, or none is continued."""
    saved = state.peek(state.state_path(run.config.adapter_path)) if run.config.resume else None
    return None if saved is None else saved.checkpoints


def _unplanned(run: Run, line: str) -> Bounds:
    """Return the report on a run that cannot be planned; auto then checkpoints every layer of a new run."""
    if run.config.grad_checkpoint != "auto":
        return Bounds([line], None)
    order = order_of(run.model)
    saved = _saved_checkpoints(run)
    chosen = order.first(len(order.reached), operators=False) if saved is None else saved
    # The other ranks wait for this one in _choice.
    checkpoints = _of_all_ranks(run, order, chosen)
    again = order.count(checkpoints)
    return Bounds([line, f"Checkpoints (auto): {again} of {len(order.reached)} layers are recomputed."], checkpoints)


def shape(run: Run) -> tuple[int, int]:
    """The rows and the length in tokens of the run's largest batch on one rank."""
    return run.config.batch_size // run.world.size * run.config.rows_each, run.training_order().widths[-1]


def _remedy(planner: Planner, plan: Forecast, choice: Choice | None, limits: DeviceLimits) -> str:
    """Return a sentence on changes with which the run would fit, the least change first."""
    run = planner.run
    config = planner.run.config
    least = planner.least
    words = ""
    if not config.grad_checkpoint or (choice is not None and choice.again < choice.of):
        least = planner.every_layer
        if fits(planner.at(plan.rows, plan.length, least), limits):
            return "It fits with --grad-checkpoint."
        words = "--grad-checkpoint and "
    per_rank = config.rows_each
    fixed = _without_tokens(plan)
    fewer_rows = range(per_rank, plan.rows, per_rank)
    fitting = largest(lambda rows: planner.at(rows, plan.length, least), limits, {}, fewer_rows, fixed)
    if fitting.value:
        return f"It fits with {words}--batch-size {fitting.value // per_rank * run.world.size}."
    shorter = range(_LENGTHS, plan.length, _LENGTHS)
    fitting = largest(lambda length: planner.at(plan.rows, length, least), limits, {}, shorter, fixed)
    if fitting.value:
        return f"It fits with {words}--max-seq-length {fitting.value}."
    return "No batch size or length makes it fit: take a smaller or a quantised model."


def _smaller(planner: Planner, plan: Forecast, limits: DeviceLimits, *, asked: bool = False) -> str:
    """A sentence on smaller adapters and moments, where bytes are lacking or it is asked for.

    Computing layers again comes first, which changes no result.
    """
    over = plan.bytes.amount - limits.bytes if limits.bytes is not None else 0
    if not planner.run.config.grad_checkpoint or (over < 1 and not asked):
        return ""

    def planned(model: nn.Module, config: TrainConfig) -> int:
        return planner.at(plan.rows, plan.length, planner.least, config=config, model=model).bytes.amount

    said = advice(planner.run, plan.bytes.amount, over, planned)
    return f" {said}" if said else ""


def _from_disk(planner: Planner, limits: DeviceLimits) -> str:
    """A sentence on the option that leaves frozen layers on the disk, if the run would fit with it; else nothing."""
    run = planner.run
    if limits.bytes is None or run.config.trains_base is not None:
        return ""
    # The size in the message is the planned one, and at most the size of the device.
    scale, unit = (10**9, "GB") if limits.bytes >= 10**9 else (10**6, "MB")
    hundredths = limits.bytes * 100 // scale
    room = hundredths * scale // 100
    layers = [layer.module for layer in describe(run.model)]
    frozen = [nbytes(layer.parameters()) - nbytes(layer.trainable_parameters()) for layer in layers]
    plan = dataclasses.replace(planner, brake=None).at(*shape(run), planner.every_layer, layer_inputs="memory")
    too_many = limits.buffers is not None and plan.buffers.amount > limits.buffers
    if too_many or left_on_disk(plan.bytes.amount, frozen, room, least=1) is None:
        return ""
    amount = f"{hundredths / 100:g}{unit}"
    return f" As it is, it fits with --memory {amount}, which leaves layers on the disk and reads them in every pass."


def batch_shape(config: TrainConfig, rows: int, length: int, splits: Splits) -> BatchShape:
    """The largest batch of the data of so many rows and tokens; its images are the same whatever the length."""
    documents = [document for example in splits.train for document in example.documents]
    # The answers to a prompt have its pictures each.
    prompts = [document for document in documents if isinstance(document, PromptExample)]
    answered = [prompt.answered(np.zeros(prompt.most, np.int32)) for prompt in prompts for _ in range(config.rows_each)]
    documents = answered or documents
    return BatchShape(rows, length, largest_batch(documents, rows), _preferences(config, rows, length, splits))


def _preferences(config: TrainConfig, rows: int, length: int, splits: Splits) -> int:
    """The most preferences that a batch has room for; 0 where the loss reads none."""
    if not config.has_preferences:
        return 0
    if not config.pack:
        return rows // 2
    return rows * max(1, min(SLOTS, length // min(preference.positions for preference in splits.train)))


def _widest(model: nn.Module) -> int:
    """The largest rank that makes sense for at least one adapted matrix."""
    bases = [adapter.base for adapter in adapters(model).values() if isinstance(adapter, Adapter)]
    return max((min(dense_weight(base).shape[-2:]) for base in bases), default=_MOST_RANK)


def _positions(model_config: dict[str, Any]) -> int:
    text = model_config.get("text_config") or model_config
    return int(text.get("max_position_embeddings") or _LONGEST)
