"""Submit, wait, follow, cancel; sync and async."""

from polarq.client.asynchronous import AsyncClient
from polarq.client.client import Client
from polarq.client.results import Trajectories

__all__ = ["AsyncClient", "Client", "Trajectories"]
