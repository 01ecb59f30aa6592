"""Reshaping of device meshes. Both functions create process groups, so every rank of the mesh calls them."""

from __future__ import annotations

from torch.distributed import DeviceMesh


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the dimensions of `mesh` flattened into one with this name."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the one-dimensional `mesh` as a mesh of these sizes and names."""
    return mesh._unflatten(0, sizes, names)
