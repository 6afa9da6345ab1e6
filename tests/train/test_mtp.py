"""Runs that train the multi-token-prediction head: beside the model, alone, packed, continued, on ranks; refusals."""

import json
import re
import shutil
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from console import called
from deltatune.commands.export import export_adapter
from deltatune.data.batches.batch import collate
from deltatune.data.example import Example
from deltatune.errors import UserError
from deltatune.export.peft_adapter import write_peft
from deltatune.export.peft_import import import_peft
from deltatune.lora import save_adapters
from deltatune.machine import backend, packages
from deltatune.models import adapted_base
from deltatune.models.adapted_base import load, two_ahead
from deltatune.models.checkpoint_writer import merge_checkpoint
from deltatune.models.generate import Sampling, stream, stream_drafted
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train import Trainer
from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
from deltatune.train.reports.screen import Screen
from deltatune.train.setup import prepare, ready, training
from families import weekly_but
from saved_adapters import moved
from transformers_saves import write_as_transformers

pytest.importorskip("mlx_vlm", minversion="0.7.10")
from mtp_heads import headed_save, with_head


@pytest.fixture(scope="session")
def headed(checkpoint, tmp_path_factory):
    """A checkpoint with a head."""
    return with_head(checkpoint, tmp_path_factory.mktemp("headed") / "model")


@pytest.fixture
def heads(options, headed, tmp_path, screen_text):
    """heads(**changes) -> a Trainer of the checkpoint with a head, which it trains."""

    def make(**changes):
        values = {"adapter_path": str(tmp_path / "out"), "mtp": True} | options | {"model": str(headed)} | changes
        run = ready(TrainConfig(**values | {"lora_parameters": LoraConfig(**values["lora_parameters"])}))
        run.prepare()
        return Trainer.of(run, screen_text.screen)

    return make


def adapter_of(folder):
    return mx.load(str(folder / "adapters.safetensors"))


