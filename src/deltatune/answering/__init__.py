"""Answers, dialogues, losses and tasks of a model with its adapter, within a bound of memory."""
