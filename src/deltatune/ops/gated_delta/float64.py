"""The gated delta recurrence and its backward pass in float64 NumPy, the reference of the tests and the self-test.

It is independent of the operator, of which it imports nothing. All arguments are NumPy arrays in the shapes of
`gated_delta`; without `beta` nothing is erased, as in `linear_attention`.
"""

from __future__ import annotations

import numpy as np

INPUTS = ("q", "k", "v", "log_g", "beta", "initial_state")


def recurrence(inputs: dict, dy: np.ndarray, dstate: np.ndarray) -> dict:
    """Compute the recurrence in float64: `y`, the final `state`, and the gradient of each input by its name.

    `inputs` are the arrays named in INPUTS (or all but `beta`), and `mask` and `segments` where there are any; `dy` [B,
    T, Hv, Dv] and `dstate` [B, Hv, Dv, Dk] are the cotangents of y and of the final state.
    """
    repeats = inputs["v"].shape[2] // inputs["k"].shape[2]
    wide = {name: np.asarray(inputs[name], np.float64) for name in INPUTS if inputs.get(name) is not None}
    erases = "beta" in wide
    wide.setdefault("beta", np.ones(inputs["v"].shape[:3]))
    wide["q"], wide["k"] = (np.repeat(wide[name], repeats, axis=2) for name in ("q", "k"))
    per_channel = wide["log_g"].ndim == 4
    if not per_channel:
        wide["log_g"] = wide["log_g"][..., None]
    batch, length = inputs["v"].shape[:2]
    steps = np.ones((batch, length), bool) if inputs.get("mask") is None else np.asarray(inputs["mask"])
    restarts = np.zeros((batch, length), bool)
    if inputs.get("segments") is not None:
        restarts[:, 1:] = np.diff(np.asarray(inputs["segments"]), axis=1) != 0

    y, state, tape = _forwards(wide, steps, restarts, erases)
    gradients = _backwards(wide, steps, restarts, tape, erases, dy.astype(np.float64), dstate.astype(np.float64))
    for name in ("q", "k"):
        folded = gradients[name].reshape(batch, length, -1, repeats, gradients[name].shape[-1])
        gradients[name] = folded.sum(axis=3)
    if not per_channel:
        gradients["log_g"] = gradients["log_g"].sum(axis=-1)
    if not erases:
        del gradients["beta"]
    return {"y": y, "state": state} | gradients


def _forwards(wide: dict, steps: np.ndarray, restarts: np.ndarray, erases: bool) -> tuple:
    state = wide["initial_state"]
    tape, outputs = [], []
    for t in range(steps.shape[1]):
        state = np.where(restarts[:, t, None, None, None], 0.0, state)
        q, k, v, beta = (wide[name][:, t] for name in ("q", "k", "v", "beta"))
        decayed = state * np.exp(wide["log_g"][:, t])[:, :, None, :]
        error = v - erases * np.einsum("bhvk,bhk->bhv", decayed, k)
        delta = beta[..., None] * error
        after = decayed + np.einsum("bhv,bhk->bhvk", delta, k)
        y = np.einsum("bhvk,bhk->bhv", after, q)
        on = steps[:, t, None, None]
        tape.append((state, decayed, error, delta, after))
        outputs.append(np.where(on, y, 0.0))
        state = np.where(on[..., None], after, state)
    return np.stack(outputs, axis=1), state, tape


def _backwards(
    wide: dict,
    steps: np.ndarray,
    restarts: np.ndarray,
    tape: list,
    erases: bool,
    dy: np.ndarray,
    dlast: np.ndarray,
) -> dict:
    gradients = {name: np.zeros(np.broadcast_shapes(wide[name].shape)) for name in INPUTS[:-1]}
    gradients["log_g"] = np.zeros_like(wide["k"])
    dstate = dlast
    for t in reversed(range(steps.shape[1])):
        before, decayed, error, delta, after = tape[t]
        q, k, beta = (wide[name][:, t] for name in ("q", "k", "beta"))
        gate = np.exp(wide["log_g"][:, t])[:, :, None, :]
        on = steps[:, t, None, None]
        dafter = dstate + np.einsum("bhv,bhk->bhvk", dy[:, t], q)
        ddelta = np.einsum("bhvk,bhk->bhv", dafter, k)
        derror = beta[..., None] * ddelta
        ddecayed = dafter - erases * np.einsum("bhv,bhk->bhvk", derror, k)
        dk = np.einsum("bhvk,bhv->bhk", dafter, delta) - erases * np.einsum("bhvk,bhv->bhk", decayed, derror)
        gradients["q"][:, t] = np.where(on, np.einsum("bhvk,bhv->bhk", after, dy[:, t]), 0.0)
        gradients["k"][:, t] = np.where(on, dk, 0.0)
        gradients["v"][:, t] = np.where(on, derror, 0.0)
        gradients["beta"][:, t] = np.where(on[..., 0], (ddelta * error).sum(axis=-1), 0.0)
        gradients["log_g"][:, t] = np.where(on, (ddecayed * before * gate).sum(axis=2), 0.0)
        dstate = np.where(on[..., None], ddecayed * gate, dstate)
        # A restart forgets whatever came before, so nothing flows back across it or into its gate.
        forgets = restarts[:, t, None, None]
        gradients["log_g"][:, t] = np.where(forgets, 0.0, gradients["log_g"][:, t])
        dstate = np.where(forgets[..., None], 0.0, dstate)
    return gradients | {"initial_state": dstate}
