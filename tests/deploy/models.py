"""The models of Kubeflow Trainer and JobSet (kubeflow-trainer-api, made from their API) as schemas: unknown fields are errors here."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from kubeflow_trainer_api import models
from pydantic import BaseModel, ValidationError

KINDS: dict[str, type[BaseModel]] = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
PLAIN = (
    "UtilIntstrIntOrString",
    "ApiResourceQuantity",
)  # numbers or texts, which the models take for mappings; Kubernetes' schemas have them


def invalid(document: dict[str, Any], model: type[BaseModel] | None = None) -> list[str]:
    """Return what is wrong with a document of one of ``KINDS``, or of ``model``, with the path of each field."""
    model = model or KINDS[document["kind"]]
    try:
        model.model_validate(document)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        if found := [text for text in found if not text.endswith(PLAIN)]:
            return found
    return [f"{path}: there is no such field" for path in _unknown(model, document, "")]


def _unknown(model: Any, value: Any, path: str) -> Iterator[str]:
    """Yield the paths of fields that the model, or those inside of it, do not have."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _unknown(model, item, f"{path}[{i}]")
    if not isinstance(value, dict) or not (isinstance(model, type) and issubclass(model, BaseModel)):
        return
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, item in value.items():
        if name not in fields:
            yield f"{path}.{name}".lstrip(".")
            continue
        inner = next((one for one in _models(fields[name].annotation)), None)
        yield from _unknown(inner, item, f"{path}.{name}".lstrip("."))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in ``Optional[List[Model]]`` and the like; none in a plain mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) is not dict:
        for argument in typing.get_args(annotation):
            yield from _models(argument)
