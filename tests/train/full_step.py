"""Prints the graph of a full fine-tuning's step on an NVIDIA GPU as JSON; test_buffers.py runs it.

There are three lists of pairs, of a primitive's kind and its number of elements: those of the forward and backward
pass, those of the update, and those whose outputs are the gradients. The pretended machine would stay in the caches of
a process that runs tests.
"""

import json
import sys
from pathlib import Path

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import mlx.core as mx

from conftest import build_model, family_config
from deltatune.options.config import TrainConfig
from deltatune.plan import traced_step
from deltatune.plan.array_layout import ArrayLayout
from deltatune.train.setup import prepare
from deltatune.train.updates import bundles
from pretended import pretended

# Matrices stay separate, as they are in a model of billions of parameters.
bundles.MOST_NUMBERS["cuda"] = 1000
OPTIONS = {"hidden_size": 128, "num_hidden_layers": 2, "full_attention_interval": 2}


def main():
    model = build_model(family_config("qwen3_5", **OPTIONS))
    model.set_dtype(mx.bfloat16)
    config = TrainConfig(fine_tune_type="full")
    with pretended("cuda"):
        prepare(model, config)
        built = traced_step.trace_step(model, config, traced_step.BatchShape(2, 512), ArrayLayout.measured())
    first, update = built.phases
    lists = first.order, update.order, first.outputs[-built.before.counts["gradients"] - 2 : -2]
    print(json.dumps([[(node.kind, node.size) for node in nodes] for nodes in lists]))


main()