def test_the_model_trains_as_without_its_head(heads, tmp_path, read_metrics, screen_text):
    """The head's loss is no part of the reported loss; its gradient does not reach the model's layers."""
    changes = {"lora_parameters": {"rank": 2, "scale": 10.0}, "grad_clip": None, "iters": 12}
    heads(adapter_path=str(tmp_path / "without"), mtp=False, **changes).run()
    heads(**changes).run()
    without, beside = adapter_of(tmp_path / "without"), adapter_of(tmp_path / "out")
    assert len(beside) == len(without) + 2 * 8
    assert {name for name in beside if name not in without} == {name for name in beside if name.startswith("mtp.")}
    for name, expected in without.items():
        np.testing.assert_allclose(beside[name], expected, rtol=0, atol=1e-5, err_msg=name)
    before, records = (read_metrics(tmp_path / name) for name in ("without", "out"))
    losses = [[record["train_loss"] for record in both if "train_loss" in record] for both in (before, records)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    of_head = [record["mtp_loss"] for record in records if "mtp_loss" in record]
    validated = [record for record in records if "val_loss" in record]
    assert of_head[-1] < 0.98 * of_head[0]
    assert validated[-1]["val_mtp_loss"] < validated[0]["val_mtp_loss"]
    assert all(0 <= record["val_mtp_accepted"] <= 1 for record in validated)
    assert not any("mtp_accepted" in record for record in records)
    shown = screen_text.text()
    assert "and of the multi-token-prediction head" in shown
    assert "mtp loss" in shown
    assert "accepted" in shown


def test_the_head_alone(heads, headed, tmp_path, read_metrics):
    heads(mtp="only").run()
    trained = adapter_of(tmp_path / "out")
    assert {name.partition(".")[0] for name in trained} == {"mtp"}
    records = read_metrics(tmp_path / "out")
    losses = [record for record in records if "val_loss" in record]
    assert losses[-1]["val_loss"] == losses[-1]["val_mtp_loss"] < losses[0]["val_loss"]
    # A model that is loaded without the head leaves it out.
    tokens = mx.array([[5, 6, 7, 8]])
    assert mx.array_equal(load(headed, tmp_path / "out").model(tokens), load(headed).model(tokens))


def test_a_continued_run_has_the_bits_of_a_straight_one(heads, tmp_path):
    """The break is inside an accumulation."""
    heads(adapter_path=str(tmp_path / "straight")).run()
    heads(iters=3).run()
    heads(resume=True).run()
    assert len({(tmp_path / name / "adapters.safetensors").read_bytes() for name in ("straight", "out")}) == 1


@pytest.fixture(scope="module")
def families(headed, tmp_path_factory):
    """families(name) -> the checkpoint of a family, with a head."""
    folders = {"qwen3_5": headed}

    def folder(family):
        if family not in folders:
            folders[family] = headed_save(family, tmp_path_factory.mktemp("families") / family, headed)
        return folders[family]

    return folder


HEADED = ("qwen3_5", "qwen3_next", "nemotron_h", "glm_moe_dsa")


def of_head(family, name):
    """Whether a checkpoint's tensor is of the head, which GLM-5 stores as the layer behind its last one."""
    return name.startswith("model.layers.2." if family == "glm_moe_dsa" else "mtp.")


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "glm_moe_dsa"])
def test_packed_documents_have_the_gradients_that_they_have_alone(families, family):
    """No prediction crosses into the next document, and the head sees no other."""
    headed = families(family)
    config = TrainConfig(mtp="only", pack=True, lora_parameters=LoraConfig(rank=2))
    model = load(headed, mtp=True).model
    prepare(model, config)
    moved(model, seed=1)
    sizes = {9: 14, 40: 9, 70: 2}
    documents = [Example(tuple(range(at, at + size)), (0,) + (1,) * (size - 1), "") for at, size in sizes.items()]
    with training(model, config) as trained:
        model.train()
        of_each = []
        for rows, width, packed in [([documents], 32, True), *(([[one]], 16, False) for one in documents)]:
            batch = arrays(collate(rows, width, packed=packed))
            total, weight, gradients, _ = mean_loss_and_gradients(model, trained.loss, batch)
            sums = {name: gradient * weight for name, gradient in tree_flatten(gradients)}
            of_each.append((total, weight, sums))
    (total, weight, sums), *alone = of_each
    assert weight == sum(one[1] for one in alone) == 12 + 7
    assert total.item() == pytest.approx(sum(one[0].item() for one in alone), rel=1e-5)
    for name, gradient in sums.items():
        expected = sum(one[2][name] for one in alone)
        assert mx.linalg.norm(gradient - expected) <= 1e-4 * mx.linalg.norm(expected), name


@pytest.mark.parametrize("family", weekly_but(HEADED, "qwen3_5", "nemotron_h"))
def test_full_fine_tuning_writes_the_head(heads, families, tmp_path, family):
    headed = families(family)
    heads(model=str(headed), mtp="only", fine_tune_type="full", lora_parameters={}, iters=4).run()
    before, after = (mx.load(str(folder / "model.safetensors")) for folder in (headed, tmp_path / "out"))
    assert before.keys() == after.keys()
    # On so short rows GLM-5's indexer takes every token, so that its norm has no gradient.
    unmoved = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")
    changed = {name for name in before if not mx.array_equal(before[name], after[name])}
    assert changed == {name for name in before if of_head(family, name) and not name.endswith(unmoved)}
    # The run's folder is a base whose head trains on.
    assert load(tmp_path / "out", mtp=True).model.mtp.parameters()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_merge_has_the_trained_head(heads, headed, tmp_path, kind):
    heads(fine_tune_type=kind, lora_parameters={"rank": 2} if kind == "lora" else {}, iters=4).run()
    adapted = load(headed, tmp_path / "out", mtp=True).model
    merge = merge_checkpoint(headed, tmp_path / "out", tmp_path / "merged")
    assert any(name.startswith("mtp.") for name in merge.changed)
    merged = load(tmp_path / "merged", mtp=True).model
    hidden, tokens = mx.random.normal((1, 5, 64)), mx.array([[5, 6, 7, 8, 9]])
    expected = two_ahead(adapted)(hidden, tokens)
    assert mx.allclose(two_ahead(merged)(hidden, tokens), expected, atol=1e-5)
    base = load(headed, mtp=True).model
    assert not mx.allclose(two_ahead(base)(hidden, tokens), expected, atol=1e-3)
    assert mx.allclose(merged(tokens), adapted(tokens), atol=1e-5)


