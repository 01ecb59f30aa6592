"""Expert parallelism: experts distributed over ranks."""
