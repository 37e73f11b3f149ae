"""Model `tensorrt_llm`: the executor behind Triton's decoupled protocol.

Every request becomes a sequence of the executor at once; Triton's own queue stays empty, and the queue limit, timeout
and priority that hold are the executor's. Requests come from Triton and, from `tensorrt_llm_bls`, through a door;
answers go out through an outbox thread.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from sits_trt.checkpoint.tokenizer import Tokenizer
from sits_trt.errors import EngineDead
from sits_trt.runtime.executor import Executor
from sits_trt.runtime.load import load_executor
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.serving.bodies.door import Door, door_path
from sits_trt.serving.bodies.intake import Intake
from sits_trt.serving.bodies.metrics import Metrics
from sits_trt.serving.bodies.model import Settings, TritonSink, call_of, metric_family
from sits_trt.serving.bodies.outbox import Outbox
from sits_trt.serving.bodies.request import Defaults
from sits_trt.serving.bodies.tickets import Tickets, TicketTable, table_path

logger = logging.getLogger(__name__)

EXIT_ENGINE_DEAD = 70


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname).1s %(name)s: %(message)s")
        settings = Settings(args)
        defaults = Defaults(settings.flag("exclude_input_in_output"), settings.count("queue_timeout_ms"))
        self._executor = _load(settings)
        tokenizer, tickets = self._executor.tokenizer, Tickets()
        assert isinstance(tokenizer, Tokenizer), "load_executor gives every executor a tokenizer"
        table = TicketTable(table_path(), create=True)
        self._outbox = Outbox(settings.number("cancellation_check_period_ms") / 1000, tickets, table)
        self._executor.start()
        _warm_up(self._executor)
        labels = {"model": settings.model, "version": settings.version}
        self._metrics = Metrics(metric_family, labels, since=self._executor.stats())
        self._metrics.publish(self._executor.stats())
        self._closing = threading.Event()
        self._publisher = threading.Thread(
            target=self._publish,
            args=(settings.number("stats_check_period_ms") / 1000,),
            name="sits-stats",
            daemon=True,
        )
        self._outbox.start()
        self._publisher.start()
        self._intake = Intake(self._executor, tokenizer, defaults, self._outbox, tickets)
        self._door = Door(door_path(), self._intake.take)
        logger.info("serving with the %s", self._executor.description)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests in; answers follow from other threads."""
        for request in requests:
            self._intake.take(functools.partial(call_of, request), TritonSink(request))

    def _publish(self, period_s: float) -> None:
        while not self._closing.wait(period_s):
            stats = self._executor.stats()
            self._metrics.publish(stats)
            if stats.error and not self._outbox.num_open:
                # Every caller has heard of it. A model that can serve nobody must not look ready.
                logger.error("%s", stats.error)
                os._exit(EXIT_ENGINE_DEAD)

    def finalize(self) -> None:
        self._door.close()
        self._closing.set()
        self._publisher.join()
        self._executor.shutdown()
        self._outbox.close()
        table_path().unlink(missing_ok=True)


def _load(settings: Settings) -> Executor:
    has_bound = "max_tiles" in settings.config["parameters"]
    return load_executor(
        settings.path("gpt_model_path"),
        max_batch_size=settings.count("max_num_sequences"),
        max_queue_size=settings.count("max_queue_size"),
        queue_timeout_ms=settings.count("queue_timeout_ms"),
        memory_fraction=settings.number("kv_cache_free_gpu_mem_fraction"),
        max_tiles=settings.count("max_tiles") if has_bound else None,
        runner=settings.text("runner"),
    )


def _warm_up(executor: Executor) -> None:
    """Run one step, so that the first request does not wait for what a runner sets up at its first step."""
    for event in executor.stream(Request("warm-up", (0,), SamplingParams(max_tokens=1))):
        if event.error:
            raise EngineDead(event.error)
