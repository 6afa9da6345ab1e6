"""Tiny checkpoints in the real format, for every family, written without a download.

`tiny_checkpoint(family, ...)` gives a folder (config.json, model.safetensors, tokenizer files) shared by the whole
session: read it, copy it before changing anything.
"""

import copy
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# One number for the tests and the programs that they start: bits are compared between them.
os.environ.setdefault("DELTATUNE_THREADS", "1")
# NumPy has an OpenBLAS of its own, whose idle threads wait in a loop: a tenth of the time of comparisons with float64,
# and for ever where ranks share too few cores.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# What is printed depends on it: on a dumb terminal rich takes every line for 80 columns wide.
os.environ["TERM"] = "xterm"
# Programs that tests start import tests/quick_start/sitecustomize.py, and so do the processes of pytest-xdist.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([str(Path(__file__).parent / "quick_start"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
).rstrip(os.pathsep)

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx; every test module comes after this one)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import beside
import mlx_headers
import vision
from deltatune.machine import blas, compiling
from families import FAMILIES, NESTED, OTHERS, PARTS, VOCABULARY, with_noise
from slowest_first import slowest_first

mlx_headers.read_once(mlx_headers.kept_in(Path(sys.prefix)))

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all",
    "user and assistant take turns: a question, an answer, then another question",
    "system prompts say how the assistant should answer the user",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", metavar="NAME", help="stop unless OpenBLAS runs these kernels (scripts/test_cpus.py)")
    parser.addoption("--real-sizes", action="store_true", help="the stand-in for a Mac runs real head sizes")
    parser.addoption("--metal", action="store_true", help="the stand-in for an Apple GPU is MLX's default device")
    parser.addoption("--kills", type=int, help="SIGKILLs for each kind of run (scripts/kill_runs.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Trace upstream's compiled functions, as within a step: to fuse operations takes g++ 0.25 s. Programs fuse."""
    if config.getoption("--metal"):
        stand_in = beside.load(Path(__file__).parent / "on_metal" / "stand_in.py")
        stand_in.install(config.cache.mkdir("host_machine"), optimised=False)
    # A run would wait for the disk 25 times. No test cuts the power, and a killed process leaves its files whole.
    os.fsync = lambda descriptor: None
    until_the_end = ExitStack()
    until_the_end.enter_context(compiling.without_kernels())
    config.add_cleanup(until_the_end.close)


def pytest_report_header() -> str:
    return f"BLAS: {blas.status().detail}, kernels: {blas.status().kernels}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """The forced BLAS kernels really run: OPENBLAS_CORETYPE would be overlooked where OpenBLAS cannot follow."""
    wanted, found = session.config.getoption("kernels"), blas.status().kernels
    if wanted is not None and found != wanted:
        raise pytest.UsageError(f"--kernels {wanted}: OpenBLAS runs the kernels of {found}.")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a run that its time limit ends prints no summary."""
    # With pytest-xdist only the first process prints.
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nfailed: {report.nodeid}", flush=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The random numbers of a test and its fixtures, and whether MLX fuses, do not depend on the tests before it."""
    mx.random.seed(0)
    with compiling.without_kernels():
        pass


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Let every second process of pytest-xdist read the files from the last to the first.

    The assertions of a file are rewritten by whoever reads it first, and kept: in a fresh clone each process rewrites
    half of them, in place of all at the same time as the other. The tests are sorted afterwards.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", {}).get("workerid", "")
    if worker.endswith(("1", "3", "5", "7", "9")) and isinstance(collector, pytest.Dir):
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import checks_table

    # Before tests are left out by their other marks.
    config.stash[checks_table.MARKED] = checks_table.cases_of(items)
    # A process of pytest-xdist has this attribute.
    if hasattr(config, "workerinput"):
        slowest_first(items)


def pytest_collection_finish() -> None:
    """Leave modules and tests, which stay to the end, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


def family_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny `family`; `overrides` are text options."""
    flat = copy.deepcopy(FAMILIES[family]) | overrides
    if family not in NESTED:
        return flat
    model_type = flat.pop("model_type")
    return {"model_type": model_type, "text_config": {"model_type": f"{model_type}_text"} | flat}


def new_model(config: dict[str, Any]) -> nn.Module:
    """A model as mlx-lm makes it."""
    from mlx_lm.utils import _get_classes

    model_class, arguments_class = _get_classes(config)
    return model_class(arguments_class.from_dict(copy.deepcopy(config)))


def build_model(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """A model with random weights."""
    mx.random.seed(seed)
    return with_noise(new_model(config))


def write_tokenizer(
    folder: Path,
    vocab_size: int = VOCABULARY,
    chat_template: str | None = CHAT_TEMPLATE,
    more_tokens: list[str] = [],  # noqa: B006
) -> None:
    """Byte-level BPE, padded with unused tokens so that its length equals `vocab_size`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 300),
        special_tokens=SPECIAL_TOKENS + more_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|unused_{index}|>" for index in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        options["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(options, indent=2))


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    quantize: dict[str, Any] | None = None,
    dtype: mx.Dtype = mx.float32,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """config.json, model.safetensors and tokenizer files of a random model. `quantize`: group_size, bits, mode."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(config, seed)
    if dtype != mx.float32:
        model.set_dtype(dtype)
    if quantize is not None:
        from mlx_lm.utils import quantize_model

        settings = {"group_size": 32, "bits": 4, "mode": "affine"} | quantize
        model, config = quantize_model(model, config, **settings)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    text = config.get("text_config", config)
    write_tokenizer(folder, text["vocab_size"], chat_template)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """tiny_checkpoint(family, *, seed=0, quantize=None, dtype=mx.float32, chat_template=..., **text_options) -> Path.

    One folder for each set of arguments and session. Families: FAMILIES above. `quantize` is a dict with any of
    group_size (default 32), bits (4), mode ("affine"). Experts on a CPU need float32.
    """
    made: dict[str, Path] = {}

    def factory(
        family: str,
        *,
        seed: int = 0,
        quantize: dict[str, Any] | None = None,
        dtype: mx.Dtype = mx.float32,
        chat_template: str | None = CHAT_TEMPLATE,
        **overrides: Any,
    ) -> Path:
        key = repr((family, seed, quantize, dtype, chat_template, sorted(overrides.items())))
        if key not in made:
            made[key] = write_checkpoint(
                tmp_path_factory.mktemp(family),
                family_config(family, **overrides),
                seed=seed,
                quantize=quantize,
                dtype=dtype,
                chat_template=chat_template,
            )
        return made[key]

    return factory


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint):
    """A checkpoint of one gated-delta and one attention layer."""
    return tiny_checkpoint("qwen3_5", num_hidden_layers=2, full_attention_interval=2)


@pytest.fixture(scope="session")
def _forecasts():
    return {}


@pytest.fixture
def kept_forecasts(_forecasts, monkeypatch):
    """A step that one test has planned is not planned again: by the model's arrays, the options and the step."""
    from deltatune.plan.forecast import Steps

    plain = Steps.forecast

    def forecast(self: Steps, *step: Any, **options: Any) -> Any:
        arrays = [(name, array.shape, array.dtype) for name, array in tree_flatten(self.model.parameters())]
        trained = [name for name, _ in tree_flatten(self.model.trainable_parameters())]
        key = repr((arrays, trained, dataclasses.replace(self.config, adapter_path="any"), step, options))
        if key not in _forecasts:
            _forecasts[key] = plain(self, *step, **options)
        return _forecasts[key]

    monkeypatch.setattr(Steps, "forecast", forecast)


@pytest.fixture(scope="session")
def full_disk():
    """A file that can be opened but refuses all bytes, as a full disk does. macOS has none."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    return Path("/dev/full")


@pytest.fixture(scope="session")
def peak_bytes():
    """peak_bytes(make) -> bytes beyond those held before, at the peak of evaluating the arrays that `make` returns.

    MLX waits for each operation before it makes room for the next: without a limit a CPU's queue runs up to a hundred
    operations ahead, as far as the machine has time for. Memory given back late is one operation's at most.
    """

    def measure(make: Callable[[], object]) -> int:
        # Earlier tests leave arrays behind that only a collection frees, early or late.
        gc.collect()
        before, limit = mx.get_active_memory(), mx.set_memory_limit(1)
        mx.reset_peak_memory()
        try:
            made = make()
            mx.eval(made)
            return mx.get_peak_memory() - before
        finally:
            mx.set_memory_limit(limit)

    return measure


@pytest.fixture(scope="session")
def host_folder(request, tmp_path_factory):
    """The host machine's compiled kernels, kept between sessions by their text and compiler."""
    cache = getattr(request.config, "cache", None)
    return cache.mkdir("host_machine") if cache else tmp_path_factory.mktemp("host_machine")


@pytest.fixture(scope="session")
def tiny_model():
    """tiny_model(family, seed=0, **text_options) -> a fresh random model, no files, no tokenizer."""

    def factory(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
        return build_model(family_config(family, **overrides), seed)

    return factory


@pytest.fixture(scope="session")
def other_model():
    """other_model(family, **options) -> a fresh random model of OTHERS, or of another family with these options."""

    def factory(family: str, **options: Any) -> nn.Module:
        return new_model({"model_type": family} | OTHERS.get(family, PARTS["common_of_others"]) | options)

    return factory


@pytest.fixture(scope="session")
def tiny_vision_model():
    """tiny_vision_model(family, seed=0, **text_options) -> mlx-vlm's model with random weights."""
    pytest.importorskip("mlx_vlm")

    def factory(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
        text = family_config(family)["text_config"] if family in NESTED else {}
        return vision.build_vision_model(vision.vision_config(family, text, **overrides), seed)

    return factory


@pytest.fixture(scope="session")
def tiny_vision_checkpoint(tmp_path_factory):
    """tiny_vision_checkpoint(family, *, seed=0, **text_options) -> folder, one for each set of arguments."""
    pytest.importorskip("mlx_vlm")
    made: dict[str, Path] = {}

    def factory(family: str, *, seed: int = 0, **overrides: Any) -> Path:
        key = repr((family, seed, sorted(overrides.items())))
        if key not in made:
            folder = made[key] = tmp_path_factory.mktemp(f"vision_{family}")
            text = family_config(family)["text_config"] if family in NESTED else {}
            config = vision.vision_config(family, text, **overrides)
            vision.save_weights(folder, vision.build_vision_model(config, seed))
            (folder / "config.json").write_text(json.dumps(config, indent=2))
            write_tokenizer(folder, config["vocab_size"], vision.CHAT_TEMPLATE, vision.TOKENS)
            vision.write_processor(folder)
        return made[key]

    return factory


@pytest.fixture(autouse=True)
def _records_are_trusted(request, monkeypatch):
    """The small cases of the patches run where they are tested: elsewhere tests that count calls would see them."""
    room = request.path.relative_to(Path(__file__).parent).parts[0]
    asks = request.path.parent.name == "patches" or room in ("doctor", "selftest")
    if not asks and "asked_anew" not in request.fixturenames:
        from deltatune.patches import evidence

        monkeypatch.setattr(evidence, "_outcome", lambda *record: None)


@pytest.fixture
def run(capsys):
    """run(*arguments) -> (exit code, standard output, standard error)."""

    from deltatune import cli

    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def complaint(run):
    """complaint(*arguments) -> the one line with which a command refuses them, with exit code 2."""

    def call(*arguments: object) -> str:
        code, _, error = run(*arguments)
        assert (code, error.count("\n")) == (2, 1), error
        return error

    return call
