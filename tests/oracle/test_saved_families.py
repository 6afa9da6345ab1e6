"""Tiny models that transformers itself draws and saves have the same logits and losses here, packed too. Live."""

import json
import random
import runpy
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from conftest import write_tokenizer
from console import called
from deltatune.errors import UserError
from deltatune.models.known_faults import known_faults
from deltatune.models.load import load, load_model

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("saves")]

SCRIPTS = Path(__file__).parents[2] / "scripts" / "families"
TABLE = runpy.run_path(str(SCRIPTS / "saved_families.py"))
ROWS = np.random.default_rng(0).integers(10, 300, (2, 40))
# Differences of 1e-7 a sum, of logits up to 6, over four layers of sums of up to 96 products.
TOLERANCE = 1e-4
# In fp32 transformers' own gated delta rule is 1e-4 off that in float64, some five times its error elsewhere.
TOLERANCE_OF_STATES = 1e-3
# The loss of a token is off by twice as much as a logit at most, and each is some 5.
LOSS_TOLERANCE = 2e-5
LENGTHS = (60, 45, 70, 52)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of letters, each longer than every window."""
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz .,", k=length)) for length in LENGTHS]
    for split in ("train", "valid"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def trained(folder: Path, data: Path, *options: object) -> tuple[float, dict[str, mx.array]]:
    """The loss of the first step, and the adapter behind it, which is its gradient where SGD's rate is 1."""
    out = folder / f"out{len(options)}"
    fixed = ["--iters", 1, "--val-batches", 0, "--optimizer", "sgd", "--learning-rate", 1]
    done = called("train", "--model", folder, "--data", data, "--adapter-path", out, *fixed, *options)
    if done.returncode:
        raise UserError(done.stderr)
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    return line["train_loss"], mx.load(str(out / "adapters.safetensors"))


def loss(model, documents: list[list[int]]) -> float:
    """The mean cross-entropy of the tokens of documents, each by itself, by torch's model."""
    import torch
    import torch_saves

    losses = []
    for tokens in documents:
        logits = torch.from_numpy(torch_saves.logits(model, np.array([tokens])))[0, :-1].double()
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none").tolist()
    return sum(losses) / len(losses)


@pytest.mark.parametrize("case", TABLE["SAVED"])
def test_a_family_as_transformers_saves_it(case, data, tmp_path):
    """Logits and the first loss are torch's; packed documents have the loss and the gradients that they have alone."""
    import torch_saves

    has_states = case in TABLE["WITH_STATES"]
    model = torch_saves.save(case, tmp_path)
    write_tokenizer(tmp_path, torch_saves.SIZES["vocab_size"], None)
    ours, config = load_model(tmp_path)
    assert not any(ROWS.shape[1] in fault.lengths for fault in known_faults(config))
    found = ours(mx.array(ROWS))
    found = np.array((found if isinstance(found, mx.array) else found.logits).astype(mx.float32))
    bound = TOLERANCE_OF_STATES if has_states else TOLERANCE
    assert np.abs(found - torch_saves.logits(model, ROWS)).max() < bound

    tokenizer = load(tmp_path).tokenizer
    texts = [json.loads(line)["text"] for line in (data / "train.jsonl").read_text().splitlines()]
    documents = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    assert min(map(len, documents)) > 2 * TABLE["ORIGINAL"]
    alone, gradients = trained(tmp_path, data, "--batch-size", len(texts))
    assert alone == pytest.approx(loss(model, documents), rel=LOSS_TOLERANCE)

    packing = ["--pack", "--max-seq-length", sum(map(len, documents)) + 8, "--batch-size", 1]
    if case in TABLE["UNPACKED"]:
        with pytest.raises(UserError, match="packing"):
            trained(tmp_path, data, *packing)
        return
    packed, found = trained(tmp_path, data, *packing)
    assert packed == pytest.approx(alone, rel=LOSS_TOLERANCE)
    # As in scripts/families/one_type.py: of the largest gradient.
    largest = max(mx.linalg.norm(array).item() for name, array in gradients.items() if name.endswith("lora_b"))
    for name, array in gradients.items():
        if name.endswith("lora_b"):
            assert mx.linalg.norm(found[name] - array).item() < bound * largest, name


@pytest.mark.parametrize("family", TABLE["REFUSED"])
def test_a_family_that_mlx_lm_cannot_load_is_refused(family, tmp_path):
    import torch_saves

    torch_saves.save(family, tmp_path)
    with pytest.raises(UserError):
        load_model(tmp_path)
