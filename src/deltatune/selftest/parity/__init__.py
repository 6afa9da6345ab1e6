"""Thirty training steps replayed against recorded runs of transformers and PEFT, which need not be installed.

A recording (recorded/*.json) holds names, shapes, losses and projections; every weight is drawn again from its name.
"""
