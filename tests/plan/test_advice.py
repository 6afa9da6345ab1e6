"""A refusal's advice on smaller adapters and moments: typed as it stands there, it saves the stated bytes, and fits."""

import json
import re
import shlex

import mlx.core as mx
import pytest

from deltatune.lora import LoRASwitchLinear
from deltatune.lora.experts import projection
from deltatune.machine import backend
from deltatune.plan import fit
from deltatune.plan.device_limits import DeviceLimits
from deltatune.plan.search import Largest

pytestmark = [
    pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)"),
    pytest.mark.usefixtures("kept_forecasts"),
]


@pytest.fixture(scope="module")
def mixture(tiny_checkpoint):
    """A mixture with adapters, gradients and moments that are most of a step's memory."""
    return tiny_checkpoint(
        "qwen3_5_moe", num_experts=64, moe_intermediate_size=64, num_hidden_layers=2, full_attention_interval=2
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory, mixture):
    """The command line of a run of a few tokens, without its command."""
    data = tmp_path_factory.mktemp("data")
    (data / "train.jsonl").write_text((json.dumps({"prompt": "the quick brown fox", "completion": "jumps"}) + "\n") * 4)
    run = ["--batch-size", 1, "--max-seq-length", 32, "--rank", 16, "--optimizer", "adamw"]
    return ["--model", mixture, "--data", data, "--adapter-path", data / "out", "--grad-checkpoint", *run]


@pytest.fixture
def needs(run, monkeypatch):
    """needs(limit, *words) -> the exit code of the plan of a run, the bytes that it needs, and all that is said."""
    monkeypatch.setattr(fit, "largest", lambda *_: Largest(1, more=False))

    def plan(limit, *words):
        monkeypatch.setattr(fit, "device_limits", lambda: DeviceLimits(None, int(limit), "a test", "a test"))
        code, out, err = run("plan", *words)
        assert not err
        return code, round(float(re.search(r"Peak memory: ([\d.]+) MB", out)[1]) * 1e6), out

    return plan


ADVICE = re.compile(
    r"Adapters, their gradients and moments take [\d.]+ MB: (.*?)(?:; (it fits then|that alone is not enough))?\.\s"
)
SAVING = re.compile(r"(--[\w-]+ (?:'[^']*'|\S+)) (?:takes|another) ([\d.]+) MB less")


def advised(said: str) -> tuple[list[tuple[str, float]], str | None]:
    """The flags in a message with the bytes that each saves, and its sentence on all of them."""
    found = ADVICE.search(said + " ")
    assert found, said
    return [(flags, float(saved) * 1e6) for flags, saved in SAVING.findall(found[1])], found[2]


@pytest.mark.parametrize(("share", "rank"), [(0.9, None), (0.6, 8), (0.458, 1)])
def test_advised_flags_save_the_stated_bytes(needs, words, share, rank):
    _, before, _ = needs(10**12, *words)
    limit = share * before
    code, _, said = needs(limit, *words)
    assert code == 1
    savings, end = advised(said)
    assert end == "it fits then"
    pattern = [] if rank is None else [f"""--rank-pattern '{{"*.switch_mlp.*": {rank}}}'"""]
    assert [typed for typed, _ in savings] == ["--optimizer adamw8bit", *pattern]
    for typed, saved in savings:
        words = [*words, *shlex.split(typed)]
        code, after, said = needs(limit, *words)
        # Both are printed to a tenth of a MB.
        assert saved - 1e5 <= before - after <= saved + 2e5
        before = after
    assert code == 0, said


def test_insufficient_savings_are_called_so(needs, words):
    _, before, _ = needs(10**12, *words)
    assert advised(needs(0.44 * before, *words)[2])[1] == "that alone is not enough"
    assert re.search(r"moments take [\d.]+ MB; without them it would not fit, either\.", needs(1e6, *words)[2])


def test_a_run_that_fits_is_advised_on_request_alone(needs, words):
    assert "their gradients and moments" not in needs(10**12, *words)[2]
    savings, end = advised(needs(10**12, *words, "--verbose")[2])
    assert len(savings) == 2
    assert end is None


def test_a_refused_run_is_advised(run, needs, words, monkeypatch):
    _, before, _ = needs(10**12, *words)
    needs(0.9 * before, *words)
    code, _, err = run("train", *words)
    assert code == 2
    assert advised(err.replace(" --force", "\n--force"))[1] == "it fits then"


def test_small_savings_and_chosen_options_are_not_advised(needs, words, tmp_path):
    def advised_on(*words):
        _, before, _ = needs(10**12, *words)
        return needs(0.9 * before, *words)[2]

    assert "--rank-pattern" not in advised_on(*words, "--rank-pattern", '{"q_proj": 4}')
    assert "--optimizer adam" not in advised_on(*words, "--optimizer", "lion")
    assert "less" not in advised_on(*words, "--optimizer", "sgd", "--rank", "1")
    (tmp_path / "run.yaml").write_text("optimizer_config: {adamw: {weight_decay: 0.02}}")
    said = advised_on(*words, "-c", tmp_path / "run.yaml")
    assert "--optimizer adamw8bit (with optimizer_config's adamw under that name) takes" in said


def test_the_memory_of_a_bounded_run_is_advised_on(run, words):
    words = [word for word in words if word != "--grad-checkpoint"]
    code, said, _ = run("plan", *words, "--memory", "1MB")
    assert code == 1
    least = float(re.search(r"tokens take ([\d.]+) MB", said)[1]) * 1e6
    code, said, _ = run("plan", *words, "--memory", f"{int(0.7 * least)}")
    assert code == 1
    savings, end = advised(" ".join(said.split()))
    assert end == "it fits then"
    typed = [word for flags, _ in savings for word in shlex.split(flags)]
    code, said, err = run("plan", *words, *typed, "--memory", f"{int(0.7 * least)}")
    assert code == 0, said + err


def test_full_fine_tuning_is_advised_of_moments_alone(needs, words):
    words = [*words, "--fine-tune-type", "full"]
    _, before, _ = needs(10**12, *words)
    said = needs(0.9 * before, *words)[2]
    assert "Trained weights, their gradients and moments take" in said
    assert re.search(r"--optimizer adamw8bit takes [\d.]+ MB less; it fits then\.", said)


def test_kernels_for_experts_on_nvidia_gpus_get_a_rank_that_they_take(monkeypatch, tiny_model):
    linear = tiny_model("qwen3_5_moe").layers[0].mlp.switch_mlp.up_proj
    adapter = LoRASwitchLinear.from_base(linear, rank=3)
    adapter.unfreeze_adapter()
    adapter.lora_b = adapter.lora_b + 1
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    padded = projection(adapter)
    assert padded.lora_a.shape[1] == padded.lora_b.shape[2] == 8
    assert mx.allclose(padded.lora_b @ padded.lora_a, adapter.lora_b @ adapter.lora_a)

    def total(a):
        adapter.lora_a = a
        found = projection(adapter)
        return (found.lora_b @ found.lora_a).sum()

    assert mx.grad(total)(adapter.lora_a).shape == (8, 3, 64)
    adapter.lora_a, adapter.lora_b = mx.zeros((8, 16, 64)), mx.zeros((8, 64, 16))
    assert projection(adapter).lora_a is adapter["lora_a"]