def test_an_adapter_for_mlx_lm_leaves_the_head_out(heads, headed, tmp_path):
    heads(iters=2, lora_parameters={"rank": 2, "scale": 200.0}).run()
    adapter = tmp_path / "out"
    with pytest.raises(ValueError, match=r"mtp\.fc\.lora_a: not an adapter parameter in the model"):
        mlx_lm.load(str(headed), adapter_path=str(adapter))
    lines = export_adapter("mlx", headed, adapter, tmp_path / "mlx")
    assert any("head are left out, since mlx-lm has no class" in line for line in lines)
    tokens = mx.array([[5, 6, 7, 8]])
    theirs, _ = mlx_lm.load(str(headed), adapter_path=str(tmp_path / "mlx"))
    assert mx.allclose(theirs(tokens), load(headed, adapter).model(tokens), atol=1e-5)
    assert not mx.allclose(theirs(tokens), load(headed).model(tokens), atol=1e-3)


@pytest.mark.parametrize("mtp", [True, "only"])
@pytest.mark.parametrize("family", weekly_but(HEADED[:3], "qwen3_5", "nemotron_h"))
def test_the_head_goes_to_peft_and_back(families, tmp_path, family, mtp):
    """It has a folder of its own, which PEFT and vLLM, which refuse or drop unknown modules, do not open."""
    folder = families(family)
    model = load(folder, mtp=True).model
    prepare(model, TrainConfig(mtp=mtp, lora_parameters=LoraConfig(rank=2, dropout=0.1)))
    save_adapters(moved(model), tmp_path / "adapter", {})
    lines = export_adapter("peft", folder, tmp_path / "adapter", tmp_path / "peft")
    said = "The updates of the multi-token-prediction head are the adapter in the folder mtp"
    assert said in "\n".join(lines)
    assert said in (tmp_path / "peft" / "README.md").read_text()
    names = {file.parent.name: mx.load(str(file)) for file in tmp_path.glob("peft/**/adapter_model.safetensors")}
    assert names.keys() == ({"mtp"} if mtp == "only" else {"peft", "mtp"})
    assert all(name.startswith("base_model.model.mtp.") == (part == "mtp") for part in names for name in names[part])
    done = called("import", "--model", folder, "--peft", tmp_path / "peft", "--save-path", tmp_path / "back")
    before, after = (adapter_of(tmp_path / name) for name in ("adapter", "back"))
    assert f"LoRA on {len(before) // 2} modules" in done.stdout
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    with pytest.raises(UserError, match="holds an adapter already"):
        export_adapter("peft", folder, tmp_path / "adapter", tmp_path / "peft")


@pytest.mark.bad_input("an export of an adapter of the multi-token-prediction head alone")
def test_an_adapter_of_the_head_alone_has_no_other_form(heads, headed, tmp_path):
    heads(mtp="only", iters=2).run()
    with pytest.raises(UserError, match="updates the multi-token-prediction head alone, which mlx-lm"):
        export_adapter("mlx", headed, tmp_path / "out", tmp_path / "mlx")
    with pytest.raises(UserError, match=r"updates the multi-token-prediction head alone, for which llama\.cpp"):
        write_peft(headed, tmp_path / "out", tmp_path / "peft", one_alpha=True)


