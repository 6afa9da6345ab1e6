"""A script for a new process, in which mlx-lm answers with the trained adapter without deltatune.

usage: python reload.py MODEL ADAPTER QUESTIONS MAX_TOKENS
QUESTIONS is a file with a JSON list of messages. The script prints a JSON list of answers.
"""

import json
import sys
from pathlib import Path

from mlx_lm import batch_generate, load


def main(model_path: str, adapter_path: str, questions_path: str, max_tokens: str) -> None:
    """Print the answers of the model with the adapter; each token is the most likely one."""
    model, tokenizer = load(model_path, adapter_path=adapter_path)[:2]
    questions = json.loads(Path(questions_path).read_text(encoding="utf-8"))
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions
    ]
    answers = batch_generate(model, tokenizer, prompts, max_tokens=int(max_tokens)).texts
    if any(name.split(".")[0] == "deltatune" for name in sys.modules):
        raise SystemExit("deltatune was imported, but this script must show that mlx-lm reads the adapter without it")
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
