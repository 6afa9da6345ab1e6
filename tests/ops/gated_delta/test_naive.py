"""The recurrence against the float64 oracle: outputs and every gradient, every hard case."""

from __future__ import annotations

import zlib

from deltatune.ops.gated_delta import gated_delta_naive


def test_every_gradient(case, per_channel, run, truth, errors, cotangents, request):
    seed = zlib.crc32(request.node.name.encode())
    inputs = case.inputs(per_channel, seed)
    dy, dstate = cotangents(inputs, seed)
    found = errors(run(gated_delta_naive, inputs, dy, dstate), truth(inputs, dy, dstate))
    assert max(found.values()) <= case.bound, found