@pytest.mark.bad_input("an import of a head's adapter for a checkpoint without a head")
def test_an_imported_head_needs_one(headed, checkpoint, drafting, tmp_path):
    export_adapter("peft", headed, drafting, tmp_path / "peft")
    with pytest.raises(UserError, match="has no multi-token-prediction head"):
        import_peft(checkpoint, tmp_path / "peft", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("form", ["quantised", "transformers", pytest.param("experts", marks=pytest.mark.weekly)])
def test_other_checkpoints(heads, tiny_checkpoint, tmp_path, read_metrics, form):
    """A mixture's head has experts, a base in 4 bits may have a head of 32, and transformers stores norms minus 1."""
    size = {"num_hidden_layers": 2, "full_attention_interval": 2}
    plain = tiny_checkpoint("qwen3_5" if form == "quantised" else "qwen3_5_moe", **size)
    original = with_head(plain, tmp_path / "original")
    base = tiny_checkpoint("qwen3_5", **size, quantize={}) if form == "quantised" else plain
    if form == "transformers":
        base = write_as_transformers(plain, tmp_path / "plain", mtp=False)
    folder = with_head(base, tmp_path / "model")
    expected, ours = (load(path, mtp=True).model for path in (original, folder))
    hidden, tokens = mx.random.normal((1, 5, 64)), mx.array([[5, 6, 7, 8, 9]])
    of_head = [two_ahead(model)(hidden, tokens) for model in (expected, ours)]
    if form != "quantised":
        assert mx.allclose(*of_head, atol=1e-5)
    heads(model=str(folder), iters=8).run()
    records = [record for record in read_metrics(tmp_path / "out") if "val_loss" in record]
    assert records[-1]["val_mtp_loss"] < records[0]["val_mtp_loss"]
    merge = merge_checkpoint(folder, tmp_path / "out", tmp_path / "merged")
    assert any(name.startswith("mtp.layers.0.mlp.") for name in merge.changed)
    adapted, merged = (load(*paths, mtp=True).model for paths in ((folder, tmp_path / "out"), (tmp_path / "merged",)))
    assert mx.allclose(*(two_ahead(model)(hidden, tokens) for model in (adapted, merged)), atol=1e-5)


@pytest.mark.parametrize("family", weekly_but(HEADED[1:], "nemotron_h"))
def test_other_families_train_merge_and_draft(heads, families, tmp_path, read_metrics, family):
    folder = families(family)
    heads(model=str(folder), iters=8).run()
    records = [record for record in read_metrics(tmp_path / "out") if "val_loss" in record]
    assert records[-1]["val_mtp_loss"] < records[0]["val_mtp_loss"]
    merge = merge_checkpoint(folder, tmp_path / "out", tmp_path / "merged")
    assert any(of_head(family, name) and ".experts.3.up_proj" in name for name in merge.changed)
    adapted, merged = (load(*paths, mtp=True) for paths in ((folder, tmp_path / "out"), (tmp_path / "merged",)))
    hidden, tokens = mx.random.normal((1, 5, 48)), mx.array([[5, 6, 7, 8, 9]])
    assert mx.allclose(*(two_ahead(each.model)(hidden, tokens) for each in (adapted, merged)), atol=1e-5)
    for loaded, sampling in ((adapted, Sampling()), (adapted, Sampling(0.8)), (merged, Sampling())):
        answers = []
        for answer in (stream, stream_drafted):
            mx.random.seed(1)
            answers.append([piece.token for piece in answer(loaded, [5, 6, 7, 8], 12, sampling)])
        assert answers[0] == answers[1]


@pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
def test_the_plan_holds_the_head(headed):
    layout, peaks = ArrayLayout.measured(), []
    for head in (False, True):
        config = TrainConfig(lora_parameters=LoraConfig(rank=2), mtp=head, batch_size=4)
        model = load(headed, mtp=head).model
        prepare(model, config)
        peaks.append(forecast_step(model, config, BatchShape(4, 128), layout).bytes.amount)
    held = sum(array.nbytes for _, array in tree_flatten(model.mtp.parameters()))
    # Beside its weights, the head holds the saved tensors of a layer, of which these are eight.
    assert held + 8 * (4 * 128 * 64 * 4) < peaks[1] - peaks[0] < 0.6 * peaks[0]


@pytest.mark.weekly
def test_two_ranks_train_the_head_as_one_does(heads, headed, options, launch, tmp_path):
    values = options | {"model": str(headed), "mtp": True, "iters": 4, "optimizer": "sgd", "val_batches": 0}
    values |= {"lora_parameters": {"rank": 2, "scale": 10.0}, "lr_schedule": "constant", "learning_rate": 0.05}
    assert launch(values | {"adapter_path": str(tmp_path / "two")}).returncode == 0
    heads(**values).run()
    left, right = adapter_of(tmp_path / "out"), adapter_of(tmp_path / "two")
    assert left.keys() == right.keys()
    for name, expected in left.items():
        np.testing.assert_allclose(right[name], expected, rtol=0, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def drafting(headed, options, tmp_path_factory):
    """The folder of an adapter with which most drafts are right."""
    folder = tmp_path_factory.mktemp("drafting") / "out"
    rates = {"lr_schedule": "constant", "learning_rate": 2e-2, "grad_clip": None, "grad_accumulation_steps": 1}
    lora = {"lora_parameters": LoraConfig(rank=8), "val_batches": 0, "mtp_weight": 1.0}
    config = TrainConfig(
        **options | rates | lora | {"model": str(headed), "mtp": True, "iters": 40}, adapter_path=str(folder)
    )
    run = ready(config)
    run.prepare()
    Trainer.of(run, Screen(shown=False)).run()
    return folder


def test_a_drafted_answer_is_the_undrafted_one(headed, drafting):
    """The trained head's drafts are accepted, and those of the head as it was refused."""
    trained, stale = load(headed, drafting, mtp=True), load(headed, drafting)
    adapted_base.add_head(stale.model, headed)
    shares = []
    for loaded in (trained, stale):
        before = dict(loaded.model.mtp)
        drafted = accepted = 0
        for prompt in range(3):
            tokens = loaded.tokenizer.encode(f"question {prompt} dog")
            plain = list(stream(loaded, tokens, 24, Sampling()))
            with_drafts = list(stream_drafted(loaded, tokens, 24, Sampling()))
            assert [piece.token for piece in with_drafts] == [piece.token for piece in plain]
            assert "".join(piece.text for piece in with_drafts) == "".join(piece.text for piece in plain)
            last, expected = with_drafts[-1], plain[-1]
            for name in ("prompt_tokens", "generation_tokens", "finish_reason"):
                assert getattr(last, name) == getattr(expected, name)
            drafted += last.drafted
            accepted += last.accepted
        assert dict(loaded.model.mtp) == before
        shares.append(accepted / drafted)
    assert shares[0] > 0.5 > 0.2 > shares[1]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.8, top_p=0.9)]
    + [pytest.param(each, marks=pytest.mark.weekly) for each in (Sampling(1.0), Sampling(1.2, min_p=0.02, top_k=20))],
)
def test_a_sampled_answer_has_the_tokens_of_its_seed(headed, drafting, sampling):
    """Each token is drawn from the model's own distribution by a key of the undrafted answer, right draft or wrong."""
    loaded = load(headed, drafting, mtp=True)
    tokens = loaded.tokenizer.encode("question 3 dog")
    accepted = steps = 0
    for seed in range(3):
        answers = []
        for answer in (stream, stream_drafted):
            mx.random.seed(seed)
            answers.append(list(answer(loaded, tokens, 24, sampling)))
        assert [piece.token for piece in answers[1]] == [piece.token for piece in answers[0]]
        accepted += answers[1][-1].accepted
        steps += answers[1][-1].steps
    assert 0 < accepted < 2 * steps


