"""Python is the command line: keyword arguments are its options, rows in memory are a file's rows, callbacks watch."""

import html
import json

import pytest

from console import called
from deltatune import StopTraining, TrainConfig, export_adapter, finetune, generate, load, plan_run
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError

ROWS = [{"prompt": f"question {at}", "completion": f"answer {at} fox"} for at in range(24)]
OPTIONS = {"rank": 2, "dropout": 0.1, "iters": 2, "batch_size": 2, "steps_per_eval": 1, "save_every": 1}


@pytest.fixture(scope="module")
def by_command(tmp_path_factory):
    """The folder of a run by the command, whose data are a file."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    flags = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = called("train", "--model", MODEL, "--data", folder / "rows.jsonl", "--adapter-path", folder / "out", *flags)
    assert done.returncode == 0, done.stderr
    return folder


def rows_as(kind, folder):
    import datasets

    return {
        "file": folder / "rows.jsonl",
        "list": ROWS,
        "iterator": iter(ROWS),
        "data set": datasets.Dataset.from_list(ROWS),
        "splits": {"train": ROWS[:20], "validation": ROWS[20:]},
    }[kind]


@pytest.mark.parametrize(
    "kind", ["file", "list", *(pytest.param(kind, marks=pytest.mark.weekly) for kind in ("iterator", "data set"))]
)
def test_rows_in_memory_train_to_the_bits_of_the_command(by_command, tmp_path, kind):
    _, result = finetune(MODEL, rows_as(kind, by_command), adapter_path=tmp_path / "out", **OPTIONS)
    one, other = ((folder / "out" / "adapters.safetensors").read_bytes() for folder in (tmp_path, by_command))
    assert one == other
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_parameters"]["rank"] == 2
    assert result.iterations == 2


def test_callbacks_watch_a_run_and_end_it(by_command, tmp_path, capsys):
    seen = []

    def evaluated(record):
        seen.append(("evaluation", record["iteration"]))
        if record["iteration"] == 2:
            raise StopTraining

    watched = {
        "on_report": lambda record: seen.append(("report", record["iteration"])),
        "on_evaluation": evaluated,
        "on_save": lambda folder: seen.append(("save", folder)),
    }
    out = tmp_path / "out"
    options = OPTIONS | {"iters": 4, "steps_per_report": 2, "save_every": 100, "adapter_path": out}
    data = rows_as("splits", by_command)
    loaded, result = finetune(MODEL, data, **watched, **options)
    assert seen == [("evaluation", 0), ("evaluation", 1), ("report", 2), ("evaluation", 2), ("save", out)]
    assert (result.iterations, result.stopped_early) == (2, True)
    assert "Stopping early after iteration 2: a callback ends the run.\n" in capsys.readouterr().out
    assert generate(load(MODEL, adapter=out), "question 3", max_tokens=4) == generate(
        loaded, "question 3", max_tokens=4
    )
    _, result = tuned = finetune(MODEL, data, resume=True, **options)
    assert (result.iterations, result.stopped_early) == (4, False)
    page = html.escape((out / "report.html").read_text(encoding="utf-8"))
    drawn = f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'
    assert (result._repr_html_(), tuned._repr_html_()) == (drawn, drawn)
    (out / "report.html").unlink()
    assert result._repr_html_() is None


def test_a_run_is_planned_from_its_options(capsys):
    planned = plan_run(MODEL, ROWS, rank=2, batch_size=2)
    assert capsys.readouterr().out.startswith("Fits: ")
    assert planned.length.value > 0


@pytest.mark.bad_input("`finetune` with {what}")
@pytest.mark.parametrize(
    ("what", "data", "options", "message"),
    [
        ("a row that is no mapping", [ROWS[0], 3], {}, r"data\[1\]: expected an object with .* got int"),
        ("a row of no known format", [{"prompt": "a"}], {}, r"data\[0\]: no known format"),
        ("a bad row of a split", {"train": ROWS, "valid": [{}]}, {}, r"data\['valid'\]\[0\]: no known format"),
        ("an unknown split", {"trian": ROWS}, {}, r"under train, valid and test, got 'trian'"),
        ("rows in memory and `streaming`", ROWS, {"streaming": True}, "rows from files, and these are in memory"),
        ("an unknown option", ROWS, {"rnak": 8}, r"unknown key 'rnak' \(did you mean 'rank'\?\)"),
        ("an option of another trainer", ROWS, {"r": 8}, r"unknown key 'r' \(did you mean 'rank'\?\)"),
        ("a rank in two places", ROWS, {"rank": 8, "lora_parameters": {"rank": 4}}, "holds rank already"),
        ("a value of a wrong type", ROWS, {"rank": "many"}, "rank: expected a whole number"),
    ],
)
def test_what_cannot_be_trained_on_is_named(tmp_path, what, data, options, message):
    for run in (finetune, plan_run):
        with pytest.raises(UserError, match=message):
            run(MODEL, data, adapter_path=tmp_path / "out", batch_size=1, **options)


@pytest.mark.bad_input("`finetune` with a TrainConfig and further options")
def test_a_config_holds_all_options(tmp_path):
    for run in (finetune, plan_run):
        with pytest.raises(UserError, match=rf"{run.__name__}: a TrainConfig holds all options"):
            run(TrainConfig(adapter_path=tmp_path / "out"), iters=3)


@pytest.mark.bad_input("`export_adapter` with an unknown target or option")
@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("pefft", {}, "export_adapter: expected one of peft, mlx, merged, gguf, gguf-adapter, got 'pefft'"),
        ("mlx", {"out_type": "f16"}, r"export_adapter: unknown key 'out_type' \(did you mean 'outtype'\?\)"),
        ("mlx", {"outtype": "f16"}, "--outtype: --to mlx has no use for it"),
    ],
)
def test_an_export_that_makes_no_sense_is_refused(tmp_path, to, options, message):
    with pytest.raises(UserError, match=message):
        export_adapter(to, MODEL, "adapters", tmp_path / "out", **options)
