"""Use deltatune's gradients in a training loop of your own.

The model comes from mlx-lm, the adapters from mlx-lm, the optimizer and the loop from MLX. Only `patched` is
deltatune's: inside it, the gated-delta layers train through a chunkwise operator instead of a loop over tokens.

    python examples/your_own_loop.py
"""

import time

# Import deltatune before mlx: on a Linux CPU it gives MLX a fast BLAS.
from deltatune import patched
from deltatune.demo.assets import MODEL  # A tiny model that comes with the package. Put your own here.

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
from mlx_lm.tuner.utils import linear_to_lora_layers

LENGTH = 192


def main() -> None:
    """Time one step of mlx-lm as it is, then train under the patches."""
    model, tokenizer = mlx_lm.load(str(MODEL))[:2]
    model.freeze()
    linear_to_lora_layers(model, num_layers=4, config={"rank": 8, "scale": 2.0, "dropout": 0.0})
    model.train()

    text = "The café opens at eight. The baker brings bread at seven, and the oven is hot by then. " * 20
    tokens = mx.array([tokenizer.encode(text)[: LENGTH + 1]])
    optimizer = optim.Adam(learning_rate=1e-3)

    def loss_of(model: nn.Module, tokens: mx.array) -> mx.array:
        logits = model(tokens[:, :-1])
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")

    def step() -> tuple[float, float]:
        """Return the loss before one update, and the seconds that the update took."""
        start = time.perf_counter()
        loss, gradients = nn.value_and_grad(model, loss_of)(model, tokens)
        optimizer.update(model, gradients)
        mx.eval(loss, model.trainable_parameters(), optimizer.state)
        return loss.item(), time.perf_counter() - start

    loss, seconds = step()
    print(f"mlx-lm alone:    loss {loss:.3f}, {seconds:.2f} s")

    # Hold the context around the whole loop. Everything is put back when it ends.
    with patched(model) as report:
        print(report)
        for _ in range(4):
            loss, seconds = step()
            print(f"with deltatune:  loss {loss:.3f}, {seconds:.2f} s")


if __name__ == "__main__":
    main()
