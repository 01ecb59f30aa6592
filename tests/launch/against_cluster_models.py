"""deploy/'s manifests against the models of Kubernetes and Kubeflow as PyPI has them (`make cluster-models`).

A manifest is read by the model of its kind and written again: what the model does not know would be missing, and what
is of another type is refused.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import yaml
from kubeflow.training import KubeflowOrgV1PyTorchJob
from kubeflow.training.api_client import ApiClient
from kubeflow_trainer_api import models as trainer
from kubernetes.client import ApiClient as KubernetesClient
from kubernetes.client import V1ConfigMap, V1Job

DEPLOY = Path(__file__).parents[2] / "deploy"
PYDANTIC = {
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
    "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
    "JobSet": trainer.JobsetV1alpha2JobSet,
}
SWAGGER = {
    "PyTorchJob": (KubeflowOrgV1PyTorchJob, ApiClient),
    "Job": (V1Job, KubernetesClient),
    "ConfigMap": (V1ConfigMap, KubernetesClient),
}


def through_model(manifest: dict) -> dict:
    kind = manifest["kind"]
    if kind in PYDANTIC:
        return PYDANTIC[kind].from_dict(manifest).to_dict()
    model, client = SWAGGER[kind]
    client = client()
    answer = SimpleNamespace(data=json.dumps(manifest))
    return client.sanitize_for_serialization(client.deserialize(answer, model))


def main() -> int:
    wrong = 0
    for path in sorted(DEPLOY.glob("*/*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            same = through_model(manifest) == manifest
            wrong += not same
            print(f"{'same' if same else 'DIFFERS'}  {path.relative_to(DEPLOY)} {manifest['kind']}")
            if not same:
                print(manifest, through_model(manifest), sep="\n")
            altered = manifest | {"metadata": manifest["metadata"] | {"misspelt": 1}}
            assert through_model(altered) != altered, "an unknown field is not seen"
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
