"""Teachers for distillation: models in memory, stored predictions, servers, and several teachers by data source."""
