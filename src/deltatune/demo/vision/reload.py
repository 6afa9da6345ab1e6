"""Run as a script, in a process of its own: mlx-vlm alone, without deltatune, answers with the trained adapter.

usage: python reload.py MODEL ADAPTER QUESTIONS MAX_TOKENS
(QUESTIONS: a file with a JSON list of [path of a picture, message]; prints a JSON list of answers.)
"""

import json
import sys
from pathlib import Path

from mlx_vlm import generate, load
from mlx_vlm.prompt_utils import apply_chat_template


def main(model_path: str, adapter_path: str, questions_path: str, max_tokens: str) -> None:
    """Print what the model at `model_path`, with the adapter, answers to each picture, most likely token by token."""
    model, processor = load(model_path, adapter_path=adapter_path)
    answers = []
    for picture, message in json.loads(Path(questions_path).read_text(encoding="utf-8")):
        prompt = str(apply_chat_template(processor, model.config, message, num_images=1))
        found = generate(model, processor, prompt, [picture], max_tokens=int(max_tokens), temperature=0.0)
        answers.append(found.text)
    if any(name.split(".")[0] == "deltatune" for name in sys.modules):
        raise SystemExit("deltatune was imported: this is to show that mlx-vlm alone reads the adapter")
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
