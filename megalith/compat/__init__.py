"""Private PyTorch APIs, each behind a public name that says what it does.

No other part of the package uses a private name of torch (tests/test_architecture.py). tests/compat has a contract test
per name, which runs on every supported version of torch.
"""
