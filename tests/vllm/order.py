"""When a step's copies start: the connector as vLLM's own model runners call it around a forward. A program
for vLLM's own interpreter; test_order.py runs it. Answers with a line of JSON: by runner, what happened.
"""

# mypy: disable-error-code="import-not-found"

import contextlib
import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.vllm.engine import set_environment, take_stdout


class Worker:
    """Notes when it is asked for copies."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def take(self, _: Any) -> None:
        self.seen.append("copies")

    def finished_loads(self) -> tuple[set[str], set[str]]:
        return set(), set()

    def stats(self) -> None:
        return None

    report = stats


def main() -> None:
    answers = take_stdout()
    set_environment(ranks=1)
    from vllm.v1.worker import kv_connector_model_runner_mixin as first  # noqa: PLC0415
    from vllm.v1.worker.gpu import kv_connector as second  # noqa: PLC0415

    from kvcellar.vllm import KVCellarConnector  # noqa: PLC0415

    step = SimpleNamespace(kv_connector_metadata=object(), has_sync_kv_loads=False, finished_req_ids=set())

    def around_forward(module: Any, run: Any) -> list[str]:
        connector = object.__new__(KVCellarConnector)
        connector._worker = worker = Worker()
        with contextlib.ExitStack() as patches:
            for name in ("get_kv_transfer_group", "get_forward_context"):
                patches.enter_context(mock.patch.object(module, name, return_value=connector))
            run(connector, lambda: worker.seen.append("forward"))
        return worker.seen

    def by_first(_: Any, forward: Any) -> None:
        with first.KVConnectorModelRunnerMixin._get_kv_connector_output(step):
            forward()

    def by_second(connector: Any, forward: Any) -> None:
        runner = object.__new__(second.ActiveKVConnector)
        runner.kv_connector, runner._disabled, runner._pending_load_kwargs = connector, False, None
        with mock.patch.object(second, "is_forward_context_available", return_value=True):
            runner.pre_forward(step)
            forward()
            runner.finish_forward()
            runner.post_forward(set())

    seen = {"V1": around_forward(first, by_first), "V2": around_forward(second, by_second)}
    print(json.dumps(seen), file=answers, flush=True)


if __name__ == "__main__":
    main()
