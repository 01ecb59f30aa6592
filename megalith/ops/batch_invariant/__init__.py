"""Operators that compute the same bits for a token regardless of the other tokens in the batch.

Ordinary kernels choose their tiles, splits and vector lanes by the number of rows, so that the same token rounds
differently in a batch of 1 and of 64, in a prefill and in a decode step, or in the trainer and in the engine. Here:

    matmul        sums along the inner dimension in one order: on a CPU, in tiles of a fixed number of rows
    attention     keys in blocks of a fixed size, counted from the first key of the document; a masked block changes
                  no bit, so padding, packing and a cache that is longer than the sequence do not matter
    reductions    sums by halves, made of elementwise additions
    elementwise   functions without a correctly rounded result, such as SiLU, in whole vectors

CPUs use PyTorch's operators in fixed shapes, GPUs the Triton kernels of kernels/batch_invariant_kernels.py and
kernels/invariant_matmul.py. Only the forward pass is batch invariant: gradients use the ordinary kernels.
docs/exactness.md has the guarantees and the tests.
"""
