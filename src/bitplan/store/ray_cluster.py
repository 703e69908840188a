"""A Ray cluster: an existing one by its address, or one on this machine."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, final

from bitplan.core.errors import InputError, MissingExtra
from bitplan.core.trust import is_looked_into
from bitplan.core.worker_payload import pack_payload, unpack_payload
from bitplan.store.engines import Failure, attempt

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
_AHEAD = 4  # items waiting per place that could run one: enough to keep it busy, little to hold


@final
@dataclass(frozen=True)
class Cluster:
    """Every item is a Ray task with `cpus` and `gpus`; one whose worker or node dies runs again, up to `retries` times.

    `address` is that of an existing cluster ("auto" finds one on this machine); without it, and without RAY_ADDRESS in
    the environment, one is started here and lives as long as this process.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    retries: int = 3

    def run(self, work: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[tuple[Item, Outcome | Failure]]:
        """Do the work on every item; what one raises becomes its Failure."""
        ray = _connected(self.address)
        self._check_room(ray)
        task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries)(_do)
        sent = pack_payload(work, ray.cloudpickle.dumps)  # also what a script defines itself
        key, shared = hashlib.sha256(sent).hexdigest(), ray.put(sent)
        waiting = iter(items)
        running: dict[Any, Item] = {}
        while True:
            self._fill_(running, waiting, lambda item: task.remote(key, shared, item), self._room(ray))
            if not running:
                return
            ready, _ = ray.wait(list(running), num_returns=1)
            for reference in ready:
                yield running.pop(reference), _outcome(ray, reference)

    @staticmethod
    def _fill_(running: dict[Any, Item], waiting: Iterator[Item], start: Callable[[Item], Any], room: int) -> None:
        while len(running) < room:
            try:
                item = next(waiting)
            except StopIteration:
                return
            running[start(item)] = item

    def _room(self, ray: ModuleType) -> int:
        """How many items to have under way, as the cluster is now."""
        have = ray.cluster_resources()
        places = have.get("CPU", 0) / self.cpus if self.cpus else 64
        if self.gpus:
            places = min(places, have.get("GPU", 0) / self.gpus)
        return _AHEAD * max(1, int(places))

    def _check_room(self, ray: ModuleType) -> None:
        """Refuse what no node could ever run: Ray itself would wait for ever."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= self.gpus for node in nodes):
            raise InputError(
                f"no node of the cluster has {self.cpus} CPUs and {self.gpus} GPUs: lower cpus or gpus of the engine, "
                "or add such a node"
            )


_unpacked: dict[str, Any] = {}
"""On a worker: the work it did last, so that a model is unpickled once per process rather than once per item."""


def _do(key: str, work: bytes, item: Any) -> Any:
    """One item, on a worker of the cluster."""
    if key not in _unpacked:
        _unpacked.clear()
        _unpacked[key] = unpack_payload(work)
    return attempt(_unpacked[key], item)


def _outcome(ray: ModuleType, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:  # its worker or node died once too often
        line = str(error).strip().splitlines()[0]
        return Failure(f"{type(error).__name__}: {line}", str(error), fault="worker")


def _connected(address: str | None) -> ModuleType:
    """Ray, connected; a connection that exists is used as it is."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtra("ray", "cluster", "the cluster engine")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if not ray.is_initialized():
        try:
            _knock(address)
            quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
            # Without an address Ray would join any cluster that it finds on this machine, somebody else's too.
            found = address or os.environ.get("RAY_ADDRESS") or "local"
            ray.init(address=found, job_config=_job(ray), **quiet)
        except (OSError, ValueError) as error:
            raise InputError(
                f"no Ray cluster answers at {address!r} ({str(error).splitlines()[0]}): start one with "
                "`ray start --head`, or leave the address out"
            ) from None
    module: ModuleType = ray
    return module


class _OwnPath(list[str]):
    """Folders that workers look for modules in, as far as this process looks there itself."""

    def extend(self, folders: Iterable[str]) -> None:
        """Leave out the current folder, which Ray adds whatever it is, and which may be anybody's."""
        super().extend(filter(is_looked_into, folders))


def _job(ray: ModuleType) -> Any:
    """What Ray tells the workers of this job."""
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _OwnPath()
    return job


def _knock(address: str | None) -> None:
    """Raise OSError where nobody listens at host:port: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()
