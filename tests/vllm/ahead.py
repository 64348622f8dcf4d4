"""Makes vLLM's CPU backend schedule ahead, as engines on GPUs do: a step is planned before the one before it
is handled, and what a rank reports of a step is heard of after the next one has begun.

The backend turns that off, since without a device of its own there is nothing to gain. The scheduler, the
engine's loop and the order of the connector's calls are then those of a GPU; only that a step's tokens are
there as soon as it was launched. To be called in vLLM's interpreter, before there is an engine.
"""

# mypy: disable-error-code="import-not-found"

import contextlib
from typing import Any


def schedule_ahead() -> None:
    import torch  # noqa: PLC0415 -- only vLLM's interpreter has it
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    checked = CpuPlatform.check_and_update_config

    def check(cls: type, config: Any) -> None:
        checked(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)
    # What hands over a step's tokens waits for a stream's end. Here they are computed by then.
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda *_: None
    torch.cuda.stream = lambda *_: contextlib.nullcontext()


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass
