"""Each optimizer in many layouts: equal to one process, and resumed from the checkpoint of any other layout."""

import pytest
from optimizer_job import EXPERTS, GATED, LATENT, configuration, held_out_loss, losses, outcomes, started

from megalith.parity.differences import relative_error

OPTIMIZERS = {
    "groups": dict(
        optimizer="adamw",
        ema_decay=0.5,
        param_groups=[
            {"pattern": "layers.0.*.linear_*", "optimizer": "muon"},
            {"pattern": "*embedding*", "lr_mult": 0.5, "weight_decay": 0.3},
            {"pattern": "re:layernorm", "optimizer": "sgd", "lr_mult": 3},
        ],
    ),
    "muon": dict(
        optimizer="muon",
        muon_moment2_method="normuon",
        muon_split_heads=True,
        muon_coefficient_type="quintic",
        muon_momentum_warmup_iters=4,
        muon_scalar_optimizer="lion",
        lr=3e-4,
    ),
    "adamuon": dict(optimizer="muon", muon_moment2_method="adamuon", muon_split_heads=True, lr=1e-4),
    "clip": dict(optimizer="muon", qk_clip=True, qk_clip_threshold=0.6),
    "soap": dict(optimizer="soap", soap_precondition_frequency=1, adam_beta1=0.95, adam_beta2=0.95),
    "soap_kl": dict(optimizer="soap", soap_use_kl_shampoo=True, adam_beta2=0.95),
    "lion": dict(optimizer="lion", lr=3e-4),
    "ademamix": dict(optimizer="ademamix", ademamix_warmup_iters=4),
    "schedule_free_adamw": dict(optimizer="schedule_free_adamw", lr_decay_style="constant"),
    "adafactor": dict(optimizer="adafactor", lr=3e-2),
}
SCALED = GATED | dict(
    use_mup=True, mup_base_hidden_size=16, mup_base_num_layers=1, mup_scale_weight_decay=True
)
BOUNDS = {"soap_kl": 2e-3}
"""Relative differences by optimizer; 1e-5 for others. KL-Shampoo amplifies rounding by as much in a single process."""
MODELS = {"gated": GATED, "scaled": SCALED, "experts": EXPERTS, "latent": LATENT}
BY_DEFAULT = [
    ("groups", "scaled", ["tp2-sp-pp2"]),
    ("adafactor", "experts", ["ep2-dp4-zero3"]),
    ("muon", "gated", ["tp2-dp2-zero2"]),
    ("soap", "gated", ["tp2-dp2-zero2"]),
    ("clip", "gated", ["cp2-dp2-zero2", "tp2-sp-pp2"]),
]
MORE = {
    "gated": ["tp2-sp-pp2", "dp4-zero3-hybrid", "tp4", "tp2-dp2-zero2", "cp2-dp2-zero2"],
    "experts": ["tp2-sp-etp2-ep2", "ep2-dp4-zero3", "tp2-dp2"],
    "latent": ["tp2-sp-dp2-zero3"],
}
CASES = BY_DEFAULT + [
    pytest.param(optimizer, kind, layouts, marks=pytest.mark.full)
    for optimizer in OPTIMIZERS
    for kind, layouts in MORE.items()
]


@pytest.mark.parametrize(("optimizer", "kind", "layouts"), CASES)
def test_an_optimizer_equals_one_process_in_every_layout_and_resumes_in_any_other(
    pool, tmp_path, optimizer, kind, layouts
):
    config = configuration("", MODELS[kind], **OPTIMIZERS[optimizer])
    one = losses(config, save=str(tmp_path / "one"))
    assert one[-1] < held_out_loss(started(config)) - 1e-3
    configs = [configuration(layout, MODELS[kind], **OPTIMIZERS[optimizer]) for layout in layouts]
    saves = [str(tmp_path / str(number)) for number in range(len(layouts))]
    bound = BOUNDS.get(optimizer, 1e-5)
    for rank in pool.run(outcomes, configs, saves, [str(tmp_path / "one")] * len(layouts)):
        for layout, (whole, resumed) in zip(layouts, rank, strict=True):
            assert relative_error(whole, one) < bound, layout
            assert relative_error(resumed, one[1:]) < bound, layout
    for layout, save in zip(layouts, saves, strict=True):
        assert relative_error(losses(config, load=save), one[1:]) < bound, layout
