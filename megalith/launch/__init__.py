"""Start, connect, watch, stop and restart the processes of a job."""
