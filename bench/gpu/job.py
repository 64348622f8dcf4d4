"""The child of prove.py: one engine, and the parts that it is to go through, or commands. See children.py."""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bench.gpu import interference, timeline, tokens, ttft
from bench.gpu.children import TURNS
from bench.gpu.engine import CACHES, Engine
from bench.gpu.progress import say
from bench.gpu.scale import FULL, SMALL
from kvcellar.client import AdminClient

# Seconds that a part may take, some three times of what it should.
LIMITS = {
    "timeline": 120,
    "tokens": 150,
    "flip": 60,
    "first": 60,
    "second": 60,
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    scale = SMALL if job["small"] else FULL
    result: dict[str, Any] = {}
    begun = time.monotonic()
    engine = Engine(scale, job["model"], Path(job["folder"]), job["transfer"], **job.get("options", {}))
    result["engine_s"] = time.monotonic() - begun
    say(f"the engine is up after {result['engine_s']:.1f} s")
    if job["parts"] == [TURNS]:
        _obey(engine, job, result)
    else:
        _go_through(engine, job, result)
        sys.stdin.read()  # until the parent has seen enough
    os._exit(0)  # the parent ends what this has started


def _go_through(engine: Engine, job: dict[str, Any], result: dict[str, Any]) -> None:
    for part in job["parts"]:
        try:
            signal.signal(signal.SIGALRM, _too_long)
            signal.alarm(LIMITS[part])
            result |= _PARTS[part](engine, job)
        except Exception as error:  # noqa: BLE001 - the parts that follow may still go well
            traceback.print_exc()
            result.setdefault("errors", {})[part] = f"{type(error).__name__}: {error}"
            say(f"{part} FAILED: {error}")
        finally:
            signal.alarm(0)
        _write(job, result)
    if engine.scale.gpu and result.get("timeline"):
        result["bus_gbps"] = ttft.bus_rate() / 1e9
    _write(job, result | {"done": True})


def _obey(engine: Engine, job: dict[str, Any], about: dict[str, Any]) -> None:
    """Commands, a line each, until there are no more. That it is up is the first answer."""
    _write(job, about | {"answered": 0})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            found = _do(engine, job, command)
        except Exception as error:  # noqa: BLE001 - the parent decides
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        _write(job, found | {"answered": command["number"]})


def _do(engine: Engine, job: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    cached = job["mode"] in CACHES
    match command["do"]:
        case "warm_up":
            _warm_up(engine, job)
            return {}
        case "ttft":
            return ttft.one_round(engine, command["tokens"], reload=cached)
        case "cold":
            return ttft.cold_round(engine, command["tokens"])
        case "interference":
            return {"pairs": interference.one_round(engine, command["round"], loads=cached)}
        case "bus":
            return {"bus_gbps": ttft.bus_rate() / 1e9}
    raise ValueError(f"no such command: {command}")


def _too_long(*_: object) -> None:
    raise TimeoutError("took too long")


def _write(job: dict[str, Any], result: dict[str, Any]) -> None:
    path = Path(job["result"])
    path.with_suffix(".new").write_text(json.dumps(result))
    path.with_suffix(".new").rename(path)


def _warm_up(engine: Engine, job: dict[str, Any]) -> None:
    # One that will be loaded: any other would only take room from those.
    ttft.warm_up(engine, interference.prompts(engine)[0], rest=job["mode"] in CACHES)
    say("warmed up")


def _timeline(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    _warm_up(engine, job)
    return {"timeline": timeline.measure(engine, Path(job["folder"]) / timeline.NAME)}


def _tokens(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": tokens.compare(engine, job["prompts"])}


def _flip(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    def corrupt() -> int:
        with AdminClient(Path(job["socket"])) as admin:
            return int(admin.status().counts.get("corrupt", 0))

    return {"flip": tokens.flip(engine, Path(job["memory"]), corrupt)}


def _shared_prompt(engine: Engine) -> list[int]:
    """The same in both engines: the first that each of them draws."""
    return engine.prompt(engine.scale.chunk * 8 + 5)


def _first(engine: Engine, _: dict[str, Any]) -> dict[str, Any]:
    prompt = _shared_prompt(engine)
    cold, kept = (engine.run(prompt, tokens.TOKENS, logprobs=2) for _ in range(2))
    time.sleep(1)
    engine.forget()  # waits for what is being stored
    return {"cold": cold._asdict(), "kept": kept._asdict()}


def _second(engine: Engine, _: dict[str, Any]) -> dict[str, Any]:
    return {"warm": engine.run(_shared_prompt(engine), tokens.TOKENS, logprobs=2)._asdict()}


_PARTS = {
    "timeline": _timeline,
    "tokens": _tokens,
    "flip": _flip,
    "first": _first,
    "second": _second,
}


if __name__ == "__main__":
    main()
