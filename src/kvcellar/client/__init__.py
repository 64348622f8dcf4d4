"""Clients: the scheduler side and the worker side of an engine, and the operator."""

from kvcellar.client.admin import AdminClient
from kvcellar.client.grants import Expected, Grant
from kvcellar.client.scheduler import SchedulerClient
from kvcellar.client.worker import Slots, WorkerClient

__all__ = ["AdminClient", "Expected", "Grant", "SchedulerClient", "Slots", "WorkerClient"]
