"""Train on documents of very different lengths without wasting rows on padding.

With `pack`, several documents share one row. Attention, recurrence and short convolution restart at each of them, so a
packed document gets the gradients that it gets alone. The second half of this example measures that.

    python examples/packed_documents.py
"""

import random
from pathlib import Path

# Import deltatune before mlx: on a Linux CPU it gives MLX a fast BLAS.
from deltatune import finetune, load, patched
from deltatune.demo.assets import MODEL  # A tiny model that comes with the package. Put your own here.
from deltatune.ops.segments import segments

import mlx.core as mx

OUTPUT = Path("example-out/packed_documents")
SENTENCES = ("The oven is hot.", "The milk is gone.", "The door is open.", "A table by the window is free.")


def train() -> None:
    """Fine-tune on packed rows of 256 tokens, made of 60 documents of 1 to 14 sentences."""
    draw = random.Random(0)
    finetune(
        MODEL,
        data=[{"text": " ".join(draw.choices(SENTENCES, k=draw.randint(1, 14)))} for _ in range(60)],
        adapter_path=OUTPUT / "adapters",
        pack=True,
        max_seq_length=256,
        grad_checkpoint="auto",  # As few layers are recomputed as the memory allows; long rows may need them all.
        learning_rate=1e-3,
        batch_size=2,
        iters=4,
        steps_per_report=2,
    )


def show_that_documents_stay_apart() -> None:
    """Compare the logits of a document that follows another one in its row with those that it has alone."""
    loaded = load(MODEL)
    first = loaded.tokenizer.encode("The oven is hot.")
    second = loaded.tokenizer.encode("A table by the window is free.")
    row = mx.array([first + second])
    owner = mx.array([[0] * len(first) + [1] * len(second)])

    loaded.model.train()
    with patched(loaded.model):
        alone = loaded.model(mx.array([second]))
        joined = loaded.model(row)[:, len(first) :]
        with segments(owner):
            packed = loaded.model(row)[:, len(first) :]
    print(f"largest difference without segments: {mx.abs(joined - alone).max().item():.1e}")
    print(f"largest difference with segments:    {mx.abs(packed - alone).max().item():.1e}")


if __name__ == "__main__":
    train()
    show_that_documents_stay_apart()
