"""Expert parallelism: distributes experts over ranks."""
