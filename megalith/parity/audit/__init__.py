"""`megalith audit`: rerun the recorded steps of any training job in one process; name what differs, and why."""
