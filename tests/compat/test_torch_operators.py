"""Contract of torch's private operators: their arguments and, where a CPU has them, their results."""

import pytest
import torch
from torch.nn import functional as F

from megalith.compat import torch_operators as operators

ATTENTION = {  # the arguments that the package passes
    "cudnn_attention": "query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, "
    "return_debug_mask, scale",
    "cudnn_attention_backward": "grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, "
    "cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale",
    "varlen_flash_attention": "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, "
    "return_debug_mask, scale, window_size_left, window_size_right",
    "varlen_flash_attention_backward": "grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, "
    "max_k, dropout_p, is_causal, rng_state, unused, scale, window_size_left, window_size_right",
    "flash_attention": "query, key, value",
    "flash_attention_backward": "grad_out, query, key, value",
    "efficient_attention": "query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale",
    "efficient_attention_backward": "grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, "
    "philox_offset, dropout_p, grad_input_mask, is_causal, scale",
    "cpu_attention": "query, key, value, dropout_p, is_causal, attn_mask, scale",
    "cpu_attention_backward": "grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale",
}
COLLECTIVES = {
    "all_gather_into_tensor": "input, group_size, group_name",
    "all_gather_into_tensor_out": "input, group_size, group_name, out",
    "all_reduce": "input, reduce_op, group_name",
    "all_to_all_single": "input, output_split_sizes, input_split_sizes, group_name",
    "reduce_scatter_tensor": "input, reduce_op, group_size, group_name",
    "wait_tensor": "tensor",
}


def argument_names(operator) -> list[str]:
    return [argument.name for argument in operator.default._schema.arguments]


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_operators_begin_with_the_arguments_that_are_passed(name):
    expected = ATTENTION[name].split(", ")
    assert argument_names(getattr(operators, name))[: len(expected)] == expected


def test_attention_of_cpus_returns_output_and_log_sum_exp_and_has_a_backward():
    query, key, value, grad = torch.randn(4, 1, 2, 5, 8)
    out, lse = operators.cpu_attention(query, key, value, 0.0, True, scale=0.5)
    scores = (query @ key.mT * 0.5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ value)
    d_value = operators.cpu_attention_backward(grad, query, key, value, out, lse, 0.0, True, scale=0.5)[2]
    torch.testing.assert_close(d_value, scores.softmax(-1).mT @ grad)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_functional_collectives_have_the_arguments_that_are_passed(name):
    assert argument_names(getattr(operators.functional_collectives, name)) == COLLECTIVES[name].split(", ")


def test_functional_collectives_return_what_wait_tensor_completes(single_process_group):
    group = torch.distributed.group.WORLD.group_name
    begun = operators.functional_collectives.all_reduce(torch.arange(3.0), "sum", group)
    assert operators.functional_collectives.wait_tensor(begun).tolist() == [0.0, 1.0, 2.0]


def test_scaled_mm_takes_scales_bias_dtype_and_fast_accumulation():
    names = ["self", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum"]
    assert argument_names(torch.ops.aten._scaled_mm) == names and operators.scaled_mm is torch._scaled_mm
    grouped = argument_names(torch.ops.aten._scaled_grouped_mm)
    assert {"offs", "out_dtype", "use_fast_accum"} <= set(grouped)
    assert grouped[:4] == ["self", "mat2", "scale_a", "scale_b"]
    assert operators.scaled_grouped_mm is torch._scaled_grouped_mm


def test_grouped_mm_multiplies_groups_of_rows():
    rows, matrices = torch.randn(16, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16()
    ends = torch.tensor([8, 16], dtype=torch.int32)
    expected = torch.cat([rows[:8] @ matrices[0], rows[8:] @ matrices[1]])
    torch.testing.assert_close(
        operators.grouped_mm(rows, matrices, offs=ends), expected, rtol=2e-2, atol=2e-2
    )
    assert operators.grouped_mm is getattr(F, "grouped_mm", torch._grouped_mm)


def test_unsafe_view_is_no_view_for_autograd():
    x = torch.ones(2, 3, requires_grad=True) * 1
    y = operators.unsafe_view(x, (6,))
    assert y.shape == (6,) and y.data_ptr() == x.data_ptr() and y._base is None


def test_keep_version_counter_hides_changes():
    x = torch.zeros(2)
    with operators.keep_version_counter(x):
        x.add_(1)
    assert x.tolist() == [1.0, 1.0] and x._version == 0