def test_the_command_line_drafts(headed, drafting, data_folder):
    model = ["--model", headed, "--adapter-path", drafting]
    asked = ["generate", *model, "--prompt", "question 3 dog dog", "-m", 20]
    plain, drafted = called(*asked), called(*asked, "--draft")
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout.split("\n[")[0] == plain.stdout.split("\n[")[0]
    assert re.search(r"; \d+ of \d+ drafted tokens accepted; peak memory", drafted.stdout)
    plain, drafted = (called("eval", *model, "--data", data_folder, *more) for more in ([], ["--draft"]))
    loss = re.search(r"Test loss [\d.]+, test perplexity \d+\.\d+", plain.stdout)[0]
    assert re.search(rf"{re.escape(loss)}, mtp loss [\d.]+, accepted 0\.\d+\.", drafted.stdout)
    speeds = r": ([\d.]+) tokens accepted a step, ([\d,.]+) tokens/s; without drafts ([\d,.]+) tokens/s"
    accepted, *both = re.search(rf"prompts of the test set{speeds}", drafted.stdout).groups()
    assert 0.5 < float(accepted) <= 2
    assert all(float(speed.replace(",", "")) > 0 for speed in both)
    assert "without drafts" not in plain.stdout


REFUSED_DRAFTS = {
    "within a bound of memory": (["generate", "--prompt", "a", "--memory", "1GB"], "--draft: read only without"),
    "on tasks": (["eval", "--tasks", "arc_easy"], "--draft: read only without --tasks"),
    "evaluated within a bound": (["eval", "--data", "none", "--memory", "1GB"], "leave --memory out"),
}


