"""The processes of a job: started, joined, watched, stopped, started again."""
