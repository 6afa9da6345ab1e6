"""Train in several processes: on several GPUs, several Macs, or, to try it, on one CPU.

`mlx.launch` starts this script once for each process. Each trains on its own rows of every batch, gradients are summed
over all of them, and process 0 prints and writes. Nothing in the script itself is about processes.

    mlx.launch -n 2 python examples/several_processes.py
"""

import json
from pathlib import Path

# Import deltatune before mlx: on a Linux CPU it gives MLX a fast BLAS.
from deltatune import TrainConfig, finetune
from deltatune.demo.assets import MODEL  # A tiny model that comes with the package. Put your own here.

import mlx.core as mx

OUTPUT = Path("example-out/several_processes")
LINES = [{"prompt": f"Who has {n} cups?", "completion": f"Table {n}."} for n in range(1, 9)]


def main() -> None:
    """Fine-tune; every process runs the same lines."""
    data = OUTPUT / "data"
    if mx.distributed.init().rank() == 0:
        data.mkdir(parents=True, exist_ok=True)
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, LINES)) + "\n", encoding="utf-8")
    # The others wait until the data are there.
    mx.eval(mx.distributed.all_sum(mx.array(0.0)))

    config = TrainConfig(
        model=str(MODEL),
        data=str(data),
        adapter_path=str(OUTPUT / "adapters"),
        learning_rate=1e-3,
        batch_size=4,  # Rows of all processes together: two each, where there are two.
        iters=4,
        steps_per_report=2,
        max_seq_length=64,
    )
    finetune(config)


if __name__ == "__main__":
    main()
