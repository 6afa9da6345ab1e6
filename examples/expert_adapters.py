"""Train adapters on the experts of a mixture-of-experts model, and see which experts moved.

An expert that got no token in the whole run stays as it is, since weight decay, which moves every expert, is off.

    python examples/expert_adapters.py
"""

from pathlib import Path

# Import deltatune before mlx: on a Linux CPU it gives MLX a fast BLAS.
from deltatune import PlannedRun, TrainConfig
from deltatune.demo.assets import MODEL  # A tiny mixture of 16 experts a layer. Put your own model here.

import mlx.core as mx
from mlx.utils import tree_flatten

OUTPUT = Path("example-out/expert_adapters")
LINES = [
    {"prompt": "What is in the oven?", "completion": "Bread."},
    {"prompt": "Who brings the bread?", "completion": "The baker."},
    {"prompt": "When does the café open?", "completion": "At eight."},
    {"prompt": "Is the milk gone?", "completion": "Yes."},
]


def main() -> None:
    """Adapt the experts alone, train a few steps, and count the experts that have changed."""
    config = TrainConfig.of(
        model=MODEL,
        data=LINES,
        adapter_path=OUTPUT / "adapters",
        # Patterns are matched against a module's full path, or its path within its layer.
        keys=["mlp.switch_mlp.*"],
        rank=4,
        num_layers=1,
        optimizer_config={"adamw": {"weight_decay": 0.0}},
        learning_rate=1e-3,
        batch_size=1,
        iters=3,
        steps_per_report=1,
        max_seq_length=64,
    )
    # finetune(config) does all of this at once; here the adapters are looked at before they train.
    run = PlannedRun.of(config)
    before = dict(tree_flatten(run.model.trainable_parameters()))
    run.trainer().run()

    # The first axis of every expert adapter counts the experts.
    for name, now in tree_flatten(run.model.trainable_parameters()):
        moved = mx.any(now != before[name], axis=(1, 2)).sum().item()
        print(f"{name}: {moved} of {len(now)} experts moved")


if __name__ == "__main__":
    main()
