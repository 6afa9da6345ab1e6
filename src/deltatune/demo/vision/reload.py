"""A script for a new process, in which mlx-vlm answers with the trained adapter without deltatune.

usage: python reload.py MODEL ADAPTER QUESTIONS MAX_TOKENS
QUESTIONS is a file with a JSON list of [path of a picture, message]. The script prints a JSON list of answers.
"""

import json
import sys
from pathlib import Path

from mlx_vlm import generate, load
from mlx_vlm.prompt_utils import apply_chat_template


def main(model_path: str, adapter_path: str, questions_path: str, max_tokens: str) -> None:
    """Print the answers of the model with the adapter; each token is the most likely one."""
    model, processor = load(model_path, adapter_path=adapter_path)
    answers = []
    for picture, message in json.loads(Path(questions_path).read_text(encoding="utf-8")):
        prompt = str(apply_chat_template(processor, model.config, message, num_images=1))
        answered = generate(model, processor, prompt, [picture], max_tokens=int(max_tokens), temperature=0.0)
        answers.append(answered.text)
    if any(name.split(".")[0] == "deltatune" for name in sys.modules):
        raise SystemExit("deltatune was imported, but this script must show that mlx-vlm reads the adapter without it")
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
