"""Train in several processes: on several GPUs, several Macs, or, to try it, on one CPU.

`mlx.launch` starts this script once for each process. Each trains on its own rows of every batch, gradients are summed
over all of them, and process 0 prints and writes. Nothing in the script itself is about processes.

    mlx.launch -n 2 python examples/several_processes.py
"""

from pathlib import Path

# Import deltatune before mlx: on a Linux CPU it gives MLX a fast BLAS.
from deltatune import finetune
from deltatune.demo.assets import MODEL  # A tiny model that comes with the package. Put your own here.

OUTPUT = Path("example-out/several_processes")
LINES = [{"prompt": f"Who has {n} cups?", "completion": f"Table {n}."} for n in range(1, 9)]


def main() -> None:
    """Fine-tune; every process runs the same lines."""
    finetune(
        MODEL,
        data=LINES,
        adapter_path=OUTPUT / "adapters",
        learning_rate=1e-3,
        batch_size=4,  # Rows of all processes together: two each, where there are two.
        iters=4,
        steps_per_report=2,
        max_seq_length=64,
    )


if __name__ == "__main__":
    main()
