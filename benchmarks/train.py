"""`python -m benchmarks.train …` is `megalith bench …`, without an installed package too."""

from megalith.bench.training_speed import main

if __name__ == "__main__":
    main()
