# The types of what `megalith` exports, for editors and type checkers, which do not see what is imported on first use.
from megalith.config import ModelConfig as ModelConfig
from megalith.config import OptimConfig as OptimConfig
from megalith.config import ParallelConfig as ParallelConfig
from megalith.config import RunConfig as RunConfig
from megalith.data.batch import Batch as Batch
from megalith.data.loader import Loader as Loader
from megalith.data.mock_datasets import MockDataset as MockDataset
from megalith.data.own_dataset import DatasetRequest as DatasetRequest
from megalith.data.own_dataset import register_dataset as register_dataset
from megalith.models.loss import CrossEntropy as CrossEntropy
from megalith.models.loss import Loss as Loss
from megalith.models.own_model import Model as Model
from megalith.optim.optimizer import register_optimizer as register_optimizer
from megalith.parallel.mesh import Mesh as Mesh
from megalith.parallel.model_spec import Head as Head
from megalith.parallel.model_spec import ModelSpec as ModelSpec
from megalith.parallel.parallel_model import ParallelModel as ParallelModel
from megalith.parallel.tensor.building_blocks import ColumnParallelLinear as ColumnParallelLinear
from megalith.parallel.tensor.building_blocks import RowParallelLinear as RowParallelLinear
from megalith.parallel.tensor.building_blocks import VocabParallelEmbedding as VocabParallelEmbedding
from megalith.planner.search import plan as plan
from megalith.rl.grpo import train_grpo as _train_grpo
from megalith.training.custom_loop import Optimizer as Optimizer
from megalith.training.custom_loop import init_mesh as init_mesh
from megalith.training.custom_loop import load_checkpoint as load_checkpoint
from megalith.training.custom_loop import parallelize as parallelize
from megalith.training.custom_loop import save_checkpoint as save_checkpoint
from megalith.training.loading import load as load
from megalith.training.training_job import train as train

__version__: str

grpo = _train_grpo
