"""Teachers of distillation: models in memory, stored predictions, servers, and several of them by data."""
