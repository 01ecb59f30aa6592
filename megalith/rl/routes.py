"""Routes of rollouts: the experts of each token in each layer while it was sampled, which training replays.

Engine and trainer compute with other kernels, so a router whose scores are nearly equal chooses other experts in one
than in the other, and the log-probability of the token then differs by much more than rounding (Ma et al. 2025, Rollout
Routing Replay). With rl.router_replay the trainer's routers take over the experts that the engine chose.

Routes are an integer array [tokens, layers with experts, topk] for the tokens of prompt and completion but the last,
which no layer reads. Rollout files and messages between ranks have them as

    {"shape": [tokens, layers, topk], "dtype": "uint8", "data": base64 of the values in this order}

with one byte per value for at most 256 experts, else two.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from megalith.config import ModelConfig
from megalith.errors import DataError

EncodedRoutes = dict[str, Any]
"""Routes as a JSON value."""
DTYPES = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}


def encode_routes(routes: np.ndarray) -> EncodedRoutes:
    """Return routes, integers [tokens, layers with experts, topk], as a JSON value."""
    name = "uint16" if routes.size and routes.max() > 255 else "uint8"
    data = base64.b64encode(np.ascontiguousarray(routes, DTYPES[name]).tobytes()).decode()
    return {"shape": list(routes.shape), "dtype": name, "data": data}


def decode_routes(where: str, value: Any) -> np.ndarray | None:
    """Return the routes of a JSON value, int16 [tokens, layers with experts, topk]; None for null.

    Args:
        where: file, line and sample, for errors.
        value: JSON value.

    Raises:
        DataError: if it is not a result of `encode_routes`.
    """
    if value is None:
        return None
    try:
        shape, dtype = value["shape"], DTYPES[value["dtype"]]
        content = base64.b64decode(value["data"], validate=True)
    except (TypeError, KeyError, ValueError, binascii.Error):
        shape = None
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(n) is int and n >= 0 for n in shape)):
        raise DataError(
            f"{where} has routes {value!r:.60}; they are an object with shape (tokens, layers with experts, topk), "
            "dtype (uint8 or uint16) and data (base64)"
        )
    if len(content) != shape[0] * shape[1] * shape[2] * dtype.itemsize:
        raise DataError(
            f"{where} has routes of the shape {shape}, but {len(content)} bytes of data; they are damaged or cut short"
        )
    routes = np.frombuffer(content, dtype).reshape(shape)
    if routes.size and routes.max() >= 2**15:
        raise DataError(f"{where} has a route to expert {routes.max()}; at most {2**15 - 1} are supported")
    return routes.astype(np.int16)


def join_routes(pieces: Sequence[EncodedRoutes]) -> np.ndarray | None:
    """Return the routes of consecutive tokens, encoded in pieces; None without a piece."""
    decoded = [decode_routes("a rollout", piece) for piece in pieces]
    return np.concatenate(decoded) if decoded else None


def new_routes(routes: np.ndarray | None, earlier: int) -> list[EncodedRoutes]:
    """Return the routes of the tokens after the first `earlier`, whose routes were recorded before, as a piece."""
    return [] if routes is None else [encode_routes(routes[earlier:])]


def check_routes(where: str, routes: np.ndarray, tokens: int, model: ModelConfig) -> None:
    """Raise DataError if routes [tokens, layers with experts, topk] are not those of `tokens` tokens of this model."""
    expected = tokens, len(model.routed_layers), model.moe_router_topk
    if routes.shape != expected:
        raise DataError(
            f"{where} has routes of the shape {list(routes.shape)}, but {list(expected)} is needed: the tokens of "
            "prompt and completion but the last, the layers with experts, and the experts per token; use the model "
            "that sampled it"
        )
    if not routes.size:
        return
    if routes.min() < 0 or routes.max() >= model.num_experts:
        raise DataError(
            f"{where} has routes to experts {routes.min()} to {routes.max()}, but the model has the experts 0 to "
            f"{model.num_experts - 1}; use the model that sampled it"
        )
    in_order = np.sort(routes, -1)
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise DataError(
            f"{where} has a token that is routed to the same expert twice; its routes are damaged"
        )
