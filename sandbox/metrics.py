"""What operators watch: outcomes, times and use of sandboxes, for Prometheus.

pool.metrics.serve(9090)     # or pool.metrics.text(), to print or to send
"""

from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)

from sandbox.protocol import Ran, Result, Usage

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_BYTES = tuple(float(4**power) for power in range(6, 18))  # 4 KiB to 16 GiB
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Of one pool; its methods are for the pool's thread, `text` and `serve` for any."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self._outcomes = Counter(
            "jaxpt_sandbox_outcomes",
            "Jobs and graded sessions by what came of them.",
            ("domain", "outcome", "reason"),
            registry=self.registry,
        )
        self._attempts = Counter(
            "jaxpt_sandbox_attempts",
            "Attempts at jobs; above the number of jobs by those tried again.",
            ("domain",),
            registry=self.registry,
        )
        self._scripts = Counter(
            "jaxpt_sandbox_scripts",
            "Scripts in sessions by tool and by how they ended.",
            ("domain", "tool", "ending"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "jaxpt_sandbox_seconds",
            "Of each part of a job: queue, acquire, execute, grade, deliver.",
            ("domain", "part"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._use = {
            field: Histogram(
                f"jaxpt_sandbox_{field}",
                text,
                ("domain",),
                buckets=buckets,
                registry=self.registry,
            )
            for field, text, buckets in (
                ("cpu_seconds", "Processor time of a command.", _SECONDS),
                ("memory_bytes", "Peak memory of a command.", _BYTES),
                ("processes", "Most processes of a command seen alive.", _COUNTS),
                ("workspace_bytes", "Files in the workspace at its end.", _BYTES),
            )
        }

    def watch(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        """Adds figures that are asked for when they are read: {name: (text, function)}."""
        for name, (text, function) in gauges.items():
            gauge = Gauge(f"jaxpt_sandbox_{name}", text, registry=self.registry)
            gauge.set_function(function)

    def count_result(self, domain: str, result: Result) -> None:
        self._outcomes.labels(domain, result.outcome, result.reason).inc()
        self._attempts.labels(domain).inc(result.attempts)
        for part, seconds in result.seconds.items():
            self._seconds.labels(domain, part).observe(seconds)
        if "execute" in result.seconds:
            self._count_use(domain, result.usage)

    def count_script(self, domain: str, tool: str, ran: Ran) -> None:
        self._scripts.labels(domain, tool, ran.reason or "ok").inc()
        self._count_use(domain, ran.usage)

    def _count_use(self, domain: str, usage: Usage) -> None:
        for field, histogram in self._use.items():
            histogram.labels(domain).observe(getattr(usage, field))

    def text(self) -> str:
        """All of it in the Prometheus format."""
        return generate_latest(self.registry).decode()

    def serve(self, port: int, address: str = "127.0.0.1") -> Callable[[], None]:
        """Answers Prometheus on this port; returns what ends it."""
        server, thread = start_http_server(port, address, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop
