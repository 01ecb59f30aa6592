"""Pipeline parallelism: schedules as data, and code to execute, check, simulate and draw them."""
