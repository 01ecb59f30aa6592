"""`megalith audit`: rerun the recorded steps of any training job in one process, and name the differences and their
causes.
"""
