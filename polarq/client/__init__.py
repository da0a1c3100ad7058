"""Submit, wait, follow, cancel; sync and async."""

from polarq.client.client import AsyncClient, Client
from polarq.client.results import Trajectories

__all__ = ["AsyncClient", "Client", "Trajectories"]
