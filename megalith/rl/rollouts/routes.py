"""Expert ids of rollouts (`routes`): the experts that the engine chose for each token in each layer, for training to
replay.

Engine and trainer use different kernels, so a router with nearly equal scores may choose different experts in the two.
The token's log-probabilities then differ by much more than rounding (Ma et al. 2025, Rollout Routing Replay). With
rl.router_replay the trainer's routers use the experts that the engine chose.

Routes are an integer array [tokens, layers with experts, topk] for all tokens of prompt and completion except the last,
which no layer reads. Rollout files and messages between ranks have them as

    {"shape": [tokens, layers, topk], "dtype": "uint8", "data": base64 of the values in this order}

with one byte per value for at most 256 experts, else two.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from megalith.config import ModelConfig
from megalith.errors import DataError

EncodedRoutes = dict[str, Any]
"""Routes as a JSON value."""
DTYPES = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}


def encode_routes(routes: np.ndarray) -> EncodedRoutes:
    """Return expert ids [tokens, layers with experts, topk] as a JSON value."""
    name = "uint16" if routes.size and routes.max() > 255 else "uint8"
    data = base64.b64encode(np.ascontiguousarray(routes, DTYPES[name]).tobytes()).decode()
    return {"shape": list(routes.shape), "dtype": name, "data": data}


def decode_routes(where: str, value: Any) -> np.ndarray | None:
    """Return the expert ids in a JSON value, int16 [tokens, layers with experts, topk]; None for null.

    Args:
        where: file, line and sample, for errors.
        value: JSON value.

    Raises:
        DataError: if the value does not have the format of `encode_routes`.
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
            f"{where} has routes {value!r:.60}; routes must be an object with shape [tokens, layers with experts, "
            "topk], dtype (uint8 or uint16) and data (base64)"
        )
    if len(content) != shape[0] * shape[1] * shape[2] * dtype.itemsize:
        raise DataError(
            f"{where} has routes of shape {shape}, but {len(content)} bytes of data; sample again"
        )
    routes = np.frombuffer(content, dtype).reshape(shape)
    if routes.size and routes.max() >= 2**15:
        raise DataError(
            f"{where} has a route to expert {routes.max()}, but only experts up to {2**15 - 1} are supported; "
            "sample again"
        )
    return routes.astype(np.int16)


def route_bytes(model: ModelConfig) -> int:
    """Return the maximum number of bytes that one token's expert ids take in a server's response, as a JSON list of
    numbers.
    """
    return model.num_layers * model.moe_router_topk * len(f"{model.num_experts}, ")


def server_routes(where: str, pieces: Sequence[Any], tokens: int, model: ModelConfig) -> np.ndarray:
    """Return the expert ids in a server's response, int16 [tokens, layers with experts, topk].

    SGLang returns int32 values of all layers in base64. vLLM returns lists for prompt and completion (0.21) or a .npy
    file in base64, of the layers with experts. Expert ids of the last token are dropped if the response has them.

    Args:
        where: server and completion, for errors.
        pieces: the response's fields, of consecutive tokens; None for an absent one.
        tokens: tokens of prompt and completion without the last one.
        model: configuration of the policy.

    Raises:
        DataError: if there are no routes, or their shape does not match the tokens and the model.
    """
    arrays = [_server_array(where, piece) for piece in pieces if piece is not None]
    if not arrays:
        raise DataError(
            f"{where} has no expert choices (routes), which rl.router_replay needs; start the server with "
            "--enable-return-routed-experts"
        )
    routes = arrays[0]
    if all(array.ndim == 3 and array.shape[1:] == routes.shape[1:] for array in arrays):
        routes = np.concatenate(arrays)[:tokens]
    elif routes.ndim == 1:  # without a shape
        for count in len(model.routed_layers), model.num_layers:
            if routes.size == tokens * count * model.moe_router_topk:
                routes = routes.reshape(tokens, count, model.moe_router_topk)
                break
    if routes.ndim == 3 and routes.shape[1] == model.num_layers:
        routes = routes[:, model.routed_layers]
    check_routes(where, routes, tokens, model)
    return routes.astype(np.int16)


def _server_array(where: str, piece: Any) -> np.ndarray:
    """Return the integers of a list, of a .npy file in base64, or of int32 values in base64."""
    try:
        if isinstance(piece, str):
            content = base64.b64decode(piece, validate=True)
            if content.startswith(np.lib.format.MAGIC_PREFIX):
                array = np.load(io.BytesIO(content), allow_pickle=False)
            else:
                array = np.frombuffer(content, "<i4")
        else:
            array = np.array(piece)
    except (ValueError, TypeError, OSError, EOFError):
        array = None
    if array is None or array.dtype.kind not in "iu":
        raise DataError(f"{where} has routes {piece!r:.60}, which are not integers; see the server's log")
    return array


def join_routes(pieces: Sequence[EncodedRoutes]) -> np.ndarray | None:
    """Decode and concatenate the expert ids of consecutive tokens. None if there are no pieces."""
    decoded = [decode_routes("a rollout", piece) for piece in pieces]
    return np.concatenate(decoded) if decoded else None


def new_routes(routes: np.ndarray | None, earlier: int) -> list[EncodedRoutes]:
    """Encode the expert ids of all tokens after the first `earlier` ones, which were recorded before. Empty if `routes`
    is None.
    """
    return [] if routes is None else [encode_routes(routes[earlier:])]


def check_routes(where: str, routes: np.ndarray, tokens: int, model: ModelConfig) -> None:
    """Raise DataError unless expert ids [tokens, layers with experts, topk] match this model and `tokens` tokens."""
    expected = tokens, len(model.routed_layers), model.moe_router_topk
    if routes.shape != expected:
        raise DataError(
            f"{where} has routes of shape {list(routes.shape)}, but {list(expected)} is needed: "
            "all tokens of prompt and completion except the last, layers with experts, experts "
            "per token; use the model that sampled it"
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
        raise DataError(f"{where} has a token that is routed to the same expert twice; sample again")
