"""Access to the local shard of a parameter that may be a DTensor, without importing torch.distributed."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor


def local(parameter: Tensor) -> Tensor:
    """Return this process's shard of a DTensor. A plain tensor is returned unchanged.

    The gradient of the shard is assumed to have the parameter's placement. If a rank uses a replicated parameter for
    only some tokens or heads, its gradient is partial;
    `megalith.parallel.tensor.partial_gradients.reduce_partial_gradients` sums these gradients after the backward pass.
    """
    from torch.distributed.tensor import DTensor  # takes a second, which `megalith plan` would wait for

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_shape_and_offset(
    parameter: Tensor, axes: Collection[str] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the local shard and its offset in the global tensor, per dimension.

    With `axes`, compute them as if only the mesh axes with these names sharded the tensor.
    """
    from torch.distributed.tensor import DTensor

    shape, offset = list(parameter.shape), [0] * parameter.ndim
    if not isinstance(parameter, DTensor):
        return tuple(shape), tuple(offset)
    mesh = parameter.device_mesh
    # FSDP2 shards last what other axes have sharded before, although its mesh dimension comes first: its placements
    # then have a split_factor. torch's own function orders uneven shards differently.
    cuts = [
        (hasattr(p, "split_factor"), i, p.dim)
        for i, p in enumerate(parameter.placements)
        if hasattr(p, "dim") and (axes is None or mesh.mesh_dim_names[i] in axes)
    ]
    for _, axis, dim in sorted(cuts):
        part = -(-shape[dim] // mesh.size(axis))
        begin = min(mesh.get_coordinate()[axis] * part, shape[dim])
        shape[dim], offset[dim] = min(part, shape[dim] - begin), offset[dim] + begin
    return tuple(shape), tuple(offset)
