"""Replays thirty training steps and compares them with recorded runs of transformers and PEFT, which need no install.

A recording (recorded/*.json) holds names, shapes, losses and projections; every weight is drawn again from its name.
"""
