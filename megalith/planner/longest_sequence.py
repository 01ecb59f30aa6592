"""Search for the longest sequence that fits into the devices' memory."""

from __future__ import annotations

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.planner.plan_result import PlanResult
from megalith.planner.rates import Rates
from megalith.planner.search import plan
from megalith.progress import Progress


def longest_sequence(
    config: RunConfig,
    gpus: int,
    rates: Rates,
    gpus_per_node: int = 8,
    memory_gb: float | None = None,
    show_progress: bool = False,
) -> PlanResult | None:
    """Return the best plan for the longest sequence that fits on `gpus` GPUs, or None if 1,024 tokens do not fit.

    Lengths are multiples of 1,024. The batch size shrinks as the length grows, so the tokens per step stay about the
    same.
    """
    tokens = config.train.global_batch_size * config.data.seq_length

    def fitting(blocks: int) -> PlanResult | None:
        seq = 1024 * blocks
        positions = max(seq, config.model.max_position_embeddings or 0)
        batch = max(2 ** max(tokens // seq, 1).bit_length() // 2, 1)
        settings = {
            "data.seq_length": seq,
            "model.max_position_embeddings": positions,
            "train.global_batch_size": batch,
        }
        try:
            options = dict(rates=rates, gpus_per_node=gpus_per_node, memory_gb=memory_gb)
            result = plan(config.with_settings(settings), gpus, top=1, **options)
        except ConfigError:
            return None
        finally:
            progress.update(progress.done + 1, f"{seq:,} tokens tried")
        return result if result.best else None

    low, best = 0, None
    blocks = 1
    with Progress("longest sequence", None, show=show_progress) as progress:
        while blocks <= 2**14 and (result := fitting(blocks)) is not None:
            low, best, blocks = blocks, result, 2 * blocks
        step = low // 2
        while step >= max(low // 8, 1):  # to an eighth
            if (result := fitting(low + step)) is not None:
                low, best = low + step, result
            step //= 2
    return best
