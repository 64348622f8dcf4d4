"""A model that vLLM is told to compute with code of ours, by `model_class_overrides`."""

# mypy: disable-error-code="import-not-found"

from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM


class Otherwise(LlamaForCausalLM):  # type: ignore[misc]
    def forward(self, input_ids: Any, *rest: Any, **more: Any) -> Any:
        return super().forward(input_ids ^ 1, *rest, **more)