@pytest.mark.bad_input("`--draft` with options that it does not serve, or for a checkpoint without a head")
@pytest.mark.parametrize("case", REFUSED_DRAFTS)
def test_options_of_drafts(headed, case):
    (command, *flags), message = REFUSED_DRAFTS[case]
    done = called(command, "--model", headed, "--draft", *flags)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.bad_input("`--draft` for a model whose parameters are not those of mlx-vlm's")
def test_another_model_has_no_drafts(headed, checkpoint):
    loaded = load(headed, mtp=True)
    loaded.model.language_model["more"] = nn.Linear(2, 2)
    with pytest.raises(UserError, match="other parameters than mlx_lm"):
        list(stream_drafted(loaded, [5, 6], 2, Sampling()))
    done = called("generate", "--model", checkpoint, "--draft", "--prompt", "a")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "has no multi-token-prediction head" in done.stderr


@pytest.mark.bad_input("`--mtp` for a checkpoint without a multi-token-prediction head")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_a_checkpoint_without_a_head(tiny_checkpoint, data_folder, family):
    model = tiny_checkpoint(family)
    done = called("train", "--model", model, "--data", data_folder, "--mtp")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"mtp: model {model} ({family}) has no multi-token-prediction head that can be trained" in done.stderr
    assert "of a Qwen3.5, Qwen3-Next, Nemotron-H or GLM-5 model" in done.stderr


@pytest.mark.bad_input("a multi-token-prediction head with tensors that are missing or misshapen")
def test_a_damaged_head(headed, tmp_path):
    folder = shutil.copytree(headed, tmp_path / "model")
    tensors = mx.load(str(folder / "model.safetensors"))
    del tensors["mtp.fc.weight"]
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    with pytest.raises(UserError, match=r"do not fit its config\.json.*fc\.weight"):
        load(folder, mtp=True)


@pytest.mark.bad_input("`--mtp` for rows with images, without mlx-vlm, or with one that computes heads otherwise")
def test_what_the_head_needs(headed, monkeypatch):
    model = load(headed, mtp=True).model
    monkeypatch.setattr(adapted_base, "has_vision", lambda _: True)
    with pytest.raises(UserError, match="trains on text, and the data have images"):
        adapted_base.add_head(model, headed)
    monkeypatch.setattr(type(model.mtp), "_forward_hidden", lambda self, hidden: hidden)
    with pytest.raises(UserError, match="computes multi-token-prediction heads in another way"):
        two_ahead(model)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "mlx_vlm.speculative.drafters.mtp_split", None)
    monkeypatch.setattr(packages, "versions", lambda names: {})
    with pytest.raises(UserError, match=r"mlx-vlm 0\.7\.10 or later, and none is installed"):
        adapted_base.add_head(model, headed)
    monkeypatch.undo()
    monkeypatch.delattr("mlx_vlm.speculative.drafters.mtp_split.MTPSplitter.load")
    monkeypatch.setattr(packages, "versions", lambda names: {"mlx-vlm": "0.7.9"})
    with pytest.raises(UserError, match=r"and 0\.7\.9 is installed: pip install 'mlx-vlm>=0\.7\.10'"):
        adapted_base.add_head(model, headed)


def test_the_command_line_trains_and_plans(headed, checkpoint, data_folder, tmp_path):
    command = ["--data", data_folder, "--mtp", "--iters", 4, "--max-seq-length", 64]
    planned = called("plan", "--model", checkpoint, *command, "--no-mtp")
    assert planned.returncode == 0, planned.stderr
    done = called("train", "--model", headed, *command, "--adapter-path", tmp_path / "out", "--test")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["mtp"] is True
    assert "mtp.fc" in config["lora_parameters"]["keys"]
    assert "mlx-lm refuses adapters of a multi-token-prediction head" in done.stdout
    assert "Test loss" in done.stdout
