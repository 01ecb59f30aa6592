"""`megalith audit`: rerun the recorded steps of any training job in one process and name what departs, and why."""
