"""Extension points of GRPO and DPO: losses, advantage estimators, rewards, environments and tool call formats.

The tables map the name of each built-in extension to "module:object". A setting takes such a name, or the user's own
extension as `path.py:object`. `megalith.config.load_extension` loads both.
"""

from __future__ import annotations

from collections.abc import Mapping

LOSSES: dict[str, str] = {  # rl.loss_type
    "dapo": "megalith.rl.losses.dapo:Dapo",
    "grpo": "megalith.rl.losses.grpo_sequence_mean:Grpo",
    "dr_grpo": "megalith.rl.losses.dr_grpo:DrGrpo",
    "luspo": "megalith.rl.losses.luspo:Luspo",
    "cispo": "megalith.rl.losses.cispo:Cispo",
    "sapo": "megalith.rl.losses.sapo:Sapo",
    "vespo": "megalith.rl.losses.vespo:Vespo",
    "gmpo": "megalith.rl.losses.gmpo:Gmpo",
    "gpg": "megalith.rl.losses.gpg:Gpg",
    "kl_cov": "megalith.rl.losses.kl_cov:KlCov",
    "clip_cov": "megalith.rl.losses.clip_cov:ClipCov",
    "token_sum": "megalith.rl.losses.token_sum:TokenSum",
    "rloo": "megalith.rl.losses.rloo_loss:RlooLoss",
    "reinforce": "megalith.rl.losses.reinforce:Reinforce",
    "online_dpo": "megalith.rl.losses.pair_loss:OnlineDpo",
    "online_ipo": "megalith.rl.losses.pair_loss:OnlineIpo",
}
ADVANTAGE_ESTIMATORS: dict[str, str] = {  # rl.advantage_estimator
    "group": "megalith.rl.advantage_estimators.group:group_relative",
    "rloo": "megalith.rl.advantage_estimators.rloo:rloo",
    "reinforce_plus_plus": "megalith.rl.advantage_estimators.reinforce_plus_plus:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "megalith.rl.advantage_estimators.reinforce_plus_plus:reinforce_plus_plus_baseline",
    "opo": "megalith.rl.advantage_estimators.opo:opo",
    "gpg": "megalith.rl.advantage_estimators.gpg_advantage:gpg",
    "grpo_passk": "megalith.rl.advantage_estimators.grpo_passk:grpo_passk",
    "gdpo": "megalith.rl.advantage_estimators.gdpo:gdpo",
    "gae": "megalith.rl.advantage_estimators.gae_rewards:gae_rewards",
}
PREFERENCE_LOSSES: dict[str, str] = {  # dpo.loss_type
    **{
        name: f"megalith.rl.preference_losses.margin_losses:{name}"
        for name in ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "exo_pair", "discopop")
    },
    **{
        name: f"megalith.rl.preference_losses.answer_losses:{name}"
        for name in ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
    },
    **{
        name: f"megalith.rl.preference_losses.reference_free:{name}"
        for name in ("cpo", "simpo", "orpo", "sft")
    },
    **{name: f"megalith.rl.preference_losses.ranked_losses:{name}" for name in ("aot", "aot_unpaired")},
}
REWARDS: dict[str, str] = {  # rl.reward_funcs
    "gsm8k": "megalith.rl.reward_functions.gsm8k:gsm8k",
    "gsm8k_flexible": "megalith.rl.reward_functions.arithmetic:arithmetic",
    "countdown": "megalith.rl.reward_functions.countdown:countdown",
    "arithmetic": "megalith.rl.reward_functions.arithmetic:arithmetic",
    "sort": "megalith.rl.reward_functions.sort:sort",
    "format": "megalith.rl.reward_functions.tags:tagged",
    "length": "megalith.rl.reward_functions.length:length",
    "math_verify": "megalith.rl.reward_functions.math_verify:math_verify",
}
CALL_FORMATS: dict[str, str] = {  # rl.tool_call_format
    "hermes": "megalith.data.chat.call_formats:hermes",
    "llama3_json": "megalith.data.chat.call_formats:llama3_json",
    "harmony": "megalith.data.chat.harmony:harmony",
    "qwen3_coder": "megalith.data.chat.tagged_calls:qwen3_coder",
    "glm45": "megalith.data.chat.tagged_calls:glm45",
    "response_template": "megalith.data.chat.call_formats:response_template",
}
ENVIRONMENTS: dict[str, str] = {  # rl.environment, as NAME:ID
    "skyrl_gym": "megalith.rl.environments.skyrl_gym:make_environment",
    "reasoning_gym": "megalith.rl.environments.reasoning_gym:make_environment",
    "textarena": "megalith.rl.environments.textarena:make_environment",
    "openenv": "megalith.rl.environments.openenv:make_environment",
}


def is_extension(value: str, built_in: Mapping[str, str]) -> bool:
    """Return True for a built-in name, and for `path.py:object`, whose file is not opened here."""
    path, colon, name = value.rpartition(":")
    return value in built_in or (bool(colon) and path.endswith(".py") and name.isidentifier())
