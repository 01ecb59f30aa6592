"""transformers does not train the padding token's row of the embedding, except through a tied output matrix."""

import pytest
from accelerate_job import BATCH, PADDING, close, gradients, model_of, one_step, samples, stacked

LAYOUTS = {
    "TP2 + SP": dict(tp_degree=2, sequence_parallelism=True),
    "PP2": dict(pp_degree=2, num_micro_batches=2),
    "FSDP": dict(use_custom_fsdp=True),
}
KINDS = ("llama with padding", "tied llama with padding")


def row_is_transformers(kind, layout, expected):
    accelerator, model, optimizer, batch = one_step(kind, **layout)
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    found = gradients(accelerator, model, kind)
    for name, gradient in expected.items():
        close(found[name], gradient)


def expected_gradients(kind):
    plain = model_of(kind)
    plain(**stacked(samples(BATCH))).loss.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    row = gradients["model.embed_tokens.weight"][PADDING]
    assert bool(row.any()) == ("lm_head.weight" not in gradients)  # tied
    return gradients


@pytest.mark.parametrize("kind", KINDS)
def test_the_padding_row_has_transformers_gradient(kind):
    row_is_transformers(kind, {}, expected_gradients(kind))


def test_the_padding_row_has_transformers_gradient_in_two_processes(pool):
    cases = {
        f"{kind}, {name}": (kind, layout, expected_gradients(kind))
        for kind in KINDS
        for name, layout in LAYOUTS.items()
    }
    pool.run_cases(row_is_transformers, cases, size=2)
