"""Streams: data that is read and tokenized during training.

stream.py is the interface to the loader, stream_shards.py reads the shards of text, lane.py makes samples of them in a
deterministic order, lane_worker.py runs lanes in worker processes, and text_stream.py and blended_stream.py are the
datasets of a run.
"""
