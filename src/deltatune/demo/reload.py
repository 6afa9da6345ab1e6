"""Run as a script, in a process of its own: mlx-lm alone, without deltatune, answers with the trained adapter.

usage: python reload.py MODEL ADAPTER QUESTIONS MAX_TOKENS
(QUESTIONS: a file with a JSON list of messages; prints a JSON list of answers.)
"""

import json
import sys
from pathlib import Path

from mlx_lm import batch_generate, load


def main(model_path: str, adapter_path: str, questions_path: str, max_tokens: str) -> None:
    """Print what the model at `model_path`, with the adapter, answers to each question, most likely token by token."""
    model, tokenizer = load(model_path, adapter_path=adapter_path)[:2]
    questions = json.loads(Path(questions_path).read_text(encoding="utf-8"))
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions
    ]
    answers = batch_generate(model, tokenizer, prompts, max_tokens=int(max_tokens)).texts
    if any(name.split(".")[0] == "deltatune" for name in sys.modules):
        raise SystemExit("deltatune was imported: this is to show that mlx-lm alone reads the adapter")
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
