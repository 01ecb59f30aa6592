"""Pipeline parallelism: schedules as data, and the code that executes, checks, simulates and draws them."""
