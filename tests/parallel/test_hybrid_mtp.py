"""Multi-token prediction after layers with a single branch: layouts compute what one process computes."""

import pytest
from default_cases import in_full

from megalith.config import RunConfig
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import run_job

MODEL = dict(
    num_layers=4, mtp_num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=64,
    max_position_embeddings=32, position_embedding_type="none", normalization="RMSNorm", add_bias_linear=False,
    hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.1, mamba_num_heads=4, mamba_head_dim=8,
    mamba_num_groups=2, mamba_state_dim=8,
)  # fmt: skip
MODELS = {
    "M-*-": MODEL | dict(hybrid_layer_pattern="M-*-"),
    "ME*-": MODEL | dict(hybrid_layer_pattern="ME*-", num_experts=4, moe_grouped_gemm=False),
}


def config(name: str, layout: str | None) -> RunConfig:
    return RunConfig.from_tree(
        dict(
            model=MODELS[name],
            parallel=LAYOUTS[layout].parallel if layout else {},
            data=dict(mock=True, tokenizer_type=None, seq_length=32, num_workers=0),
            optim=dict(lr=3e-3),
            train=dict(train_iters=2, micro_batch_size=2, global_batch_size=4, eval_iters=1),
            runtime=dict(device="cpu", compile=False),
        )
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("M-*-", "tp2-sp"),
        ("M-*-", "pp2"),
        ("ME*-", "ep2"),
        in_full("M-*-", "cp2"),
        in_full("M-*-", "dp2-zero3"),
        in_full("ME*-", "tp2-sp"),
        in_full("ME*-", "pp2"),
    ],
)
def test_layouts_train_as_one_process(pool, name, layout):
    one = run_job(config(name, None))
    errors = compare(pool.run(run_job, config(name, layout), size=2), one)
    assert errors.within(), errors
    assert one.gradients["layers.5.join.linear_join.weight"].abs().max() > 1e-5
