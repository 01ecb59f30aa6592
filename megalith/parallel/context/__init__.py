"""Context parallelism: shards sequences over ranks."""
