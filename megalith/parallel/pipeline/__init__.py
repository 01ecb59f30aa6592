"""Pipeline parallelism: schedules as data, and what executes, checks, simulates and draws them."""
