"""Expert parallelism: experts spread over ranks."""
