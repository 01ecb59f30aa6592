"""Private operators of torch, bound at import under public names."""

from __future__ import annotations

import torch
from torch.nn import functional as F

functional_collectives = torch.ops._c10d_functional
"""Functional collectives, such as all_reduce and wait_tensor: they return new tensors, and torch.compile traces them.
"""

scaled_mm = torch._scaled_mm
"""FP8 matmul: (a, b, scale_a, scale_b, bias=, out_dtype=, use_fast_accum=) -> a · b."""

scaled_grouped_mm = torch._scaled_grouped_mm
"""FP8 matmul by group: (a, b, scale_a, scale_b, offs=, out_dtype=, use_fast_accum=) -> rows."""

grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
"""Matmul by group: (a, b, offs=) -> rows, or one matrix per group if both are 2-dimensional."""

unsafe_view = torch.ops.aten._unsafe_view
"""A reshape that autograd does not treat as a view: (x, size) -> tensor."""

keep_version_counter = torch.autograd._unsafe_preserve_version_counter
"""Context in which in-place changes of a tensor go unnoticed by autograd: (tensor)."""

_aten = torch.ops.aten
cudnn_attention = _aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = _aten._scaled_dot_product_cudnn_attention_backward
varlen_flash_attention = _aten._flash_attention_forward
"""Flash attention of tokens [batch, seq, heads, head_dim], or [tokens, heads, head_dim] with sequence lengths."""
varlen_flash_attention_backward = _aten._flash_attention_backward
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
efficient_attention = _aten._scaled_dot_product_efficient_attention
efficient_attention_backward = _aten._scaled_dot_product_efficient_attention_backward
cpu_attention = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
