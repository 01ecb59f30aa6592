"""Codes and meanings of the causes that an audit can name."""

from __future__ import annotations

# fmt: off
CAUSES = {
    "missing-dp-reduction":
        "the gradients of each data-parallel rank are those of its own micro-batches: the reduction over "
        "data-parallel ranks is missing",
    "missing-reduction":
        "copies of the parameter have different gradients, which add up to the right one over the ranks of an "
        "axis: the reduction over that axis is missing",
    "reduced-twice":
        "the gradient is multiplied by the size of an axis: it is reduced over that axis although each rank "
        "already has the whole gradient",
    "divided-twice":
        "the gradients are divided twice by the number of data-parallel ranks",
    "not-divided":
        "the gradients are summed over data-parallel ranks and not divided by their number",
    "accumulation-divided-twice":
        "the loss is divided twice by the number of micro-batches",
    "accumulation-not-divided":
        "the loss is not divided by the number of micro-batches that are accumulated",
    "sum-not-mean":
        "the loss is a sum over tokens, not a mean",
    "unshifted-count":
        "the loss is divided by the number of labels before they are shifted, which counts labels of first tokens",
    "loss-scale":
        "the gradients still have the factor of an fp16 loss scaler",
    "clipped":
        "the gradients are already clipped; call audit.step() before clipping, or pass max_norm to AuditHook",
    "clipped-per-rank":
        "each rank clips the gradients by the norm of its own shards, not by the global norm",
    "rank-factor":
        "the gradients of each rank have a factor of their own",
    "factor":
        "the gradients have a factor that no count of ranks, micro-batches or tokens explains",
    "micro-batch-mean":
        "the loss is the mean of the micro-batches' means: each micro-batch is divided by its own number of "
        "valid tokens, not by that of the step",
    "rank-mean":
        "the loss is the mean of the data-parallel ranks' means: each rank divides by its own number of valid "
        "tokens, not by that of the step",
    "last-micro-batch":
        "only the last micro-batch counts: the gradients of the others are lost",
    "first-micro-batch":
        "only the first micro-batch counts: the gradients of the others are lost",
    "not-zeroed":
        "the gradients of the previous step are still in them: they are not set to zero",
    "same-data":
        "data-parallel ranks have the same tokens: the sampler does not know the rank",
    "labels-shifted-twice":
        "the labels are shifted twice: each token predicts the one after the next",
    "labels-not-shifted":
        "the labels are not shifted: each token predicts itself",
    "loss-mask-ignored":
        "every token counts in the loss: labels that are masked out are not ignored",
    "padding-in-loss":
        "padding counts in the loss, as a label or as the token that predicts one",
    "attention-mask-ignored":
        "tokens attend to padding: the attention mask is not used",
    "attends-to-future":
        "tokens attend to later ones: the causal mask is missing",
    "position-ids-ignored":
        "position_ids are not used: positions do not restart with each document",
    "attends-across-documents":
        "tokens attend to other documents of their sequence",
    "documents-ignored":
        "documents of a sequence are ignored, by positions and by attention",
    "token-weights":
        "the loss weights of some tokens are wrong",
    "dropout":
        "dropout is on",
    "tied-weights":
        "the embedding and the output matrix are two parameters, each with a part of the gradient, although "
        "config.json ties them",
    "no-gradient":
        "the parameter gets no gradient: it is frozen, detached or not used",
    "weights-differ":
        "copies of the parameter have different values",
    "not-finite":
        "gradients are NaN or infinite",
    "model-setting":
        "the job computes with a setting that differs from config.json",
    "router-loss":
        "the routers have a loss of their own (balancing or z-loss), which the reference does not compute",
    "forward-reduction":
        "tensor-parallel ranks compute different activations from the same tokens: an all-reduce is missing in "
        "the forward pass",
    "backward-reduction":
        "the loss is right, but tensor-parallel ranks compute different gradients below a layer: the all-reduce "
        "of a column-parallel linear's dgrad is missing",
    "backward":
        "the loss and the gradients above a layer are right, those below it are not: an activation is detached "
        "or rescaled in the backward pass",
    "loss-reported":
        "the gradients are right, but the recorded loss is not the micro-batch's",
    "unexplained":
        "no cause that the audit knows explains it",
}
# fmt: on
"""Meaning of each cause, by code."""
