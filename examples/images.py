"""Fine-tune a vision-language model on pictures: language model, vision tower and projector.

The pictures are drawn on the spot: trays with coloured parts, as in `deltatune demo vision`. A data line names its
picture and is a chat otherwise. Needs `pip install 'deltatune[vision]'`.

    python examples/images.py
"""

from pathlib import Path

import deltatune.cli
from deltatune.demo.vision import task
from deltatune.demo.vision.assets import MODEL  # A tiny model with a vision tower. Put your own here.

OUTPUT = Path("example-out/images")


def main() -> None:
    """Train by the command line's own entry point, which loads the vision tower since the data have images."""
    # Each line of train.jsonl is {"image": "train/0000.png", "messages": [...]}, with paths from the data's folder.
    splits = task.write(OUTPUT / "data", train=32, valid=8, test=1)
    print((OUTPUT / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])

    run(
        *("train", "--model", MODEL, "--data", OUTPUT / "data", "--adapter-path", OUTPUT / "adapters"),
        *("--parts", "language,vision,projector", "--num-layers", -1),
        *("--batch-size", 4, "--iters", 4, "--steps-per-report", 1, "--learning-rate", 1e-3, "--val-batches", 0),
    )
    run(
        *("generate", "--model", MODEL, "--adapter-path", OUTPUT / "adapters"),
        *("--image", splits["test"][0].file, "--prompt", task.QUESTION, "--max-tokens", 20),
    )


def run(*words: object) -> None:
    """Run a deltatune command in this process, as a notebook may do; stop where it fails."""
    if code := deltatune.cli.main([str(word) for word in words]):
        raise SystemExit(code)


if __name__ == "__main__":
    main()
