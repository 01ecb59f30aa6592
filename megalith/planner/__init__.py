"""Memory, FLOPs, layout and traffic of any job, without its devices."""
